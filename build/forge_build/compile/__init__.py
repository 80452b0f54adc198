"""Compile: from a patched source tree to a wheel, in a builder container without network, at fixed paths.

Equal trees, patches, tool chain and flags give equal bytes, so a wheel made before is used again. Measured with nvcc 13.0: without
`--objdir-as-tempdir` a process id enters the object, and absolute source and header paths are embedded, hence the fixed paths.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from forge_build.compile.container import builder, copy_in, copy_out, follow
from forge_build.compile.wheel import write_wheel
from forge_build.manifest import BuiltWheel, Manifest
from forge_build.patch import PatchedTree
from forge_core.cli import project_root
from forge_core.console import Console, Step, duration, size
from forge_core.engine import Engine
from forge_core.errors import EnvironmentFailure, IntegrityError, Refused, UsageError
from forge_core.model import canonical_sha256, file_sha256
from forge_core.store import Store

_SITE = "/opt/builder/lib/python{python}/site-packages"
_UNIT = re.compile(r"^forge: unit (\d+)\+(\d+) of (\d+): (.*)$")
_ERROR = re.compile(
    r"(?i)\b(?:fatal )?error\b\s*[:#]|^ptxas fatal|^nvcc fatal|cannot find -l|undefined reference|^ninja: error"
)
_KILLED = re.compile(r"died due to signal 9|Killed signal terminated|^Killed$|\bsignal 9\b")
# Heaviest FlashInfer FP4 unit measured: 6.4 GB in one process for the GEMM; quantisation stays below 1.5 GB.
_BYTES_PER_JOB = 3_000_000_000


@dataclass(frozen=True)
class Wheel:
    """A wheel made here."""

    name: str
    path: Path
    file: str
    sha256: str
    size: int
    """Bytes."""
    key: str
    cached: bool
    seconds: float


def compile_wheel(
    name: str,
    manifest: Manifest,
    tree: PatchedTree,
    builder_image: str,
    engine: Engine,
    store: Store,
    *,
    log: Path,
    console: Console,
    keep: bool = False,
) -> Wheel:
    """Compile one wheel of the manifest, or take the one that equal inputs gave before.

    Raises Refused (1) with the first compiler error when a unit does not compile, EnvironmentFailure (3) when the compiler
    was killed for want of memory.
    """
    spec = manifest.wheels[name]
    if spec.recipe != "flashinfer-jit":
        raise UsageError(
            f"wheels.{name}: the recipe {spec.recipe!r} is not built yet", hint="only flashinfer-jit so far"
        )
    script = project_root() / "build" / "inside" / "compile_flashinfer.py"
    units = _units(name, spec)
    environment = _environment(manifest, spec)
    key = canonical_sha256(
        {
            "tree": tree.patched_tree,
            "version": tree.version,
            "builder": builder_image,
            "units": units,
            "environment": environment,
            "script": file_sha256(script),
            "packing": file_sha256(Path(write_wheel.__code__.co_filename)),
            "epoch": manifest.epoch,
            "platform": manifest.target.platform,
        }
    )
    with console.step("compile", f"{name} {tree.version} for {', '.join(spec.architectures)}, network off") as step:
        with store.derived_lock("wheel", key):
            made = store.derived_get("wheel", key)
            cached = made is not None
            if made is None:
                with tempfile.TemporaryDirectory(prefix="wheel-", dir=store.root / "partial") as scratch:
                    log.unlink(missing_ok=True)
                    argv = ["python", "/forge/inside/compile_flashinfer.py", "/forge/out", *units]
                    with builder(
                        engine, builder_image, argv, environment | {"MAX_JOBS": str(_jobs())}, name=name, keep=keep
                    ) as container:
                        files = {"/forge/src": tree.path, "/forge/inside/compile_flashinfer.py": script}
                        copy_in(container, files, epoch=manifest.epoch)
                        _run(container, name, step, log)
                        out = copy_out(container, "/forge/out", Path(scratch))
                    path = _pack(name, manifest, tree, out, Path(scratch))
                    made = store.derived_put(
                        "wheel", key, path, {"file": path.name, "seconds": step.elapsed}, move=True
                    )
        seconds = float(made.meta["seconds"])
        amount = made.path.stat().st_size
        step.result(
            f"{made.meta['file']}, {size(amount)}" + (f", made before in {duration(seconds)}" if cached else "")
        )
    return Wheel(name, made.path, str(made.meta["file"]), made.sha256, amount, key, cached, seconds)


def _units(name: str, spec: BuiltWheel) -> list[str]:
    """`module=place` of each FlashInfer module, from `units.yaml`."""
    known: dict[str, str] = yaml.safe_load((Path(__file__).parent / "units.yaml").read_text(encoding="utf-8"))
    unknown = sorted(set(spec.modules) - set(known))
    if unknown or not spec.modules:
        raise UsageError(
            f"wheels.{name}.modules: {', '.join(unknown) or 'none named'}", hint=f"known: {', '.join(sorted(known))}"
        )
    return [f"{module}={known[module]}" for module in sorted(spec.modules)]


def _environment(manifest: Manifest, spec: BuiltWheel) -> dict[str, str]:
    """What the compiler sees; nothing else of any machine does."""
    cuda = _SITE.format(python=manifest.target.python) + "/nvidia/cu13"
    return {
        "CUDA_HOME": cuda,
        "FLASHINFER_CUDA_ARCH_LIST": " ".join(spec.architectures),
        "FLASHINFER_WORKSPACE_BASE": "/forge/workspace",
        "HOME": "/forge/home",
        # without it a process id becomes part of an ELF symbol
        "NVCC_APPEND_FLAGS": "--objdir-as-tempdir",
        "SOURCE_DATE_EPOCH": str(manifest.epoch),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "LC_ALL": "C.UTF-8",
    }


def _jobs() -> int:
    """As many compilers as cores and free memory allow."""
    return max(1, min(os.cpu_count() or 1, int(psutil.virtual_memory().available // _BYTES_PER_JOB)))


def _run(container: object, name: str, step: Step, log: Path) -> None:
    lines: list[str] = []

    def on_line(line: str) -> None:
        if match := _UNIT.match(line):
            done, total = int(match[1]) + int(match[2]), int(match[3])
            step.progress(done, total, unit="units", note=_object(match[4]))
        lines.append(line)

    status = follow(container, log, on_line)  # type: ignore[arg-type]
    if status == 0:
        return
    text = [line for line in lines if not _UNIT.match(line)]
    if status in (137, 143) or any(_KILLED.search(line) for line in text):
        raise EnvironmentFailure(
            f"{name}: a compiler was killed, most likely for want of memory (exit {status})",
            hint="free memory; the number of compilers side by side follows what is free at the start",
            log=log,
            details=tuple(line for line in text if _KILLED.search(line))[:3],
        )
    first = next((i for i, line in enumerate(text) if _ERROR.search(line)), max(0, len(text) - 8))
    raise Refused(
        f"{name} does not compile: {text[first] if text else status}",
        log=log,
        details=tuple(text[first + 1 : first + 8]),
    )


def _object(command: str) -> str:
    """The object a compiler's command line makes."""
    match = re.search(r"-o (\S+)", command)
    return match[1].rsplit("/", 1)[-1] if match else ""


