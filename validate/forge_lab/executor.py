"""The executor: walks a plan on a bed, trial by trial, and writes what came of each into the journal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from forge_core.console import Console, Step, duration
from forge_core.model import canonical_sha256
from forge_lab import asking, baseline, held_out
from forge_lab.asking import Asked
from forge_lab.bed import Bed, deviations
from forge_lab.held_out import Readings
from forge_lab.journal import Baseline, Checked, Entry, Journal, Measured, Subject
from forge_lab.plan import Trial
from forge_validate import suite
from forge_validate.families.runner import Sender
from forge_validate.judge import Bench
from forge_validate.policy import Policy
from forge_validate.server import Server
from forge_validate.verdict import decide, lacking, waived

LIMIT_S = 420
"""Seconds in which one mutant is asked: several times as long as a healthy server takes for the suite."""


@dataclass(frozen=True)
class Ground:
    """What all trials of a walk share."""

    image: str | None
    """The image's digest; none: a stand-in."""
    model: str | None
    """The model's revision."""
    code: str
    """Sha256 of the gate, the faults and the lab."""
    bench: Callable[[Trial], Bench]
    """The bench of a trial."""
    work: Path
    """Where exchanges are left, in a folder for each trial."""
    keep: Callable[[Trial, Bench, Asked, Path], None] | None = None
    """Leaves a receipt in the folder of a trial; none: a stand-in has no image that one could be about."""

    def subject(self, trial: Trial, bench: Bench) -> Subject:
        """What a trial is about, by the sha256 of all that decides it."""
        return Subject(
            image=self.image,
            model=self.model,
            suite=bench.suite.content_sha256(),
            answers=bench.answers.content_sha256(),
            policy=bench.policy.content_sha256(),
            code=self.code,
        )


def key(trial: Trial, subject: Subject) -> str:
    """What a trial is known by: its mutant, suite, policy, image, model and code; another of any is another trial."""
    return canonical_sha256([trial.model_dump(mode="json"), subject.model_dump(mode="json")])


def open_trials(trials: Sequence[Trial], ground: Ground, journal: Journal) -> list[Trial]:
    """Those of a plan that the journal does not have yet."""
    done = {entry.key for entry in journal.entries()}
    return [trial for trial in trials if key(trial, ground.subject(trial, ground.bench(trial))) not in done]


def run(
    trials: Sequence[Trial],
    bed: Bed,
    ground: Ground,
    journal: Journal,
    console: Console,
    *,
    within: float | None = None,
) -> tuple[Entry, ...]:
    """Make every trial that is not in the journal; returns the new entries.

    No trial is begun after `within` seconds. A server that was wrecked, or is not as it was after a mutant, is started
    anew. Raises what booting raises.
    """
    waiting = open_trials(trials, ground, journal)
    made: list[Entry] = []
    began = time.monotonic()
    healthy: Readings = {}
    noise: Measured | None = None
    with console.step("trials", f"{len(waiting)} of {len(trials)} to be made") as step:
        for trial in waiting:
            if within is not None and time.monotonic() - began > within:
                step.say(f"the time of {duration(within)} is over; the next call takes up from here", "yellow")
                break
            restarted = _ready(bed, trial, step)
            if restarted or (not healthy and trial.plan == "power"):
                healthy, noise = _reference(bed, ground.bench(trial), ground.work, trial)
            entry = _trial(trial, bed, ground, healthy, noise, restarted)
            journal.append(entry)
            made.append(entry)
            step.say(*_line(entry))
            step.progress(len(made), len(waiting), unit="trials", note=trial.name)
        step.result(f"{len(made)} made, {len(waiting) - len(made)} left")
    return tuple(made)


def _ready(bed: Bed, trial: Trial, step: Step) -> bool:
    """Bring the server back to what it was; returns whether it had to be started."""
    why: str | None = "another number format" if bed.dtype is not None else "none runs"
    if bed.dtype == trial.dtype:
        why = bed.heal()
        if why is None:
            return False
    step.say(f"a server is started: {why}")
    bed.start(trial.dtype)
    if (why := bed.heal()) is not None:
        step.say(f"it is not at rest: {why}", "yellow")
    return True


