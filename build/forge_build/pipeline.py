"""The line's left side, once and in order: manifest, lock, fetch, base, patch, compile, wheel check, image, check, record."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forge_build import base, compile, image, image_check, lock, manifest, model, patch, record, sbom, wheel_check
from forge_build.compile.flashinfer_modules import modules as flashinfer_modules
from forge_build.fetch import Inputs, fetch
from forge_build.image import BuiltFile, sizes
from forge_build.lock import Lock
from forge_build.manifest import Manifest
from forge_build.wheel_check.stack import stack
from forge_core import engine as engines
from forge_core import registry
from forge_core.cli import work_folder
from forge_core.console import Console, duration, size
from forge_core.errors import EnvironmentFailure, IntegrityError, UsageError
from forge_core.model import ImageRef, ModelRef
from forge_core.record import FILE_NAME, BuildRecord, RecordedStage, RecordedWheel, save
from forge_core.registry import local
from forge_core.store import Store


@dataclass
class _Clock:
    """How long each stage took, and whether it was taken from an earlier run."""

    stages: list[RecordedStage] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.stages.append(RecordedStage(name=name, seconds=round(time.monotonic() - began, 2)))


@dataclass(frozen=True)
class _Image:
    """What is known of an image beside its digest."""

    config: str
    size: int
    """Bytes as a registry stores it."""
    layers: tuple[tuple[str, int], ...]
    """The instruction that made each, and its bytes."""

    @classmethod
    def of(cls, known: Mapping[str, Any]) -> _Image:
        return cls(str(known["config"]), int(known["size"]), tuple((str(s), int(n)) for s, n in known["layers"]))


def build(
    profile: str | None,
    *,
    offline: bool,
    keep: bool,
    console: Console,
    mirrors: Sequence[Path] = (),
    subset: str | None = None,
) -> BuildRecord:
    """From a profile's manifest to an image in staging and its record, which is written last.

    `mirrors` are git directories that may have the commits of sources. With `subset` the wheels whose recipe knows that part are
    compiled in that part alone, which the record counts as a deviation. Raises the errors of the stages; a failed build
    leaves no record, so that nothing can validate what it left.
    """
    name = manifest.known(profile)
    work = work_folder(name)
    target = work / FILE_NAME
    previous = _set_aside(target)
    plan = manifest.load(name)
    compile.know_subset(plan, subset)
    locked = lock.load(plan)
    logs, clock = work / "logs", _Clock()
    logs.mkdir(exist_ok=True)
    store = Store.open()
    engine = engines.connect()
    try:
        staging = _staging(plan, engine, console)
        with clock.stage("fetch"):
            inputs = fetch(plan, locked, store, offline=offline, console=console, mirrors=mirrors)
        with clock.stage("base"):
            bases = [base.build(use, plan, inputs, log=logs / "base.log", console=console) for use in base.USES]
        builder_base, runtime_base = bases
        with tempfile.TemporaryDirectory(prefix="sources-", dir=work) as scratch:
            with clock.stage("patch"):
                trees = _patch(plan, locked, inputs, Path(scratch), console)
            builder_tag = image.builder_tag(plan, builder_base, locked.wheels["builder"], engine)

            def ensure_builder() -> None:
                image.builder(
                    plan,
                    inputs,
                    builder_base,
                    locked.wheels["builder"],
                    engine,
                    log=logs / "builder.log",
                    console=console,
                )

            with clock.stage("compile"):
                wheels = [
                    compile.compile_wheel(
                        name,
                        plan,
                        trees[spec.source],
                        builder_tag,
                        engine,
                        store,
                        log=logs / f"compile-{name}.log",
                        console=console,
                        keep=keep,
                        subset=subset,
                        ensure_builder=ensure_builder,
                    )
                    for name, spec in plan.wheels.items()
                ]
        with clock.stage("wheel check"):
            built, recorded = _check_wheels(plan, locked, inputs, wheels, work / "wheelhouse", console)
        with clock.stage("image"):
            reference, made = _image(plan, locked, inputs, runtime_base, built, engine, staging, logs, console, store)
        with clock.stage("image check"):
            checks = _check_image(plan, locked, reference, wheels, engine, logs, console, keep, store)
        with clock.stage("model"):
            prepared = _model(plan, locked, inputs, reference, engine, work, logs, console, keep)
        materials = sbom.write(plan, locked, inputs, reference, runtime_base, built, work / sbom.FILE_NAME)
        amounts = sizes.measure(
            reference,
            made.size,
            made.layers,
            {(w.name, w.version): inputs.path(w.sha256) for w in locked.wheels["runtime"]},
            {(w.name, w.version): w.path for w in wheels},
            runtime_base.rootfs,
            {deb.name: deb.version for deb in inputs.debs.get("runtime", ())},
        )
        sizes.write(amounts, work / sizes.FILE_NAME)
        finished = record.assemble(
            plan,
            locked,
            inputs,
            reference=reference,
            image_config=made.config,
            image_size=made.size,
            model=prepared,
            bases=bases,
            trees=tuple(trees.values()),
            wheels=recorded,
            made=wheels,
            checks=checks,
            sbom=materials,
            tools=record.tools(engine, bases, wheels),
            stages=tuple(clock.stages),
        )
        if finished.deviations and plan.kind == "production":
            console.say(f"note: {len(finished.deviations)} deviations; promotion refuses what its policy does not name")
        save(finished, target)
        previous.unlink(missing_ok=True)
        _summary(finished, amounts, target, console)
        return finished
    finally:
        engine.client.close()


def _set_aside(target: Path) -> Path:
    """An earlier record speaks of an earlier build: out of the way before anything can fail."""
    previous = target.with_name("build-record.previous.json")
    if target.exists():
        target.replace(previous)
    return previous


def _staging(plan: Manifest, engine: engines.Engine, console: Console) -> str:
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


def _patch(
    plan: Manifest, locked: Lock, inputs: Inputs, scratch: Path, console: Console
) -> dict[str, patch.PatchedTree]:
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


def _check_wheels(
    plan: Manifest, locked: Lock, inputs: Inputs, wheels: list[compile.Wheel], wheelhouse: Path, console: Console
) -> tuple[list[BuiltFile], tuple[RecordedWheel, ...]]:
    """Check each wheel under its real name, in the wheelhouse a user looks into."""
    shutil.rmtree(wheelhouse, ignore_errors=True)
    wheelhouse.mkdir()
    environment = [inputs.path(w.sha256) for w in locked.wheels["runtime"]]
    beside = stack(locked, lambda wheel: inputs.path(wheel.sha256), base=plan.base.provides, python=plan.target.python)
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


def _image(
    plan: Manifest,
    locked: Lock,
    inputs: Inputs,
    runtime_base: base.Base,
    built: list[BuiltFile],
    engine: engines.Engine,
    staging: str,
    logs: Path,
    console: Console,
    store: Store,
) -> tuple[ImageRef, _Image]:
    """The image in staging, by digest: the one that equal inputs gave before if staging still has it, else built anew."""
    identity = image.key(plan, runtime_base, locked.wheels["runtime"], built, "runtime", engine)
    known = store.note_get("image", identity)
    if known is not None:
        reference = ImageRef(repository=staging, digest=known["digest"])
        if registry.exists(reference):
            with console.step("image", plan.image.name) as step:
                step.result(f"{reference.digest[:19]}, {size(known['size'])}, made before and still in staging")
            _pull(reference, engine, console)
            return reference, _Image.of(known)
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
    return reference, _Image.of(known)


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


def _check_image(
    plan: Manifest,
    locked: Lock,
    reference: ImageRef,
    wheels: list[compile.Wheel],
    engine: engines.Engine,
    logs: Path,
    console: Console,
    keep: bool,
    store: Store,
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


def _model(
    plan: Manifest,
    locked: Lock,
    inputs: Inputs,
    reference: ImageRef,
    engine: engines.Engine,
    work: Path,
    logs: Path,
    console: Console,
    keep: bool,
) -> ModelRef | None:
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
        log=logs / "model.log",
        console=console,
        keep=keep,
    )


def _summary(made: BuildRecord, amounts: sizes.Sizes, target: Path, console: Console) -> None:
    took = ", ".join(f"{stage.name} {duration(stage.seconds)}" for stage in made.stages if stage.seconds >= 1)
    console.say(f"built {made.image}", "bold green")
    console.say(f"    {size(made.image_size)} compressed; device code: {', '.join(made.architectures) or 'none'}")
    console.say(f"    {size(amounts.uncompressed)} uncompressed: {sizes.largest(amounts)}; all in {sizes.FILE_NAME}")
    if console.verbose:
        console.print(sizes.table(amounts))
    for wheel in made.wheels:
        console.say(f"    {wheel.file}, {size(wheel.size)}, sha256 {wheel.sha256[:16]}")
    for deviation in made.deviations:
        console.say(f"    deviation: {deviation.kind} {deviation.subject}: {deviation.detail}", "yellow")
    console.say(f"    {sbom.FILE_NAME} beside the record, sha256 {made.sbom or ''}")
    console.say(f"    record {target}, seal {made.sha256[:16]}")
    if took:
        console.say(f"    {took}")
