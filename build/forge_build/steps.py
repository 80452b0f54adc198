"""The steps of a build between its locked inputs and its record; `pipeline` walks them in order."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forge_build import base, compile, image, image_check, model, patch, wheel_check
from forge_build.compile.flashinfer_modules import modules as flashinfer_modules
from forge_build.fetch import Inputs
from forge_build.image import BuiltFile
from forge_build.lock import Lock
from forge_build.manifest import Manifest
from forge_build.wheel_check.stack import stack
from forge_core import disk, registry
from forge_core import engine as engines
from forge_core.console import Console, size
from forge_core.errors import EnvironmentFailure, IntegrityError, UsageError
from forge_core.model import ImageRef, ModelRef
from forge_core.record import RecordedWheel
from forge_core.registry import local
from forge_core.store import Store


@dataclass(frozen=True)
class MadeImage:
    """What is known of an image that was made, beside its digest."""

    config: str
    size: int
    """Bytes as a registry stores it."""
    layers: tuple[tuple[str, int], ...]
    """The instruction that made each, and its bytes."""

    @classmethod
    def known(cls, known: Mapping[str, Any]) -> MadeImage:
        """As the store's note of an earlier build tells it."""
        return cls(str(known["config"]), int(known["size"]), tuple((str(s), int(n)) for s, n in known["layers"]))


def staging_repository(plan: Manifest, engine: engines.Engine, console: Console) -> str:
    """The repository the image goes to: the manifest's, else one on loopback, started if need be."""
    repository = plan.staging or os.environ.get("FORGE_STAGING")
    if repository is None:
        if plan.kind == "production":
            raise UsageError(
                f"{plan.profile}: no staging repository",
                hint="name `staging` in the manifest, or set FORGE_STAGING=HOST/PATH",
            )
        repository = f"{local.ensure(console)}/{plan.image.name}"
    registry.require_reachable(repository, remote_engine=engine.remote)
    return repository


def look_at_disks(plan: Manifest, engine: engines.Engine, store: Store, work: Path, console: Console) -> None:
    """Warn where less is free than a build from nothing takes; one that finds most of it made before takes little."""
    if plan.disk_gb is None:
        return
    places = [store.root, work]
    if not engine.remote:
        places.append(Path(engine.client.info()["DockerRootDir"]))
    for place, amount in disk.tight(places, plan.disk_gb * 10**9):
        console.say(
            f"warning: {size(amount)} free on the disk of {place}; a build from nothing takes {plan.disk_gb} GB at its peak."
            " `docker system df` and `python -m forge_core store gc` tell what can go",
            "yellow",
        )


def patch_sources(
    plan: Manifest, locked: Lock, inputs: Inputs, scratch: Path, console: Console
) -> dict[str, patch.PatchedTree]:
    """Each source and its dependencies unpacked below `scratch`, with the series of our patches applied."""
    trees = {}
    for name, source in plan.sources.items():
        known = locked.sources[name]
        with console.step("patch", name) as step:
            if source.git is not None:
                version, folder = source.git.version, inputs.tree(name, scratch / name)
            else:
                assert known.wheel is not None
                version, folder = (
                    known.wheel.version,
                    patch.unpack_wheel(inputs.path(known.wheel.sha256), scratch / name),
                )
            series = patch.series_folder(name, source.series)
            tree = patch.apply(name, version, folder, series, locked=known)
            given = {
                part: patch.Dependency(
                    inputs.tree(f"{name}/{part}", scratch / f"{name}.dependencies" / part), item.taken
                )
                for part, item in known.dependencies.items()
                if item.taken is not None
            }
            trees[name] = tree = replace(tree, dependencies=given)
            step.result(f"tree {tree.patched_tree[:12]}, {len(tree.patches)} patches")
    return trees


def check_wheels(
    plan: Manifest, locked: Lock, inputs: Inputs, wheels: list[compile.Wheel], wheelhouse: Path, console: Console
) -> tuple[list[BuiltFile], tuple[RecordedWheel, ...]]:
    """Check each wheel under its real name, in the wheelhouse a user looks into."""
    shutil.rmtree(wheelhouse, ignore_errors=True)
    wheelhouse.mkdir()
    environment = [inputs.path(w.sha256) for w in locked.wheels["runtime"]]
    beside = stack(
        locked,
        lambda wheel: inputs.path(wheel.sha256),
        base=plan.base.provides,
        python=plan.target.python,
        made={wheel.name: (wheel.version, wheel.path) for wheel in wheels},
    )
    built, recorded = [], []
    for wheel in wheels:
        with console.step("wheel check", wheel.file) as step:
            path = wheelhouse / wheel.file
            shutil.copyfile(wheel.path, path)
            report = wheel_check.check(
                path,
                plan.wheels[wheel.name].check,
                epoch=plan.epoch,
                environment=environment,
                platform=plan.target.platform,
                stack=beside,
            )
            if console.verbose:
                console.print(wheel_check.table(report))
            wheel_check.raise_for(report)
            step.result(wheel_check.summary(report))
        if report.sha256 != wheel.sha256:
            raise IntegrityError(f"{path} has other bytes than the store's object {wheel.sha256}")
        built.append(BuiltFile(path, wheel.file, wheel.sha256))
        recorded.append(
            RecordedWheel(
                file=wheel.file, sha256=wheel.sha256, size=wheel.size, objects=report.objects, cached=wheel.cached
            )
        )
    return built, tuple(recorded)