def _reference(bed: Bed, bench: Bench, work: Path, trial: Trial) -> tuple[Readings, Measured | None]:
    """What the healthy server says to the held-out probe and, for a walk with all checks, how far it is from itself."""
    if trial.plan != "power":
        return {}, None
    with Sender(bed.server, work / "held-out") as sender:
        first = held_out.ask(sender, bench)
        second = held_out.ask(sender, bench) if trial.checks == "all" else None
    bed.empty()
    return first, None if second is None else held_out.compare(first, second)


def _trial(trial: Trial, bed: Bed, ground: Ground, healthy: Readings, noise: Measured | None, restarted: bool) -> Entry:
    bench, folder = ground.bench(trial), ground.work / trial.name
    for old in folder.glob("*.json"):
        old.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    if trial.mutant is None:
        if trial.style != "warm":
            bed.empty()
        began = time.monotonic()
        asked = asking.ask(bed.server, bench, folder, trial.checks, backwards=trial.style == "reversed")
        took = time.monotonic() - began
        return _entry(trial, ground, bench, asked, took, None, None, noise, None, restarted)
    with bed.broken(trial.mutant) as (server, fired):
        began = time.monotonic()
        asked = asking.ask(server, bench, folder, trial.checks, limit=LIMIT_S)
        took = time.monotonic() - began
        # A walk until the first kill is for speed: there only an escape is looked at closer.
        closer = trial.plan == "power" and (
            trial.checks == "all" or decide(asked.results, bench.policy).outcome == "passed"
        )
        seeds = baseline.ask(server, folder) if closer else None
        measured = None
        # What hangs or is broken on the wire has no numbers to measure, and costs a deadline for each of them.
        if closer and trial.mutant.of not in ("protocol", "liveness"):
            measured = held_out.compare(healthy, _held_out(server, bench, folder))
        return _entry(trial, ground, bench, asked, took, seeds, measured, noise, fired(), restarted)


def _held_out(server: Server, bench: Bench, folder: Path) -> Readings:
    with Sender(server, folder) as sender:
        return held_out.ask(sender, bench)


def _entry(
    trial: Trial,
    ground: Ground,
    bench: Bench,
    asked: Asked,
    took: float,
    seeds: Baseline | None,
    measured: Measured | None,
    noise: Measured | None,
    fired: bool | None,
    restarted: bool,
) -> Entry:
    rules: Policy = bench.policy
    verdict = decide(asked.results, rules)
    spared = {result.check for result in waived(asked.results, rules)}
    missing = lacking(asked.results, rules)
    prompt, reply = asked.tokens()
    subject = ground.subject(trial, bench)
    if ground.keep is not None:
        ground.keep(trial, bench, asked, ground.work / trial.name)
    return Entry(
        key=key(trial, subject),
        trial=trial,
        subject=subject,
        when=datetime.now(UTC),
        verdict=verdict.outcome,
        kind=verdict.kind,
        cause=verdict.cause[:400],
        checks=tuple(
            Checked(check=r.check, outcome=r.outcome, required=rules.requires(r.check) and r.check not in spared)
            for r in asked.results
        ),
        killed_by=missing[0].check if missing else None,
        baseline=seeds,
        measured=measured,
        noise=noise,
        fired=fired,
        deviations=deviations(trial.mutant),
        requests=len(asked.exchanges),
        generating=asked.generating,
        prompt_tokens=prompt,
        reply_tokens=reply,
        seconds=round(took, 3),
        restarted=restarted,
        families=asked.took,
    )


def _line(entry: Entry) -> tuple[str, str]:
    """The live line of a trial."""
    mutant = entry.trial.mutant
    if mutant is None:
        word, style = ("ok", "") if not entry.killed else ("ALARM", "red")
    else:
        right = entry.kind in mutant.expects
        word, style = ("killed", "" if right else "yellow") if entry.killed else ("ESCAPED", "red")
    kind = f" as {entry.kind}" if entry.kind else ""
    idle = ", the fault did nothing" if entry.fired is False else ""
    by = f" by {entry.killed_by}" if entry.killed_by else ""
    return f"{word:<8} {entry.trial.name:<28} {duration(entry.seconds):>9}{kind}{by}{idle}", style


def seeded(bench: Bench, trial: Trial) -> Bench:
    """The bench with the seed of a trial."""
    if trial.seed is None:
        return bench
    asked: suite.Suite = bench.suite.model_copy(update={"seed": trial.seed})
    return replace(bench, suite=asked)