def _pack(name: str, manifest: Manifest, tree: PatchedTree, out: Path, folder: Path) -> Path:
    """The wheel that FlashInfer's loader looks for: `flashinfer_jit_cache`, whose version starts as FlashInfer's own."""
    package = name.replace("-", "_")
    code = f'''"""FlashInfer's modules, compiled ahead for this image by sm120-forge."""

import pathlib

__version__ = "{tree.version}"


def get_jit_cache_dir():
    """Folder with one folder per module."""
    return str(pathlib.Path(__file__).parent / "jit_cache")
'''
    objects = sorted(out.rglob("*.so"))
    if not objects:
        raise IntegrityError(f"{name}: the compiler ended well and left no shared object")
    members: dict[str, bytes | Path] = {f"{package}/__init__.py": code.encode()}
    members |= {f"{package}/jit_cache/{path.relative_to(out).as_posix()}": path for path in objects}
    architecture, glibc = manifest.target.platform.split("-", 1)
    return write_wheel(
        folder,
        name=package,
        version=tree.version,
        tag=f"py3-none-{glibc}_{architecture}",
        members=members,
        epoch=manifest.epoch,
        summary="FlashInfer modules compiled ahead for SM120",
        headers={"Requires-Dist": f"flashinfer-python=={tree.version}", "License-Expression": "Apache-2.0"},
    )