def make_image(
    plan: Manifest,
    locked: Lock,
    inputs: Inputs,
    runtime_base: base.Base,
    built: list[BuiltFile],
    engine: engines.Engine,
    store: Store,
    *,
    staging: str,
    logs: Path,
    console: Console,
) -> tuple[ImageRef, MadeImage]:
    """The image in staging, by digest: the one that equal inputs gave before if staging still has it, else built anew."""
    identity = image.key(plan, runtime_base, locked.wheels["runtime"], built, "runtime", engine)
    known = store.note_get("image", identity)
    if known is not None:
        reference = ImageRef(repository=staging, digest=known["digest"])
        if registry.exists(reference):
            with console.step("image", plan.image.name) as step:
                step.result(f"{reference.digest[:19]}, {size(known['size'])}, made before and still in staging")
            _pull(reference, engine, console)
            return reference, MadeImage.known(known)
    with tempfile.TemporaryDirectory(prefix="image-", dir=store.root / "partial") as scratch:
        made = image.build(
            plan,
            inputs,
            runtime_base,
            locked.wheels["runtime"],
            built,
            engine,
            Path(scratch) / "image.tar",
            log=logs / "image.log",
            console=console,
        )
        with console.step("staging", staging) as step:
            reference = registry.push(made.archive, staging, digest=made.digest, tag=None, log=logs / "staging.log")
            step.result(str(reference))
    known = {"digest": made.digest, "config": made.config_digest, "size": made.size}
    known["layers"] = list(zip(made.steps, made.layers, strict=True))
    store.note_put("image", identity, known)
    _pull(reference, engine, console)
    return reference, MadeImage.known(known)


def _pull(reference: ImageRef, engine: engines.Engine, console: Console) -> None:
    """Have the engine hold the image by its digest; both image stores know it then."""
    import docker.errors

    try:
        engine.client.images.get(str(reference))
        return
    except docker.errors.ImageNotFound:
        pass
    with console.step("pull", "into the engine, by digest"):
        try:
            engine.client.images.pull(reference.repository, tag=reference.digest)
        except docker.errors.APIError as error:
            raise EnvironmentFailure(f"the engine cannot pull {reference}: {error.explanation or error}") from error


def check_image(
    plan: Manifest,
    locked: Lock,
    reference: ImageRef,
    wheels: list[compile.Wheel],
    engine: engines.Engine,
    store: Store,
    *,
    logs: Path,
    console: Console,
    keep: bool,
) -> dict[str, str]:
    """The check's answer; one that was green for this very digest and request is not asked again."""
    modules = {
        name: module.call
        for wheel, spec in plan.wheels.items()
        if spec.recipe == "flashinfer-jit"
        for name, module in flashinfer_modules(spec, f"wheels.{wheel}").items()
    }
    identity = image_check.key(plan, locked, reference, modules)
    if (known := store.note_get("image-check", identity)) is not None:
        with console.step("image check") as step:
            step.result(f"{len(known)} checks, passed before for this digest")
        return {str(name): str(seen) for name, seen in known.items()}
    report = image_check.check(
        reference,
        plan,
        locked.wheels["runtime"],
        {w.name: w.version for w in wheels},
        modules,
        engine,
        wheels=[*(store.path(w.sha256) for w in locked.wheels["runtime"]), *(w.path for w in wheels)],
        log=logs / "image-check.log",
        console=console,
        keep=keep,
    )
    store.note_put("image-check", identity, report.checks)
    return report.checks


def prepare_model(
    plan: Manifest,
    locked: Lock,
    inputs: Inputs,
    reference: ImageRef,
    engine: engines.Engine,
    work: Path,
    *,
    console: Console,
    keep: bool,
) -> ModelRef | None:
    """The manifest's model in the work folder, made inside the image that will serve it; none where none is named."""
    if plan.model is None:
        return None
    (wheel,) = locked.wheels["model"]
    return model.prepare(
        plan,
        inputs,
        wheel,
        list(locked.wheels["runtime"]),
        reference,
        engine,
        work / "model",
        log=work / "logs" / "model.log",
        console=console,
        keep=keep,
    )
