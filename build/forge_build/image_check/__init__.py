"""The image check: what is in the built image, seen from inside it, without a GPU and without network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import docker.errors

from forge_build.compile.container import builder, follow, out_of_memory
from forge_build.image.recipe import HEALTH, INIT, USER, environment, labels, stand_in_files
from forge_build.image_check import tool_chain
from forge_build.image_check.judge import Expected, ImageReport, judge
from forge_build.image_check.wheels import record_digest
from forge_build.lock import Lock, LockedWheel
from forge_build.manifest import Manifest
from forge_core.cli import project_root
from forge_core.console import Console
from forge_core.engine import Engine
from forge_core.errors import EnvironmentFailure, Refused
from forge_core.explain import Evidence, explain, read_file
from forge_core.model import ImageRef, canonical_sha256, file_sha256

__all__ = ["Expected", "ImageReport", "check", "expect", "judge", "key", "record_digest"]

_PART, _END = "forge-image-check ", "forge-image-check-end"


def check(
    image: ImageRef | str,
    manifest: Manifest,
    locked: Sequence[LockedWheel],
    built: Mapping[str, str],
    modules: Mapping[str, str],
    engine: Engine,
    *,
    wheels: Sequence[Path],
    log: Path,
    console: Console,
    keep: bool = False,
) -> ImageReport:
    """Run `build/inside/image_check.py` in the image, its file system read-only, and judge what it saw.

    `built` maps the names of wheels made here to their versions, `modules` FlashInfer modules to the functions that describe them;
    `wheels` are the files of all of both, against whose RECORD the installed files are held. Raises Refused (1) naming every
    finding, EnvironmentFailure (3) when the check itself could not run.
    """
    expected = expect(manifest, locked, built, wheels)
    cuda = ".".join(expected.versions.get("nvidia-cuda-runtime", "").split(".")[:2])
    request = {
        "imports": list(manifest.image.imports),
        "command": [*manifest.image.command, "--help"],
        "modules": dict(modules),
        "cuda": cuda,
        "tool_chain": _tool_chain(manifest),
    }
    with console.step("image check", "versions, files, imports, loader, command line; network off") as step:
        try:
            config = engine.client.images.get(str(image)).attrs["Config"]
        except docker.errors.ImageNotFound as error:
            raise EnvironmentFailure(f"the image {image} is not in the engine", hint="run the build again") from error
        parts: list[str] = []

        def on_line(line: str) -> None:
            if line.startswith(_PART) or line == _END:
                parts.append(line.removeprefix(_PART))

        # Without a GPU FlashInfer's loader cannot ask the device what to look for.
        architectures = sorted({a for w in manifest.wheels.values() for a in w.architectures})
        variables = {"HOME": "/tmp", "FLASHINFER_CUDA_ARCH_LIST": " ".join(architectures)}  # noqa: S108 - inside
        # in this container only /tmp can be written
        variables |= dict.fromkeys(tool_chain.FOLDERS, "/tmp/kernels")  # noqa: S108 - inside
        argv = ["python", "-c", _script("image_check.py").read_text(encoding="utf-8"), json.dumps(request)]
        with builder(engine, str(image), argv, variables, name="image-check", keep=keep, read_only=True) as container:
            status = follow(container, log, on_line)
            killed = out_of_memory(container)
        if status != 0 or parts[-1:] != [_END]:
            found = read_file(log, Evidence(exit_code=status, oom_killed=killed, over=True)).finding
            raise EnvironmentFailure(
                f"the image check ended with {status} before it had an answer",
                details=(found.message,) if found is not None and found.message else (),
                hint=found.hint if found is not None else None,
                log=log,
            )
        seen = json.loads("".join(parts[:-1]))
        if "tool_chain" in seen:
            seen["tool_chain"] |= tool_chain.device_code_of(seen["tool_chain"])
        report = judge(seen, config, expected)
        if report.ok:
            step.result(f"{len(report.checks)} checks, {report.checks['files']}")
        else:
            errors = [f"{f.kind}: {f.where}: {f.message}" for f in report.findings if f.severity == "error"]
            # One library that does not load fails every module above it.
            known = explain(errors)
            raise Refused(
                f"the image check found {len(errors)} fault{'s' if len(errors) > 1 else ''}",
                details=tuple(errors[:40]),
                hint=known.hint if known is not None else None,
                log=log,
            )
    for finding in report.findings:
        console.say(f"warning: {finding.kind}: {finding.where}: {finding.message}", "yellow")
    return report


def expect(
    manifest: Manifest, locked: Sequence[LockedWheel], built: Mapping[str, str], wheels: Sequence[Path]
) -> Expected:
    """What the image must hold; raises IntegrityError when a file of `wheels` is no wheel."""
    return Expected(
        python=manifest.target.python,
        versions={wheel.name: wheel.version for wheel in locked} | dict(built),
        records=dict(record_digest(path) for path in wheels),
        stand_ins=stand_in_files(manifest),
        user=USER,
        environment=environment(manifest),
        labels=labels(manifest),
        allowed_conflicts=manifest.image.allowed_conflicts,
        allowed_files=manifest.image.allowed_files,
        entry=[*INIT, *manifest.image.command],
        health=HEALTH,
        start_period=manifest.image.start_period,
        tool_chain=tool_chain.expect(manifest, locked),
    )


def key(manifest: Manifest, lock: Lock, image: ImageRef, modules: Mapping[str, str]) -> str:
    """Sha256 (hex) over all that decides the check's answer."""
    return canonical_sha256(
        {
            "image": image.digest,
            "scripts": [file_sha256(_script(name)) for name in ("image_check.py", "tool_chain.py")],
            "judge": [file_sha256(path) for path in sorted(Path(__file__).parent.glob("*.py"))],
            "request": manifest.image.model_dump(mode="json"),
            "modules": dict(modules),
            "wheels": sorted(wheel.sha256 for wheel in lock.wheels["runtime"]),
        }
    )


def _tool_chain(manifest: Manifest) -> dict[str, Any] | None:
    """What the script is to look for; none: the image shall have no tool chain."""
    if manifest.image.cuda_home is None:
        return None
    return {
        "home": manifest.image.cuda_home,
        "architecture": tool_chain.architecture(manifest).removeprefix("sm_"),
        "folders": {name: place for name, place in environment(manifest).items() if name in tool_chain.FOLDERS},
        "script": _script("tool_chain.py").read_text(encoding="utf-8"),
    }


def _script(name: str) -> Path:
    return project_root() / "build" / "inside" / name
