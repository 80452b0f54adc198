"""The line's left side, once and in order: manifest, lock, fetch, base, patch, compile, wheel check, image, check, record."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from forge_build import base, compile, image, lock, manifest, record, sbom, steps
from forge_build.fetch import fetch
from forge_build.image import sizes
from forge_core import engine as engines
from forge_core.cli import work_folder
from forge_core.console import Console, duration, size
from forge_core.record import FILE_NAME, BuildRecord, RecordedStage, save
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
    with _alone(work_folder(name), console) as work:
        return _build(name, work, offline=offline, keep=keep, console=console, mirrors=mirrors, subset=subset)


@contextmanager
def _alone(work: Path, console: Console) -> Iterator[Path]:
    """Hold the profile's work folder: two builds in it would take away each other's wheels and records."""
    lock_file = FileLock(work / "build.lock")
    try:
        lock_file.acquire(timeout=0)
    except Timeout:
        with console.step("work folder", f"another build is using {work}") as step:
            while not lock_file.is_locked:
                step.waiting("it goes first")
                with suppress(Timeout):
                    lock_file.acquire(timeout=0.2)
            step.result("free")
    try:
        yield work
    finally:
        lock_file.release()


def _build(
    name: str,
    work: Path,
    *,
    offline: bool,
    keep: bool,
    console: Console,
    mirrors: Sequence[Path],
    subset: str | None,
) -> BuildRecord:
    target = work / FILE_NAME
    previous = _set_aside(target)
    plan = compile.narrowed(manifest.load(name), subset)
    locked = lock.load(plan)
    logs, clock = work / "logs", _Clock()
    logs.mkdir(exist_ok=True)
    store = Store.open()
    engine = engines.connect()
    try:
        staging = steps.staging_repository(plan, engine, console)
        steps.look_at_disks(plan, engine, store, work, console)
        with clock.stage("fetch"):
            inputs = fetch(plan, locked, store, offline=offline, console=console, mirrors=mirrors)
        with clock.stage("base"):
            bases = [base.build(use, plan, inputs, log=logs / "base.log", console=console) for use in base.USES]
        builder_base, runtime_base = bases
        with tempfile.TemporaryDirectory(prefix="sources-", dir=work) as scratch:
            with clock.stage("patch"):
                trees = steps.patch_sources(plan, locked, inputs, Path(scratch), console)
            builder_tag = image.builder_tag(plan, builder_base, locked.wheels["builder"], engine)

            def ensure_builder() -> None:
                image.builder(
                    plan,
                    inputs,
                    builder_base,
                    locked.wheels["builder"],
                    engine,
                    store,
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
            built, recorded = steps.check_wheels(plan, locked, inputs, wheels, work / "wheelhouse", console)
        with clock.stage("image"):
            reference, made = steps.make_image(
                plan, locked, inputs, runtime_base, built, engine, store, staging=staging, logs=logs, console=console
            )
        with clock.stage("image check"):
            checks = steps.check_image(
                plan, locked, reference, wheels, engine, store, logs=logs, console=console, keep=keep
            )
        with clock.stage("model"):
            prepared = steps.prepare_model(plan, locked, inputs, reference, engine, work, console=console, keep=keep)
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
