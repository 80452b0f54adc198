"""What decides an image beside its wheels: the Dockerfile's stages, ENV, labels, health check, stand-ins and scripts."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path

from forge_build.base import Base
from forge_build.manifest import Manifest
from forge_core.cli import project_root
from forge_core.errors import UsageError
from forge_core.model import ImageRef, file_sha256

USER = "10001:10001"
"""The runtime stage's user, numeric so that Kubernetes can see it is not root."""

PATH = "/opt/sglang/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""The runtime stage's PATH."""

INIT = ("tini", "-s", "--")
"""Passes signals on, also to a server that is still loading (as process 1 it would not see them), and takes in what its workers
leave behind; -s: also below another init."""

HEALTH = ("python", "/opt/sglang/healthy.py")
"""The image's health check."""

_SCRIPTS = ("healthy.py", "link_cuda.py")
"""Files of `build/inside` that the runtime stage takes."""

_OCI = "org.opencontainers.image"
_OWN = "io.sm120-forge"


def labels(manifest: Manifest) -> dict[str, str]:
    """OCI labels that are true whoever builds; equal inputs must give equal bytes.

    So no commit of this repository (the record has it), and `created` is the epoch, as in the image's config. `source` and
    `revision` name what is compiled here from git, where that is one repository. No `licenses`: no one expression is true of
    some hundred packages; their texts are in the image.
    """
    repositories = {(source.git.url, source.git.commit) for source in manifest.sources.values() if source.git}
    found = {}
    if len(repositories) == 1 and (only := repositories.pop())[0].startswith("https://"):
        found = {f"{_OCI}.source": only[0], f"{_OCI}.revision": only[1]}
    for name, source in manifest.sources.items():
        found[f"{_OWN}.source.{name}"] = source.git.commit if source.git else str(source.wheel)
    return found | {
        f"{_OCI}.title": manifest.image.title,
        f"{_OCI}.description": " ".join(manifest.description.split()),
        f"{_OCI}.vendor": "sm120-forge",
        f"{_OCI}.version": manifest.as_of.isoformat(),
        f"{_OCI}.created": datetime.fromtimestamp(manifest.epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        f"{_OWN}.profile": manifest.profile,
        f"{_OWN}.kind": manifest.kind,
    }


def base_labels(manifest: Manifest, base: Base) -> dict[str, str]:
    """What the image stands on: OCI's names are for images in a registry, a root file system made here is none."""
    if base.image:
        reference = ImageRef.parse(base.image)
        return {f"{_OCI}.base.name": str(reference), f"{_OCI}.base.digest": reference.digest}
    return {f"{_OWN}.base.suite": str(manifest.base.suite), f"{_OWN}.base.rootfs": f"sha256:{base.identity}"}


def environment(manifest: Manifest) -> dict[str, str]:
    """The image's ENV: that of its tool chain, and the manifest's."""
    found = {}
    if home := manifest.image.cuda_home:
        # Triton brings a ptxas of its own, and another one for Blackwell: here all device code comes from one tool chain.
        tool = {f"TRITON_{name}_PATH": f"{home}/bin/ptxas" for name in ("PTXAS", "PTXAS_BLACKWELL")}
        found = {"CUDA_HOME": home, "PATH": f"{home}/bin:{PATH}", **tool}
    return found | manifest.image.environment


def dockerfile() -> Path:
    """`Dockerfile.sm120` of the checkout."""
    return project_root() / "Dockerfile.sm120"


def with_manifest(manifest: Manifest, base: Base, folder: Path) -> Path:
    """The Dockerfile with the manifest's part as a last stage, `final`: ENV, LABEL, HEALTHCHECK and ENTRYPOINT.

    Raises UsageError when a value cannot be written in a Dockerfile.
    """
    lines = ["", "FROM runtime AS final"]
    for name, value in sorted(environment(manifest).items()):
        lines.append(f"ENV {_name(name)}={_quoted(value, f'image.environment.{name}')}")
    for name, value in sorted((labels(manifest) | base_labels(manifest, base)).items()):
        lines.append(f"LABEL {name}={_quoted(value, f'the label {name}')}")
    lines.append(
        f"HEALTHCHECK --interval=30s --timeout=10s --start-period={manifest.image.start_period}s --retries=3 \\"
    )
    lines.append(f"    CMD {json.dumps(HEALTH)}")
    lines.append(f"ENTRYPOINT {json.dumps([*INIT, *manifest.image.command])}")
    copy = folder / "Dockerfile"
    copy.write_text(dockerfile().read_text(encoding="utf-8") + "\n".join(lines) + "\n", encoding="utf-8")
    return copy


def stages(target: str) -> list[str]:
    """The instructions that make a target: another stage's change does not make it anew."""
    found: dict[str, list[str]] = {"": []}
    name = ""
    for line in dockerfile().read_text(encoding="utf-8").splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if match := re.match(r"FROM .* AS (\w+)$", line):
            name = match[1]
        found.setdefault(name, []).append(line)
    return [*found[""], *found["distribution"], *found[target]]


def stand_ins(manifest: Manifest) -> dict[str, dict[str, Path]]:
    """The stand-ins a manifest asks for: name -> path below site-packages -> file. Bytecode beside them is dirt."""
    folder = project_root() / "build" / "inside" / "stand_ins"
    found: dict[str, dict[str, Path]] = {}
    for name in sorted(manifest.image.stand_ins):
        files = sorted(p for p in (folder / name).rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        if not files:
            raise UsageError(f"image.stand_ins: {folder / name} holds nothing")
        found[name] = {p.relative_to(folder / name).as_posix(): p for p in files}
    return found


def scripts() -> dict[str, Path]:
    """The files that the runtime stage takes of `build/inside`, by name."""
    return {name: project_root() / "build" / "inside" / name for name in _SCRIPTS}


def stand_in_files(manifest: Manifest) -> dict[str, str]:
    """Path below site-packages -> sha256 (hex) of every file of the stand-ins."""
    return {path: file_sha256(file) for files in stand_ins(manifest).values() for path, file in files.items()}


def _name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UsageError(f"image.environment: {name!r} is no name of a variable")
    return name


def _quoted(value: str, where: str) -> str:
    """A Dockerfile's double-quoted word: there a backslash guards only itself, a quote and the dollar of a variable."""
    if any(ord(character) < 32 for character in value):
        raise UsageError(f"{where}: a control character or a line break cannot stand there")
    return '"' + re.sub(r'(["\\$])', r"\\\1", value) + '"'
