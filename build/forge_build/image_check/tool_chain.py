"""The image's tool chain: what is expected of it, and judging what `build/inside/tool_chain.py` saw."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from forge_build.lock import LockedWheel
from forge_build.manifest import AllowedFile, Manifest
from forge_build.wheel_check.cubin import device_code
from forge_build.wheel_check.elf import BrokenObject
from forge_core.errors import UsageError
from forge_core.model import Finding

NVCC = "nvidia-cuda-nvcc"

FOLDERS = (
    "CUDA_CACHE_PATH",
    "FLASHINFER_WORKSPACE_BASE",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "TVM_FFI_CACHE_DIR",
)
"""Variables that say where kernels compiled at run time are kept; what an image names there the server must be able to write."""


@dataclass(frozen=True)
class ToolChain:
    """What the image's tool chain must be."""

    home: str
    nvcc: str
    """Version."""
    architecture: str
    """What it is asked to compile for, for example `sm_120a`."""
    uid: int
    """Who must be able to write where kernels are compiled at run time."""


def expect(manifest: Manifest, locked: Sequence[LockedWheel], uid: int = 10001) -> ToolChain | None:
    """What the tool chain must be; none where the manifest wants none. Raises UsageError when the lock has no compiler for it."""
    if manifest.image.cuda_home is None:
        return None
    version = next((wheel.version for wheel in locked if wheel.name == NVCC), None)
    if version is None:
        raise UsageError(
            f"image.cuda_home: the lock of {manifest.profile} has no {NVCC} among the runtime's wheels",
            hint="name it in environments.runtime.requires",
        )
    return ToolChain(manifest.image.cuda_home, version, architecture(manifest), uid)


def architecture(manifest: Manifest) -> str:
    """The architecture the probe is compiled for: the one that the wheels made here are for."""
    named = sorted({name for wheel in manifest.wheels.values() for name in wheel.architectures})
    if len(named) != 1:
        raise UsageError("image.cuda_home: the wheels made here must be for one architecture", details=tuple(named))
    return f"sm_{named[0].replace('.', '')}"


def device_code_of(seen: Mapping[str, Any]) -> dict[str, Any]:
    """Architectures and PTX of the two objects that were compiled inside, as cuobjdump lists them here."""
    found = {}
    for name, data in (("compiled", seen["compiled"]["detail"]), ("triton", seen["triton"]["detail"][-1])):
        if not seen[name]["ok"]:
            continue
        with tempfile.NamedTemporaryFile(suffix=".so" if name == "compiled" else ".cubin") as file:
            file.write(base64.b64decode(data))
            file.flush()
            try:
                code = device_code(Path(file.name))
            except BrokenObject as error:
                found[name] = {"ok": False, "detail": str(error)}
                continue
            told = {"cubins": code.counts(), "ptx": sorted({name for name, _ in code.ptx})}
            found[name] = {"ok": True, "detail": told | {"tool": seen[name]["detail"][:2] if name == "triton" else []}}
    return found


def judge(
    seen: Mapping[str, Any], expected: ToolChain, allowed: Sequence[AllowedFile] = ()
) -> list[tuple[str, str, list[Finding]]]:
    """(check, what it saw, its findings), one for each thing a server needs to compile at run time.

    Files that `allowed` names may be of another CUDA.
    """
    tools = [(name, seen[name]) for name in ("ninja", "gcc", "g++")]
    home = [_finding("tool-chain", "CUDA_HOME", f"{path}: not there, or a link to nothing") for path in seen["absent"]]
    if seen["home"] != expected.home:
        home.append(_finding("tool-chain", "CUDA_HOME", f"intended {expected.home}, the server sees {seen['home']}"))
    folders = seen["folders"].values()
    absent = [_finding("tool-chain", name, "cannot be run") for name, version in tools if not version]
    return [
        ("nvcc", f"{seen['nvcc']} at {', '.join(seen['on_path'])}, no other", _nvcc(seen, expected)),
        ("tools", ", ".join(f"{name} {version}" for name, version in tools), absent),
        ("CUDA_HOME", f"{expected.home}, complete", home),
        ("device code", f"nvcc compiles and links for {expected.architecture} alone", _compiled(seen, expected)),
        ("host code", "g++ compiles with the headers of CUDA, CCCL and Python", _failed("host", seen)),
        ("triton", _triton_says(seen), _triton(seen, expected)),
        ("CUDA major", *_majors(seen, expected, allowed)),
        ("run-time kernels", f"kept in {', '.join(there for there, *_ in folders)}", _folders(seen, expected)),
    ]


