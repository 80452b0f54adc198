"""One trial: ask the kernels, boot an image with a serving, ask a suite, judge what came back. No tag, no receipt here."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from forge_core.console import Console, Step, duration
from forge_core.engine import Engine
from forge_core.errors import EnvironmentFailure, ForgeError
from forge_core.model import ModelRef
from forge_validate import gpu, numeric, report
from forge_validate.boot import boot
from forge_validate.checks import CheckResult
from forge_validate.exchange import Exchange
from forge_validate.judge import Bench
from forge_validate.probe import probe
from forge_validate.resolved import resolved
from forge_validate.server import Server
from forge_validate.serving import MemorySlack, Serving
from forge_validate.verdict import lacking


@dataclass(frozen=True)
class Subject:
    """What is tried."""

    image: str
    """An id or a reference by digest, pulled already."""
    serving: Serving
    model: ModelRef
    folder: Path
    """Where the model's files lie."""
    gpus: tuple[gpu.Gpu, ...] = ()
    """What of this host's the serving uses."""


@dataclass(frozen=True)
class Tried:
    """What came of a trial; times in seconds."""

    results: tuple[CheckResult, ...]
    exchanges: tuple[Exchange, ...]
    resolved: dict[str, str]
    """What the server really ran with (see `resolved`)."""
    boot: float
    probe: float
    phases: dict[str, float]


def run(engine: Engine, subject: Subject, bench: Bench, work: Path, console: Console, *, keep: bool = False) -> Tried:
    """Try a subject; writes `work/logs/server.log`, `work/exchanges/` and `work/numeric.json`. Raises as `boot`.

    Where the policy demands kernels, they are asked first, and nothing is booted on one that does not pass.
    """
    log = work / "logs" / "server.log"
    with _gpus(subject, console, keep=keep):
        return _run(engine, subject, bench, work, log, console, keep)


def _run(engine: Engine, subject: Subject, bench: Bench, work: Path, log: Path, console: Console, keep: bool) -> Tried:
    kernels = numeric.run(engine, subject.image, subject.serving, bench.policy, work, console)
    if lacking(kernels, bench.policy):
        console.say("    no server is started on kernels like these", "yellow")
        return Tried(results=kernels + bench.judge([]), exchanges=(), resolved={}, boot=0.0, probe=0.0, phases={})
    began = time.monotonic()
    with boot(
        engine, subject.image, subject.serving, subject.model, subject.folder, log=log, console=console, keep=keep
    ) as server:
        booted = time.monotonic() - began
        with console.step("probe", f"{len(bench.suite.cases)} cases") as step:
            exchanges, results = _ask(server, bench, work / "exchanges", step)
            probed = step.elapsed
            step.result(report.counts(results, bench.policy))
        info = next((e.response for e in exchanges if e.request.path == "/server_info"), None)
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        return Tried(
            results=kernels + results,
            exchanges=exchanges,
            resolved=resolved(info, lines, subject.serving.tells),
            boot=round(booted, 3),
            probe=round(probed, 3),
            phases=dict(server.phases),
        )


@contextmanager
def _gpus(subject: Subject, console: Console, *, keep: bool) -> Iterator[None]:
    """Hold the GPUs, and give them on only when the memory of this trial is back.

    Whatever ends a trial, the next one must not measure what this one left; its own error is not replaced by ours.
    """
    slack = subject.serving.gpu_memory_slack
    if not subject.gpus or slack is None:
        yield
        return
    with gpu.held(subject.gpus, console):
        before = gpu.baseline(subject.gpus)
        for line in before.told:
            console.say(f"    {line}", "yellow")
        try:
            yield
        except ForgeError:
            if not keep:
                with suppress(EnvironmentFailure):
                    _await_memory(before, slack, console)
            raise
        if not keep:
            _await_memory(before, slack, console)


def _await_memory(before: gpu.Baseline, slack: MemorySlack, console: Console) -> None:
    with console.step("gpu memory", "back to its baseline") as step:
        waited = gpu.await_baseline(before, slack_bytes=slack.bytes, deadline_s=slack.within, on_wait=step.waiting)
        step.result(f"after {duration(waited)}")


def _ask(
    server: Server, bench: Bench, folder: Path, step: Step
) -> tuple[tuple[Exchange, ...], tuple[CheckResult, ...]]:
    """Ask and judge case by case, so that the user sees each answer when it comes."""
    cases = bench.suite.cases
    recorded: dict[str, Exchange] = {}
    results: list[CheckResult] = []

    def draw() -> None:
        waits = cases[min(len(recorded), len(cases) - 1)]
        step.progress(len(recorded), len(cases), unit="cases", note=waits.name)

    with step.ticking(draw):
        for case, exchange in probe(server, bench.suite, bench.answers, folder):
            recorded[case.name] = exchange
            judged = bench.judge_case(case, recorded)
            results += judged
            step.say(*_line(case.name, exchange, judged, bench))
    return tuple(recorded.values()), tuple(results)


def _line(name: str, exchange: Exchange, judged: Sequence[CheckResult], bench: Bench) -> tuple[str, str]:
    """The live line of a case: its worst check, how long it took, and what the model said."""
    # Of equals the last: a case names its checks from the plain to the telling.
    worst = max(reversed(judged), key=lambda result: report.weight(result, bench.policy.requires(result.check)))
    mark, style = report.mark(worst, bench.policy.requires(worst.check))
    return f"{mark:<4}  {name:<24}  {duration(exchange.seconds):>7}  {report.told(worst)}", style
