"""One trial: ask the kernels, boot an image with a serving, ask a suite, judge what came back. No tag, no receipt here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from forge_core.console import Console, duration
from forge_core.engine import Engine
from forge_core.errors import EnvironmentFailure, ForgeError
from forge_core.model import ModelRef
from forge_validate import gpu, numeric
from forge_validate.boot import boot
from forge_validate.examine import Tried, examine
from forge_validate.judge import Bench
from forge_validate.offers import Offers
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


def run(engine: Engine, subject: Subject, bench: Bench, work: Path, console: Console, *, keep: bool = False) -> Tried:
    """Try a subject; writes `work/logs/server.log`, `work/exchanges/` and `work/numeric.json`. Raises as `boot`.

    Where the policy demands kernels, they are asked first, and nothing is booted on one that does not pass.
    """
    log = work / "logs" / "server.log"
    with held(subject, console, keep=keep):
        return _run(engine, subject, bench, work, log, console, keep)


def _run(engine: Engine, subject: Subject, bench: Bench, work: Path, log: Path, console: Console, keep: bool) -> Tried:
    kernels = numeric.run(engine, subject.image, subject.serving, bench.policy, work, console)
    if lacking(kernels, bench.policy):
        console.say("    no server is started on kernels like these", "yellow")
        return Tried(results=kernels + bench.judge([]))
    began = time.monotonic()
    with boot(
        engine, subject.image, subject.serving, subject.model, subject.folder, log=log, console=console, keep=keep
    ) as server:
        booted = time.monotonic() - began
        server = _with_gpus(server, subject.gpus)
        asked = replace(bench, model=subject.folder, identity=subject.model)
        tried = examine(server, asked, work, console, subject.serving.tells)
        return replace(tried, results=kernels + tried.results, boot=round(booted, 3), phases=dict(server.phases))


def _with_gpus(server: Server, gpus: tuple[gpu.Gpu, ...]) -> Server:
    """The server with what its GPUs hold, where their driver tells it."""
    if not gpus or gpu.used(gpus) is None:
        return server
    offers = server.offers.joined(Offers.certain(("gpu-memory",), "the driver tells it"))
    return replace(server, gpu_memory=lambda: gpu.used(gpus), offers=offers)


@contextmanager
def held(subject: Subject, console: Console, *, keep: bool) -> Iterator[None]:
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
