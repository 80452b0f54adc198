"""The line of this side, once, in order: target, kernels, boot or attach, probe, judge, verdict, receipt, promote."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock, Timeout

from forge_core.cli import work_folder
from forge_core.console import Console
from forge_core.errors import EnvironmentFailure, ExitCode, ForgeError, UsageError
from forge_validate import attached, junit, policy, report
from forge_validate import receipt as receipts
from forge_validate.bench import known_profile
from forge_validate.line import Outcome, Walked, Wish
from forge_validate.receipt import Receipt, Timings
from forge_validate.target import Recorded
from forge_validate.verdict import decide, waivers

__all__ = ["Outcome", "Wish", "known_profile", "receipt_of", "validate"]

_LEFT_OVER = (receipts.FILE_NAME, junit.FILE_NAME, "numeric.json", "promotion.json")


def validate(wish: Wish, console: Console) -> Outcome:
    """Walk the line; returns with exit code 0 or 1, raises ForgeError where no verdict could be reached.

    What has no record of ours leaves its results in a folder of its own (`work/P/url`, `work/P/image`).
    """
    known_profile(wish.profile, boots=wish.url is None)
    if wish.url is None and (wish.served or wish.api_key_env):
        raise UsageError("--served and --api-key-env go with --url", hint="leave them out")
    home = work_folder(wish.profile)
    work = home / "url" if wish.url else home / "image" if wish.image else home
    work.mkdir(exist_ok=True)
    with _alone(work):
        for name in _LEFT_OVER:
            # What an earlier run left is no result of this one.
            (work / name).unlink(missing_ok=True)
        walked = _walk(wish, home, work, console)
        done = receipt_of(walked)
        receipts.save(done, work / receipts.FILE_NAME)
        junit.save(done, work / junit.FILE_NAME)
        return _release(wish, done, walked.bench.policy, work, console)


def _walk(wish: Wish, home: Path, work: Path, console: Console) -> Walked:
    if wish.url is not None:
        return attached.walk(wish, wish.url, work, console)
    # Here, not above: a server that runs already is judged without an engine, and without the code that speaks to one.
    from forge_validate import booted

    return booted.walk(wish, home, work, console)


def receipt_of(walked: Walked) -> Receipt:
    """The receipt of a target that was asked: its verdict under the policy of its bench, and its deviations."""
    target, tried, rules = walked.target, walked.tried, walked.bench.policy
    verdict = decide(tried.results, rules)
    if not isinstance(target, Recorded) and verdict.outcome == "passed":
        verdict = verdict.model_copy(update={"next_step": "none: what has no build record of ours is never promoted"})
    return Receipt(
        profile=target.profile,
        kind=target.kind if isinstance(target, Recorded) else None,
        finished=datetime.now(UTC),
        forge_version=version("sm120-forge"),
        target=target.target,
        record=target.record if isinstance(target, Recorded) else None,
        subject=walked.subject,
        arguments=walked.arguments,
        engine=walked.engine,
        gpus=walked.gpus,
        resolved=tried.resolved,
        offers=tried.offers.seen,
        deviations=target.deviations + waivers(tried.results, rules),
        results=tried.results,
        verdict=verdict,
        timings=Timings(
            pull=walked.pull,
            boot=tried.boot,
            probe=tried.probe,
            phases=tried.phases,
            families=tried.families,
        ),
    )


def _release(wish: Wish, done: Receipt, rules: policy.Policy, work: Path, console: Console) -> Outcome:
    """Promote what may be promoted; show the summary whatever comes of it."""
    if done.verdict.outcome != "passed":
        report.show(console, done, rules, None, None)
        return Outcome(done, None, ExitCode.REFUSED)
    unasked = "--no-promote" if wish.no_promote else None
    if done.target != "recorded":
        unasked = "what has no build record of ours is never promoted"
    if unasked is not None:
        report.show(console, done, rules, None, unasked)
        return Outcome(done, None, ExitCode.PASSED)
    from forge_validate.promote import FILE_NAME, promote

    try:
        moved = promote(done, rules, log=work / "logs" / "promote.log", record=work / FILE_NAME)
    except ForgeError as error:
        report.show(console, done, rules, None, error.message)
        raise
    report.show(console, done, rules, moved, None)
    return Outcome(done, moved, ExitCode.PASSED)


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    """One validation in a folder at a time: they would share logs, exchanges and the tag."""
    lock = FileLock(work / "validate.lock", timeout=0)
    try:
        with lock:
            yield
    except Timeout as error:
        raise EnvironmentFailure(
            f"another validation runs in {work}", hint="wait for it; a lock of a dead process is free by itself"
        ) from error
