"""The image check: what is in the built image, seen from inside it, without a GPU and without network."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_build.compile.container import builder, copy_in, follow
from forge_build.lock import Lock, LockedWheel
from forge_build.manifest import AllowedConflict, Manifest
from forge_core.cli import project_root
from forge_core.console import Console
from forge_core.engine import Engine
from forge_core.errors import EnvironmentFailure, Refused
from forge_core.model import Finding, ImageRef, canonical_sha256, file_sha256

_MARK = "forge-image-check "
_CONFLICT = re.compile(
    r"^(?P<package>\S+) \S+ (?:requires (?P<missing>[^\s,]+), which is not installed"
    r"|has requirement (?P<other>[A-Za-z0-9._-]+))"
)


@dataclass(frozen=True)
class ImageReport:
    """What the check saw."""

    checks: dict[str, str]
    """Check -> what it saw, for people and the record."""
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """No finding is an error."""
        return not any(finding.severity == "error" for finding in self.findings)


def check(
    image: ImageRef,
    manifest: Manifest,
    locked: Sequence[LockedWheel],
    built: Mapping[str, str],
    modules: Mapping[str, str],
    engine: Engine,
    *,
    log: Path,
    console: Console,
    keep: bool = False,
) -> ImageReport:
    """Run `build/inside/image_check.py` in the image and judge what it saw.

    `built` maps the names of wheels made here to their versions, `modules` FlashInfer modules to the functions that describe them.
    Raises Refused (1) naming every finding, EnvironmentFailure (3) when the check itself could not run.
    """
    script = project_root() / "build" / "inside" / "image_check.py"
    cuda = next((w.version for w in locked if w.name == "nvidia-cuda-runtime"), "")
    request = {
        "imports": list(manifest.image.imports),
        "command": ["sglang", "serve", "--help"],
        "modules": dict(modules),
        "cuda": ".".join(cuda.split(".")[:2]),
    }
    with console.step("image check", "versions, files, imports, loader, command line; network off") as step:
        seen: dict[str, Any] = {}

        def on_line(line: str) -> None:
            if line.startswith(_MARK):
                seen.update(json.loads(line.removeprefix(_MARK)))

        # Without a GPU FlashInfer's loader cannot ask the device what to look for.
        architectures = sorted({a for w in manifest.wheels.values() for a in w.architectures})
        environment = {"HOME": "/home/sglang", "FLASHINFER_CUDA_ARCH_LIST": " ".join(architectures)}
        argv = ["python", "/forge/image_check.py", "/forge/request.json"]
        with builder(engine, str(image), argv, environment, name="image-check", keep=keep) as container:
            files: dict[str, Path | bytes] = {
                "/forge/image_check.py": script,
                "/forge/request.json": json.dumps(request).encode(),
            }
            copy_in(container, files, epoch=manifest.epoch)
            status = follow(container, log, on_line)
        if status != 0 or not seen:
            raise EnvironmentFailure(f"the image check ended with {status} before it had an answer", log=log)
        report = judge(seen, manifest, locked, built)
        step.result(f"{len(report.checks)} checks, {report.checks['files']}")
    if not report.ok:
        errors = [f"{f.kind}: {f.where}: {f.message}" for f in report.findings if f.severity == "error"]
        raise Refused(f"the image check found {len(errors)} faults", details=tuple(errors[:40]), log=log)
    for finding in report.findings:
        console.say(f"warning: {finding.kind}: {finding.where}: {finding.message}", "yellow")
    return report


def key(manifest: Manifest, lock: Lock, image: ImageRef, modules: Mapping[str, str]) -> str:
    """Sha256 (hex) over all that decides the check's answer."""
    return canonical_sha256(
        {
            "image": image.digest,
            "script": file_sha256(project_root() / "build" / "inside" / "image_check.py"),
            "judge": file_sha256(Path(__file__)),
            "request": manifest.image.model_dump(mode="json"),
            "modules": dict(modules),
            "wheels": sorted(wheel.sha256 for wheel in lock.wheels["runtime"]),
        }
    )


def judge(
    seen: Mapping[str, Any], manifest: Manifest, locked: Sequence[LockedWheel], built: Mapping[str, str]
) -> ImageReport:
    """Pure judgement of what the script saw."""
    findings = [
        *_versions(seen["versions"], locked, built),
        *(Finding(kind="file-changed", where=text.split(":")[0], message=text) for text in seen["record"]["wrong"]),
        *(
            Finding(kind="file-claimed-twice", where=text.split(":")[0], message=text)
            for text in seen["record"]["clashes"]
        ),
        *_conflicts(seen["pip_check"], manifest.image.allowed_conflicts),
    ]
    for name, outcome in seen["imports"].items():
        if not outcome["ok"]:
            findings.append(Finding(kind="import", where=name, message=outcome["detail"]))
    for name, outcome in seen["modules"].items():
        if not outcome["ok"]:
            findings.append(Finding(kind="loader", where=name, message=outcome["detail"]))
    if seen["command"]["status"] != 0:
        tail = seen["command"]["tail"].strip().splitlines()[-1:] or [""]
        findings.append(Finding(kind="command-line", where="sglang serve --help", message=tail[0]))
    if 0 in seen["user"]:
        findings.append(Finding(kind="user", where="image", message="runs as root"))
    checks = {
        "user": f"uid {seen['user'][0]}, gid {seen['user'][1]}",
        "python": seen["python"],
        "versions": f"{len(seen['versions'])} distributions, as locked",
        "files": f"{seen['record']['files']} installed files equal their wheels' RECORD",
        "pip check": f"{len(seen['pip_check'])} complaints, all allowed with a reason",
        "imports": ", ".join(seen["imports"]),
        "command line": "sglang serve --help ends with 0",
        **{f"loader {name}": outcome["detail"] for name, outcome in seen["modules"].items()},
    }
    return ImageReport(checks, tuple(findings))


def _versions(
    installed: Sequence[Sequence[str]], locked: Sequence[LockedWheel], built: Mapping[str, str]
) -> list[Finding]:
    wanted = {wheel.name: wheel.version for wheel in locked} | dict(built)
    found = {name: version for name, version in installed}
    rows = []
    for name in sorted(wanted.keys() | found.keys()):
        if wanted.get(name) != found.get(name):
            message = f"locked {wanted.get(name, 'not at all')}, installed {found.get(name, 'not at all')}"
            rows.append(Finding(kind="version", where=name, message=message))
    return rows


def _conflicts(lines: Sequence[str], allowed: Sequence[AllowedConflict]) -> list[Finding]:
    known = {(a.package, requirement) for a in allowed for requirement in a.requirements}
    used, rows = set(), []
    for line in lines:
        match = _CONFLICT.match(line)
        pair = (_normal(match["package"]), _normal(match["missing"] or match["other"])) if match else ("", line)
        if pair in known:
            used.add(pair)
        else:
            rows.append(Finding(kind="dependency-conflict", where=pair[0] or "pip check", message=line))
    for pair in sorted(known - used):
        message = f"the allowed conflict with {pair[1]} no longer occurs: take it out of the manifest"
        rows.append(Finding(kind="stale-allowance", where=pair[0], message=message, severity="warning"))
    return rows


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