def _finding(kind: str, where: str, message: str) -> Finding:
    return Finding(kind=kind, where=where, message=message)


def _failed(name: str, seen: Mapping[str, Any]) -> list[Finding]:
    return [] if seen[name]["ok"] else [_finding("tool-chain", name, str(seen[name]["detail"]))]


def _nvcc(seen: Mapping[str, Any], expected: ToolChain) -> list[Finding]:
    found = []
    if len(seen["on_path"]) != 1:
        there = ", ".join(seen["on_path"]) or "none"
        found.append(_finding("nvcc", "PATH", f"exactly one nvcc must be on it, there is {there}"))
    for path in sorted(set(seen["anywhere"]) - set(seen["on_path"])):
        found.append(_finding("nvcc", path, "another nvcc; it may be taken in place of the right one"))
    if seen["nvcc"] != expected.nvcc:
        found.append(_finding("nvcc", "version", f"locked {expected.nvcc}, found {seen['nvcc'] or 'none'}"))
    return found


def _compiled(seen: Mapping[str, Any], expected: ToolChain) -> list[Finding]:
    return _failed("compiled", seen) or _architecture("compiled", seen["compiled"]["detail"], expected)


def _architecture(name: str, code: Mapping[str, Any], expected: ToolChain) -> list[Finding]:
    if set(code["cubins"]) == {expected.architecture} and not code["ptx"]:
        return []
    there = ", ".join([*code["cubins"], *(f"PTX of {name}" for name in code["ptx"])]) or "no device code"
    return [_finding("tool-chain", name, f"asked for {expected.architecture}, the object holds {there}")]


def _triton(seen: Mapping[str, Any], expected: ToolChain) -> list[Finding]:
    if failed := _failed("triton", seen):
        return failed
    code = seen["triton"]["detail"]
    found = _architecture("triton", code, expected)
    path, version = code["tool"]
    if version != expected.nvcc:
        found.append(
            _finding("tool-chain", "triton", f"takes {path} of {version}, not the tool chain's {expected.nvcc}")
        )
    return found


def _triton_says(seen: Mapping[str, Any]) -> str:
    if not seen["triton"]["ok"]:
        return ""
    path, version = seen["triton"]["detail"]["tool"]
    return f"compiles for {', '.join(seen['triton']['detail']['cubins'])} with {path} {version}"


def _majors(seen: Mapping[str, Any], expected: ToolChain, allowed: Sequence[AllowedFile]) -> tuple[str, list[Finding]]:
    right = expected.nvcc.partition(".")[0]
    found, meant = [], 0
    for major, every in sorted(seen["majors"].items()):
        below = {path: path.rpartition("/site-packages/")[2] for path in every}
        paths = [path for path in every if not any(fnmatchcase(below[path], one.path) for one in allowed)]
        meant += (len(every) - len(paths)) if major != right else 0
        if major != right and paths:
            told = f"{', '.join(paths[:3])}{f' and {len(paths) - 3} more' if len(paths) > 3 else ''}"
            found.append(_finding("cuda-major", f"CUDA {major}", f"the image is for CUDA {right}, but there is {told}"))
    if right not in seen["majors"]:
        found.append(_finding("cuda-major", f"CUDA {right}", "no library of it is there"))
    return f"{right} alone" + (f", but for {meant} files that the manifest allows" if meant else ""), found


def _folders(seen: Mapping[str, Any], expected: ToolChain) -> list[Finding]:
    return [
        _finding("tool-chain", name, f"{there} belongs to {uid}; the server cannot write there")
        for name, (there, uid, writable) in seen["folders"].items()
        if uid != expected.uid or not writable
    ]
