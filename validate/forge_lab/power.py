"""`nox -s power`: a plan, the bed it is walked on, its journal, and what is said of it in the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from forge_core.cli import project_root, work_folder
from forge_core.console import Console
from forge_core.errors import EnvironmentFailure, ExitCode, UsageError
from forge_core.files import write_text
from forge_lab import bounds, executor, journal, mutants, table
from forge_lab.bed import Switchable
from forge_lab.executor import Ground
from forge_lab.journal import Entry, Journal
from forge_lab.plan import SUITE, Checks, Trial, clean, rare
from forge_lab.plan import power as power_plan
from forge_lab.rehearsal import Rehearsal

COMMITTED = Path("validate", "forge_lab", "power.jsonl")
"""The journal that belongs to docs/gate-power.md, below the checkout."""
PAGE = Path("docs", "gate-power.md")


@dataclass(frozen=True)
class Wish:
    """What the user asks for."""

    plan: Literal["power", "clean", "rare"] = "power"
    sample: bool = False
    only: tuple[str, ...] = ()
    """Mutants or classes."""
    runs: int = 0
    """Of `clean`, and of each rate of `rare`."""
    checks: Checks | None = None
    """None: all, for the sample to the first kill."""
    suite: str = SUITE
    within: float | None = None
    """Seconds after which no trial is begun."""
    record: Path | None = None
    model: Path | None = None
    write: bool = False
    """Write the page and the journal that belongs to it."""


@dataclass(frozen=True)
class Outcome:
    """What came of it; the entries are those of the plan, made now or before."""

    entries: tuple[Entry, ...]
    left: int
    """Trials that were not made yet."""
    exit_code: ExitCode


def trials(wish: Wish) -> tuple[Trial, ...]:
    """The plan's trials; raises UsageError for what does not go together."""
    if wish.plan != "power":
        if wish.sample or wish.only:
            raise UsageError(f"--sample and --only are of the plan power, not of {wish.plan}", hint="leave them out")
        if wish.runs < 1:
            raise UsageError(f"the plan {wish.plan} needs --runs N", hint="e.g. `--plan clean --runs 200`")
        return clean(wish.runs, suite=wish.suite) if wish.plan == "clean" else rare(wish.runs, suite=wish.suite)
    if wish.runs:
        raise UsageError("--runs is of the plans clean and rare", hint="leave it out")
    checks: Checks = wish.checks or ("first" if wish.sample else "all")
    chosen = mutants.named(wish.only) if wish.only else None
    return power_plan(chosen, checks=checks, sample=wish.sample, suite=wish.suite)


def power(wish: Wish, console: Console) -> Outcome:
    """Walk the plan; exit code 0 when nothing hard escaped (a clean run: no alarm), 4 when trials are left, else 1."""
    asked = trials(wish)
    work = work_folder("lab")
    with _alone(work):
        book = Journal(work / "journal.jsonl")
        bed = Rehearsal(console, record=wish.record, model=wish.model)
        ground = bed.ground(work / wish.plan)
        with Switchable(bed.boot, work) as server:
            executor.run(asked, server, ground, book, console, within=wish.within)
        entries = made(asked, ground, book)
    left = len(asked) - len(entries)
    _tell(wish, entries, left, console)
    if wish.write:
        _write(entries, left, console)
    return Outcome(entries, left, exit_code(wish, entries, left))


def made(asked: Sequence[Trial], ground: Ground, book: Journal) -> tuple[Entry, ...]:
    """The journal's entries of these trials, in their order, of this image, model and code."""
    known = {entry.key: entry for entry in book.entries()}
    keys = (executor.key(trial, ground.subject(trial, ground.bench(trial))) for trial in asked)
    return tuple(known[one] for one in keys if one in known)


def exit_code(wish: Wish, entries: Sequence[Entry], left: int) -> ExitCode:
    """1 for an escape or a false alarm, 4 when not all is done, 0 else; the rates of `rare` are no verdict."""
    wrong: Sequence[Entry] = ()
    if wish.plan == "power":
        wrong = table.escapes(entries, mutants.hardness())
    elif wish.plan == "clean":
        wrong = [entry for entry in entries if entry.killed]
    if wrong:
        return ExitCode.REFUSED
    return ExitCode.INCONCLUSIVE if left else ExitCode.PASSED


def _tell(wish: Wish, entries: Sequence[Entry], left: int, console: Console) -> None:
    if wish.plan == "clean":
        alarms = sum(entry.killed for entry in entries)
        limit = f", at most {bounds.upper(alarms, len(entries)):.2%} with 95 % confidence" if entries else ""
        console.say(f"clean runs  {len(entries)}, {alarms} false alarms{limit}; {left} left", "bold")
        return
    killed = [entry for entry in entries if entry.killed]
    named = sum(table.right(entry) for entry in killed)
    console.say(f"mutants     {len(entries)}, {len(killed)} killed, {named} named right; {left} left", "bold")
    for entry in table.escapes(entries, mutants.hardness()):
        console.say(f"escaped     {entry.trial.name}: {entry.cause}", "red")
    idle = [entry.trial.name for entry in entries if entry.fired is False]
    if idle:
        console.say(f"did nothing {', '.join(idle)}", "yellow")


def _write(entries: Sequence[Entry], left: int, console: Console) -> None:
    """The page and its journal; entries of other plans that stand there already stay, if they are of the same subject."""
    if left:
        console.say(f"nothing is written: {left} trials are left", "yellow")
        return
    root = project_root()
    plans = {entry.trial.plan for entry in entries}
    others = [entry for entry in Journal(root / COMMITTED).entries() if entry.trial.plan not in plans]
    whole = [*others, *entries]
    journal.save(whole, root / COMMITTED)
    write_text(root / PAGE, table.power(whole, mutants.hardness()))
    console.say(f"written: {PAGE} and {COMMITTED}")


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    """One walk in a folder at a time: they would share the switch."""
    lock = FileLock(work / "lab.lock", timeout=0)
    try:
        with lock:
            yield
    except Timeout as error:
        raise EnvironmentFailure(
            f"another walk runs in {work}", hint="wait for it; a lock of a dead process is free by itself"
        ) from error
