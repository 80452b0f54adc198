"""The line of this side, once, in order: target, kernels, boot, probe, judge, verdict, receipt, promote."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock, Timeout

from forge_core import record as build_record
from forge_core import registry
from forge_core.cli import work_folder
from forge_core.console import Console
from forge_core.engine import connect
from forge_core.errors import EnvironmentFailure, ExitCode, ForgeError, UsageError
from forge_validate import data, gpu, junit, numeric, policy, report, serving, target, trial
from forge_validate import receipt as receipts
from forge_validate.promote import FILE_NAME as PROMOTION
from forge_validate.promote import Promotion, promote
from forge_validate.receipt import Receipt, Subject, Timings
from forge_validate.recorded import bench
from forge_validate.verdict import decide


@dataclass(frozen=True)
class Wish:
    """What the user asks for."""

    profile: str
    model: Path | None = None
    record: Path | None = None
    no_promote: bool = False
    keep: bool = False
    offline: bool = False


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    receipt: Receipt
    promotion: Promotion | None
    exit_code: ExitCode


def known_profile(name: str | None) -> str:
    """The profile, if it has a serving and a policy; raises UsageError that names those that do."""
    known = sorted(set(data.names("serving")) & set(data.names("policies")))
    hint = f"profiles: {', '.join(known)}; e.g. `-- --profile rehearsal`"
    if name is None:
        raise UsageError("no --profile given", hint=hint)
    if name not in known:
        raise UsageError(f"no profile {name!r} with a serving and a policy", hint=hint)
    return name


def validate(wish: Wish, console: Console) -> Outcome:
    """Walk the line; returns with exit code 0 or 1, raises ForgeError where no verdict could be reached."""
    profile = known_profile(wish.profile)
    work = work_folder(profile)
    with _alone(work):
        _clear(work)
        judged = bench(profile)
        rules, server_plan = judged.policy, serving.load(profile)
        with console.step("target", profile) as step:
            subject, folder = target.recorded(
                wish.record or work / build_record.FILE_NAME,
                profile=profile,
                served=server_plan.model,
                model=wish.model,
                usual_model=work / "model",
            )
            _demand_offline(wish, subject)
            gpus = gpu.chosen(server_plan.devices, gpu.inventory())
            gpu.demand_fit(subject.architectures, gpus)
            engine = connect(builds=False)
            step.result(str(subject.image))
        with console.step("pull", subject.image.registry) as step:
            began = time.monotonic()
            target.pull(engine, subject)
            pulled = time.monotonic() - began
            step.result(subject.image.digest)
        tried = trial.run(
            engine,
            trial.Subject(str(subject.image), server_plan, subject.model, folder, gpus),
            judged,
            work,
            console,
            keep=wish.keep,
        )
        done = Receipt(
            profile=profile,
            kind=subject.kind,
            finished=datetime.now(UTC),
            forge_version=version("sm120-forge"),
            target=subject.target,
            record=subject.record,
            subject=Subject(
                image=subject.image,
                model=subject.model.name,
                model_revision=subject.model.revision,
                serving=server_plan.content_sha256(),
                suite=judged.suite.content_sha256(),
                answers=judged.answers.content_sha256(),
                policy=rules.content_sha256(),
            ),
            arguments=server_plan.arguments(),
            engine=engine.version,
            gpus=tuple(f"{one.name}, compute capability {one.capability}, {one.uuid}" for one in gpus),
            resolved=tried.resolved,
            deviations=subject.deviations,
            results=tried.results,
            verdict=decide(tried.results, rules),
            timings=Timings(pull=round(pulled, 3), boot=tried.boot, probe=tried.probe, phases=tried.phases),
        )
        receipts.save(done, work / receipts.FILE_NAME)
        junit.save(done, work / junit.FILE_NAME)
        return _release(wish, done, rules, work, console)


def _release(wish: Wish, done: Receipt, rules: policy.Policy, work: Path, console: Console) -> Outcome:
    """Promote what may be promoted; show the summary whatever comes of it."""
    if done.verdict.outcome != "passed":
        report.show(console, done, rules, None, None)
        return Outcome(done, None, ExitCode.REFUSED)
    if wish.no_promote:
        report.show(console, done, rules, None, "--no-promote")
        return Outcome(done, None, ExitCode.PASSED)
    try:
        moved = promote(done, rules, log=work / "logs" / "promote.log", record=work / PROMOTION)
    except ForgeError as error:
        report.show(console, done, rules, None, error.message)
        raise
    report.show(console, done, rules, moved, None)
    return Outcome(done, moved, ExitCode.PASSED)


def _clear(work: Path) -> None:
    """What an earlier run left is no result of this one."""
    for name in (receipts.FILE_NAME, junit.FILE_NAME, numeric.FILE_NAME, PROMOTION):
        (work / name).unlink(missing_ok=True)


def _demand_offline(wish: Wish, subject: target.Recorded) -> None:
    if wish.offline and not registry.is_loopback(subject.image.repository):
        raise UsageError(f"--offline, but staging is {subject.image.registry}, which is not on this machine")


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    """One validation of a profile at a time: they would share logs, exchanges and the tag."""
    lock = FileLock(work / "validate.lock", timeout=0)
    try:
        with lock:
            yield
    except Timeout as error:
        raise EnvironmentFailure(
            f"another validation runs in {work}", hint="wait for it; a lock of a dead process is free by itself"
        ) from error
