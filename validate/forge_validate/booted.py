"""The first half of the line for an image: target, pull, kernels, boot, ask, judge."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

from forge_core import record as build_record
from forge_core import registry
from forge_core.console import Console
from forge_core.engine import Engine, connect
from forge_core.errors import UsageError
from forge_validate import bench, bootstrap, gpu, serving, trial
from forge_validate.families.golden import GoldenFamily
from forge_validate.judge import Bench
from forge_validate.line import Walked, Wish
from forge_validate.policy import Bootstrap
from forge_validate.receipt import Subject
from forge_validate.serving import Serving
from forge_validate.target import Image, Recorded
from forge_validate.target.pull import pull
from forge_validate.target.record import recorded
from forge_validate.target.reference import fitted, image


@dataclass(frozen=True)
class Reached:
    """An image that is here, and all that a server on it needs."""

    target: Recorded | Image
    engine: Engine
    subject: trial.Subject
    pull: float
    """Seconds."""


def reach(wish: Wish, home: Path, console: Console) -> Reached:
    """Find the target and pull it; `home` is the profile's folder. Raises what target and pull raise."""
    plan = serving.load(wish.profile)
    with console.step("target", wish.image or wish.profile) as step:
        target, folder = _target(wish, plan, home)
        if wish.offline and not registry.is_loopback(target.image.repository):
            raise UsageError(f"--offline, but {target.image.registry} is not on this machine")
        gpus = gpu.chosen(plan.devices, gpu.inventory())
        if isinstance(target, Recorded):
            gpu.demand_fit(target.architectures, gpus)
        engine = connect(builds=False)
        step.result(str(target.image))
    with console.step("pull", target.image.registry) as step:
        began = time.monotonic()
        identity = pull(engine, target)
        pulled = time.monotonic() - began
        step.result(target.image.digest)
        if isinstance(target, Image):
            plan = fitted(engine, identity, plan)
    return Reached(target, engine, trial.Subject(str(target.image), plan, target.model, folder, gpus), pulled)


def walk(wish: Wish, home: Path, work: Path, console: Console) -> Walked:
    """Boot and judge an image; `home` is the profile's folder, `work` this run's. Raises what the stages raise."""
    judged = bench.bench(wish.profile, suite_name=wish.suite, answers=wish.answers)
    reached = reach(wish, home, console)
    target, plan = reached.target, reached.subject.serving
    if isinstance(target, Recorded):
        judged = replace(judged, bootstrap=_bootstrap(judged, target, home))
    asked = bench.chosen(judged.policy, plan.model, suite_name=wish.suite, answers=wish.answers)
    return Walked(
        target=target.model_copy(update={"deviations": target.deviations + asked}),
        bench=judged,
        tried=trial.run(reached.engine, reached.subject, judged, work, console, keep=wish.keep),
        subject=Subject(
            image=target.image,
            model=target.model.name,
            model_revision=target.model.revision,
            serving=plan.content_sha256(),
            **bench.rules_of(judged),
        ),
        arguments=(*plan.command, *plan.arguments()),
        engine=reached.engine.version,
        gpus=tuple(f"{one.name}, compute capability {one.capability}, {one.uuid}" for one in reached.subject.gpus),
        pull=round(reached.pull, 3),
    )


def _bootstrap(judged: Bench, target: Recorded, home: Path) -> Bootstrap | None:
    """The policy's bootstrap rule, where the suite asks for a golden and the rule holds for this target."""
    if GoldenFamily.name not in judged.suite.families:
        return None
    known = judged.golden is not None
    return bootstrap.holding(judged.policy, target.image, target.model.name, golden=known, folder=home)


def _target(wish: Wish, plan: Serving, home: Path) -> tuple[Recorded | Image, Path]:
    usual = home / "model"
    if wish.image is None:
        path = wish.record or home / build_record.FILE_NAME
        return recorded(path, profile=wish.profile, served=plan.model, model=wish.model, usual_model=usual)
    if wish.record is not None:
        raise UsageError("--record and --image name two targets", hint="give one")
    return image(wish.image, profile=wish.profile, served=plan.model, model=wish.model, usual_model=usual)
