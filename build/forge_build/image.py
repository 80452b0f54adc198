"""The images: `Dockerfile.sm120` through BuildKit, network off, from verified files; the runtime image as an OCI archive."""

from __future__ import annotations

import json
import os
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_build.base import Base
from forge_build.fetch import Inputs
from forge_build.lock import LockedWheel
from forge_build.manifest import Manifest
from forge_core.cli import project_root
from forge_core.console import Console, Step, size
from forge_core.engine import Engine, buildx
from forge_core.errors import IntegrityError
from forge_core.model import canonical_sha256, file_sha256

_STEP = re.compile(r"^#\d+ \[(?:\S+ )?(\d+)/(\d+)\] (.*)$")


@dataclass(frozen=True)
class BuiltFile:
    """A wheel made here."""

    path: Path
    file: str
    sha256: str


@dataclass(frozen=True)
class Image:
    """The runtime image as it came out of BuildKit."""

    archive: Path
    """OCI archive."""
    digest: str
    config_digest: str
    size: int
    """Compressed bytes of config and layers, as a registry stores them."""
    layers: tuple[int, ...]
    """Compressed bytes of each."""


def key(
    manifest: Manifest,
    base: Base,
    locked: Sequence[LockedWheel],
    built: Sequence[BuiltFile],
    target: str,
    engine: Engine,
) -> str:
    """Sha256 (hex) over everything that enters an image, the BuildKit that makes it included."""
    return canonical_sha256(
        {
            "dockerfile": _stages(target),
            "inside": _folder_sha256(_inside() / "stand_ins") if target == "runtime" else None,
            "target": target,
            "base": base.identity,
            "wheels": sorted(wheel.sha256 for wheel in locked),
            "built": sorted(wheel.sha256 for wheel in built),
            "image": manifest.image.model_dump(mode="json", exclude={"allowed_conflicts", "imports"})
            if target == "runtime"
            else None,
            "labels": labels(manifest) if target == "runtime" else None,
            "epoch": manifest.epoch,
            "engine": engine.version if target == "runtime" else None,
        }
    )


def builder_tag(manifest: Manifest, base: Base, locked: Sequence[LockedWheel], engine: Engine) -> str:
    """The builder image's tag: it carries the key of all that is in it."""
    return f"sm120-forge/builder:{key(manifest, base, locked, (), 'builder', engine)[:20]}"


def builder(
    manifest: Manifest,
    inputs: Inputs,
    base: Base,
    locked: Sequence[LockedWheel],
    engine: Engine,
    *,
    log: Path,
    console: Console,
) -> str:
    """Have the builder image in the engine; returns its tag, which carries the key of all that is in it."""
    tag = builder_tag(manifest, base, locked, engine)
    with console.step("builder", "compiler and CUDA tool chain, network off") as step:
        if engine.client.images.list(name=tag):
            step.result(f"{tag}, made before")
            return tag
        with _contexts(inputs, base, locked, ()) as (main, named):
            buildx.build(
                engine,
                dockerfile=_dockerfile(),
                context=main,
                target="builder",
                contexts=named,
                args=_arguments(base),
                output=f"type=image,name={tag}",
                epoch=manifest.epoch,
                log=log,
                on_line=_watch(step),
            )
        step.result(tag)
    return tag


def build(
    manifest: Manifest,
    inputs: Inputs,
    base: Base,
    locked: Sequence[LockedWheel],
    built: Sequence[BuiltFile],
    engine: Engine,
    archive: Path,
    *,
    log: Path,
    console: Console,
    no_cache: bool = False,
) -> Image:
    """Build the runtime image into `archive`.

    Time stamps are rewritten to the manifest's epoch and nothing in it names when or where it was built, so equal
    inputs give an equal digest. Raises what `forge_core.engine.buildx.build` raises, and IntegrityError when the archive
    is not the image that BuildKit reports.
    """
    with console.step("image", f"{manifest.image.name}, network off") as step:
        with _contexts(inputs, base, locked, built) as (main, named):
            arguments = _arguments(base) | {"STAND_INS": " ".join(manifest.image.stand_ins)}
            result = buildx.build(
                engine,
                dockerfile=_with_manifest(manifest, main),
                context=main,
                target="final",
                contexts=named,
                args=arguments,
                output=f"type=oci,dest={archive},rewrite-timestamp=true,compression=zstd,oci-mediatypes=true",
                epoch=manifest.epoch,
                log=log,
                on_line=_watch(step),
                no_cache=no_cache,
            )
        image = read_archive(archive)
        if image.digest != result.digest:
            raise IntegrityError(f"{archive} holds {image.digest}, BuildKit reports {result.digest}", log=log)
        step.result(f"{image.digest[:19]}, {size(image.size)} compressed, {len(image.layers)} layers")
    return image


