"""The images: `Dockerfile.sm120` through BuildKit, network off, from verified files; the runtime image as an OCI archive."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from forge_build.base import Base
from forge_build.fetch import Inputs
from forge_build.image.archive import Image, read_archive
from forge_build.image.contexts import BuiltFile, contexts, grouped
from forge_build.image.recipe import (
    HEALTH,
    INIT,
    base_labels,
    dockerfile,
    environment,
    labels,
    scripts,
    stages,
    stand_in_files,
    stand_ins,
    with_manifest,
)
from forge_build.lock import LockedWheel
from forge_build.manifest import Manifest
from forge_core.console import Console, Step, size
from forge_core.engine import Engine, buildx
from forge_core.errors import IntegrityError
from forge_core.model import canonical_sha256, file_sha256
from forge_core.store import Store

__all__ = ["BuiltFile", "Image", "build", "builder", "builder_tag", "key", "labels", "read_archive"]

_STEP = re.compile(r"^#\d+ \[(?:\S+ )?(\d+)/(\d+)\] (.*)$")
_MOVES = re.compile(r"^#\d+ (transferring [\w-]+: [\d.]+[kMGT]?B|exporting layers|unpacking to|sending tarball)")
"""What BuildKit does with gigabytes beside its instructions; minutes go by without a word."""


def key(
    manifest: Manifest,
    base: Base,
    locked: Sequence[LockedWheel],
    built: Sequence[BuiltFile],
    target: str,
    engine: Engine,
) -> str:
    """Sha256 (hex) over everything that enters an image, the BuildKit that makes it included."""
    entering: dict[str, object] = {
        "dockerfile": stages(target),
        "inside": None,
        "target": target,
        "base": base.identity,
        "wheels": sorted(wheel.sha256 for wheel in locked),
        "built": sorted(wheel.sha256 for wheel in built),
        "image": None,
        "labels": None,
        "epoch": manifest.epoch,
        "engine": None,
    }
    if target == "runtime":
        entering |= {
            "inside": stand_in_files(manifest),
            "scripts": {name: file_sha256(path) for name, path in scripts().items()},
            "groups": {name: sorted(wheel.sha256 for wheel in wheels) for name, wheels in grouped(locked).items()},
            "started": [INIT, HEALTH],
            "environment": environment(manifest),
            "image": manifest.image.model_dump(mode="json", exclude={"allowed_conflicts", "allowed_files", "imports"}),
            "labels": labels(manifest) | base_labels(manifest, base),
            "engine": engine.version,
        }
    return canonical_sha256(entering)


def builder_tag(manifest: Manifest, base: Base, locked: Sequence[LockedWheel], engine: Engine) -> str:
    """The builder image's tag: it carries the key of all that is in it."""
    return f"sm120-forge/builder:{key(manifest, base, locked, (), 'builder', engine)[:20]}"


def builder(
    manifest: Manifest,
    inputs: Inputs,
    base: Base,
    locked: Sequence[LockedWheel],
    engine: Engine,
    store: Store,
    *,
    log: Path,
    console: Console,
) -> str:
    """Have the builder image in the engine; returns its tag, which carries the key of all that is in it."""
    tag = builder_tag(manifest, base, locked, engine)
    with (
        console.step("builder", "compiler and CUDA tool chain, network off") as step,
        # two builds that name the same new tag at once: the engine refuses the second
        store.lock(f"builder-{tag.rpartition(':')[2]}", waiting=step.waiting_for_another),
    ):
        if engine.client.images.list(name=tag):
            step.result(f"{tag}, made before")
            return tag
        with contexts(inputs, base, {"wheels": locked}, (), {}, {}) as (main, named):
            buildx.build(
                engine,
                dockerfile=dockerfile(),
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
        standing = stand_ins(manifest)
        with contexts(inputs, base, grouped(locked), built, standing, scripts()) as (main, named):
            result = buildx.build(
                engine,
                dockerfile=with_manifest(manifest, base, main),
                context=main,
                target="final",
                contexts=named,
                args=_arguments(base) | {"CUDA_HOME": manifest.image.cuda_home or "", "STAND_INS": " ".join(standing)},
                output=_output(archive, labels(manifest) | base_labels(manifest, base)),
                epoch=manifest.epoch,
                log=log,
                on_line=_watch(step),
                no_cache=no_cache,
            )
        image = read_archive(archive)
        for what, found, reported in (
            ("the image", image.digest, result.digest),
            ("the config", image.config_digest, result.config_digest),
        ):
            if found != reported:
                raise IntegrityError(f"{archive} holds {what} {found}, BuildKit reports {reported}", log=log)
        step.result(f"{image.digest[:19]}, {size(image.size)} compressed, {len(image.layers)} layers")
    return image


def _output(archive: Path, annotations: dict[str, str]) -> str:
    """The exporter in buildx's spelling, which is a line of CSV; what the labels say stands in the manifest as annotations too."""
    fields = ["type=oci", f"dest={archive}", "rewrite-timestamp=true", "compression=zstd", "oci-mediatypes=true"]
    line = io.StringIO()
    fields += [f"annotation.{name}={value}" for name, value in sorted(annotations.items())]
    csv.writer(line, lineterminator="").writerow(fields)
    return line.getvalue()


def _arguments(base: Base) -> dict[str, str]:
    return {"BASE": base.image} if base.image else {}


def _watch(step: Step) -> Callable[[str], None]:
    """Follow BuildKit's plain progress: N of M instructions, and which; what is moved in and out before and after them."""

    def on_line(line: str) -> None:
        if match := _STEP.match(line):
            step.progress(int(match[1]) - 1, int(match[2]), unit="instructions", note=match[3][:60])
        elif match := _MOVES.match(line):
            step.waiting(match[1])

    return on_line