def labels(manifest: Manifest) -> dict[str, str]:
    """OCI labels that are true whoever builds: no date of the build, no commit of this repository (the record has both)."""
    versions = {"org.opencontainers.image.base.name": f"{manifest.base.suite or manifest.base.runtime_image}"}
    return versions | {
        "org.opencontainers.image.title": manifest.image.title,
        "org.opencontainers.image.description": manifest.description,
        "org.opencontainers.image.vendor": "sm120-forge",
        "org.opencontainers.image.version": manifest.as_of.isoformat(),
        "io.sm120-forge.profile": manifest.profile,
        "io.sm120-forge.kind": manifest.kind,
    }


def read_archive(archive: Path) -> Image:
    """Digest, config digest and sizes of a single-image OCI archive; raises IntegrityError when it is none."""
    try:
        with tarfile.open(archive) as tar:
            index = _json(tar, "index.json")
            (entry,) = index["manifests"]
            manifest = _json(tar, f"blobs/sha256/{entry['digest'].removeprefix('sha256:')}")
            layers = tuple(int(layer["size"]) for layer in manifest["layers"])
            config = manifest["config"]
            return Image(archive, entry["digest"], config["digest"], sum(layers) + int(config["size"]), layers)
    except (tarfile.TarError, KeyError, ValueError, TypeError) as error:
        raise IntegrityError(f"{archive} is no OCI archive of one image: {error!r}") from error


def _json(tar: tarfile.TarFile, name: str) -> Any:
    member = tar.extractfile(name)
    if member is None:
        raise KeyError(name)
    return json.load(member)


def _with_manifest(manifest: Manifest, main: Path) -> Path:
    """The Dockerfile with the manifest's ENV and LABEL lines as a last stage: neither can be given on the command line."""
    lines = ["", "FROM runtime AS final"]
    lines += [f"ENV {name}={json.dumps(value)}" for name, value in sorted(manifest.image.environment.items())]
    lines += [f"LABEL {name}={json.dumps(value)}" for name, value in sorted(labels(manifest).items())]
    copy = main / "Dockerfile"
    copy.write_text(_dockerfile().read_text(encoding="utf-8") + "\n".join(lines) + "\n", encoding="utf-8")
    return copy


def _arguments(base: Base) -> dict[str, str]:
    return {"BASE": base.image} if base.image else {}


@contextmanager
def _contexts(
    inputs: Inputs, base: Base, locked: Sequence[LockedWheel], built: Sequence[BuiltFile]
) -> Iterator[tuple[Path, dict[str, Path | str]]]:
    """Folders for BuildKit: the main context and the named ones, hard links into the store where the disk allows."""
    with tempfile.TemporaryDirectory(prefix="context-", dir=inputs.store.root / "partial") as scratch:
        main, wheels, made = (Path(scratch) / name for name in ("main", "wheels", "built"))
        for folder in (main, wheels, made):
            folder.mkdir()
        if base.rootfs:
            _link(base.rootfs, main / "rootfs.tar")
        for wheel in locked:
            _link(inputs.path(wheel.sha256), wheels / wheel.file)
        lines = (f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in locked)
        (wheels / "requirements.txt").write_text("".join(lines), encoding="utf-8")
        for own in built:
            _link(own.path, made / own.file)
        lines = (f"./{own.file} --hash=sha256:{own.sha256}\n" for own in built)
        (made / "requirements.txt").write_text("".join(lines), encoding="utf-8")
        yield main, {"wheels": wheels, "built": made, "inside": _inside()}


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _watch(step: Step) -> Any:
    """Follow BuildKit's plain progress: N of M instructions, and which."""

    def on_line(line: str) -> None:
        if match := _STEP.match(line):
            step.progress(int(match[1]) - 1, int(match[2]), unit="instructions", note=match[3][:60])

    return on_line


def _dockerfile() -> Path:
    return project_root() / "Dockerfile.sm120"


def _stages(target: str) -> list[str]:
    """The instructions that make a target: another stage's change does not make it anew."""
    stages: dict[str, list[str]] = {"": []}
    name = ""
    for line in _dockerfile().read_text(encoding="utf-8").splitlines():
        if line.startswith("#") or not line.strip():
            continue
        if match := re.match(r"FROM .* AS (\w+)$", line):
            name = match[1]
        stages.setdefault(name, []).append(line)
    return [*stages[""], *stages["distribution"], *stages[target]]


def _inside() -> Path:
    return project_root() / "build" / "inside"


def _folder_sha256(folder: Path) -> str:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return canonical_sha256([[p.relative_to(folder).as_posix(), file_sha256(p)] for p in files])
