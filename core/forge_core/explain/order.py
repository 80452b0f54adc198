"""Which of the lines that may be a cause is the cause.

What the machine says (the kernel's killer) goes before what the log says; in the log the earliest cause, whichever rank it is of,
goes before exceptions nobody knows, those before headlines, those before consequences. What is tolerated where it
stands (an autotuner tries what cannot run) counts only when nothing else explains a death.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from forge_core.explain.model import UNCLASSIFIED, Confidence, Evidence, Follows, LogFinding
from forge_core.explain.reader import Event
from forge_core.explain.signatures import Book
from forge_core.redact import redact

_SURVIVED = 200
"""Lines a log must go on, with no sign of a death, for a doubtful line to have been harmless."""
_LAST = 40
_OTHERS = 8
_LEVELS: tuple[Confidence, ...] = ("low", "medium", "high")
_OF_A_KILL = ("oom_host", "oom_host_build", "killed_sigkill")
_ERROR = re.compile(
    r"(?:\S+: )?(?:fatal |internal )?error\b|E: |fatal: |(?:\w+\.)*\w+(?:Error|Exception)(?::|$)|panic: ", re.IGNORECASE
)


@dataclass(frozen=True)
class Log:
    """What was seen of a log."""

    events: Sequence[Event]
    phase: str | None
    lines: int
    last: tuple[str, ...]
    """Its last lines, for people."""
    bodies: tuple[str, ...]
    """The same without prefixes."""

    @property
    def fell(self) -> int | None:
        """Number of the last line that says that a process died."""
        return max((e.line for e in self.events if e.role == "consequence" and _level(e) > 0), default=None)


def conclude(log: Log, evidence: Evidence, book: Book, stalled: LogFinding | None) -> LogFinding | None:
    """The finding of a log, if there is one."""
    causes, tolerated = _causes(log, evidence)
    if evidence.out_of_memory:
        return _killed(log, evidence, causes)
    sure = [event for event in causes if _level(event) > 0]
    doubtful = _doubtful(log, evidence, causes)
    for group, note in (
        (sure, None),
        (doubtful, None),
        (_of(log, "banner"), "only a headline is in this log; the cause should stand below it"),
        (
            tolerated if evidence.died or log.fell else [],
            "tolerated where it stands, but nothing else explains the end",
        ),
        (
            [e for e in _of(log, "consequence") if _level(e) > 0],
            "only consequences are in this log; the cause came earlier",
        ),
        (_of(log, "context") if not evidence.died else [], "a frame of a traceback whose end is not in this log"),
    ):
        if group:
            return _found(group[0], log, evidence, [*sure, *doubtful], note)
    return _without_a_line(log, evidence, book, stalled)


def _without_a_line(log: Log, evidence: Evidence, book: Book, stalled: LogFinding | None) -> LogFinding | None:
    """When no line of the log is known to end anything."""
    if stalled is not None and not evidence.died:
        return stalled
    if evidence.exit_code and (told := book.data.exits.get(evidence.exit_code)) is not None:
        return LogFinding(
            kind=told.class_,
            where=f"exit status {evidence.exit_code}",
            message=f"ended with exit status {evidence.exit_code} and said nothing about why",
            line=None,
            rank=None,
            phase=log.phase,
            role="exit",
            remedy=told.remedy,
            fault=told.fault,
            confidence="low",
            evidence=_words(log, evidence, None),
            last=log.last,
        )
    if evidence.died or (log.phase != "serving" and any(_ERROR.match(body) for body in log.bodies)):
        return _unclassified(log, evidence)
    if warnings := _of(log, "warning"):
        return _found(warnings[-1], log, evidence, (), None)
    return None


def _causes(log: Log, evidence: Evidence) -> tuple[list[Event], list[Event]]:
    """Causes by line, without those that another one outranks; and those that are tolerated where they stand."""
    causes: list[Event] = []
    tolerated: list[Event] = []
    for event in _of(log, "cause"):
        assert event.signature is not None
        spared = (event.signature.unless_tuning and event.phase == "autotune") or (
            event.signature.unless_survived and _survived(event, log, evidence)
        )
        (tolerated if spared else causes).append(event)
    misread = {kind for event in causes if event.signature for kind in event.signature.outranks}
    return [event for event in causes if event.kind not in misread], tolerated


def _doubtful(log: Log, evidence: Evidence, causes: Sequence[Event]) -> list[Event]:
    """Weak causes, wrappers with nothing inside, and exceptions that nobody caught."""
    weak = [event for event in causes if _level(event) == 0]
    unknown = [
        event
        for event in log.events
        if event.role is None
        and not event.handled
        and (
            event.unhandled
            or evidence.died
            or (log.fell is not None and log.fell >= event.line)
            or log.lines - event.line < _LAST
        )
    ]
    # Told by where it was raised, an exception is no longer unknown.
    placed = [event for event in unknown if event.context is not None and event.context.explains]
    found = placed or [*weak, *_of(log, "wrapper"), *unknown]
    return sorted(found, key=lambda event: event.line)


def _survived(event: Event, log: Log, evidence: Evidence) -> bool:
    return not evidence.died and log.lines - event.line > _SURVIVED and (log.fell is None or log.fell < event.line)


def _of(log: Log, role: str) -> list[Event]:
    return sorted((event for event in log.events if event.role == role), key=lambda event: event.line)


def _level(event: Event) -> int:
    return _LEVELS.index(event.signature.confidence) if event.signature else 0


def _found(event: Event, log: Log, evidence: Evidence, others: Iterable[Event], note: str | None) -> LogFinding:
    """The finding of an event."""
    if event.role is None and not (event.context and event.context.explains):
        return _unclassified(log, evidence, event, others)
    signature = event.signature or event.context
    assert signature is not None
    words = list(_words(log, evidence, event))
    level = _LEVELS.index(signature.confidence)
    if note is not None:
        words.insert(0, note)
        level = 0
    elif event.role is None:
        level = 1
    elif event.role == "cause" and _survived(event, log, evidence):
        words.append(f"the log goes on for {log.lines - event.line} lines after it")
        level = max(0, level - 1)
    elif event.context is not None and event.context.class_ == event.kind:
        level = min(2, level + 1)
    return LogFinding(
        kind=signature.class_,
        where=_where(event.line, event.rank),
        message=redact(event.message),
        severity="warning" if event.role == "warning" else "error",
        line=event.line,
        rank=event.rank,
        phase=_phase(event),
        role=_role(event),
        remedy=signature.remedy,
        fault=signature.fault,
        confidence=_LEVELS[level],
        evidence=tuple(words),
        source=signature.source,
        others=_follows(event, others, log),
    )


def _killed(log: Log, evidence: Evidence, causes: Sequence[Event]) -> LogFinding:
    """The kernel says that it killed for want of memory: what the log says are words of the dying."""
    build = evidence.stage == "build" or (evidence.stage is None and log.phase == "build")
    line = next((event for event in causes if event.kind in _OF_A_KILL), None)
    rest = [event for event in causes if event is not line and event.kind not in _OF_A_KILL]
    limit = f", its limit is {evidence.memory}" if evidence.memory else ""
    return LogFinding(
        kind="oom_host_build" if build else "oom_host",
        where=_where(line.line, line.rank) if line else "the container's state",
        message=redact(line.message) if line else f"out of memory{limit}",
        line=line.line if line else None,
        rank=line.rank if line else None,
        phase=_phase(line) if line else log.phase,
        role="cause",
        remedy="free memory or take a larger machine; fewer compilers run side by side where less is free"
        if build
        else "raise `limits.memory` in the serving, or make the server take less",
        fault="machine" if build else "image",
        confidence="medium" if rest else "high",
        evidence=_words(log, evidence, line),
        others=_follows(line, rest, log),
    )


def _unclassified(log: Log, evidence: Evidence, event: Event | None = None, others: Iterable[Event] = ()) -> LogFinding:
    """Nothing known: the likeliest line, and the end of the log."""
    guess = next((body for body in log.bodies if _ERROR.match(body)), "")
    message = redact(event.message) if event else guess or (log.bodies[-1] if log.bodies else "")
    return LogFinding(
        kind=UNCLASSIFIED,
        where=_where(event.line, event.rank) if event else "the end of the log",
        message=message,
        line=event.line if event else None,
        rank=event.rank if event else None,
        phase=_phase(event) if event else log.phase,
        role="exception",
        remedy="no signature knows this: read the last lines; `explain --bundle FILE` makes a redacted report of it",
        fault="image",
        confidence="low",
        evidence=_words(log, evidence, event),
        others=_follows(event, others, log),
        last=log.last,
    )


def _words(log: Log, evidence: Evidence, event: Event | None) -> tuple[str, ...]:
    words = []
    if event is not None and event.frames:
        words.append(f"raised in {event.frames[-1]}, called by {', '.join(reversed(event.frames[-4:-1])) or 'nobody'}")
    if event is not None and event.context is not None:
        words.append(f"its traceback goes through what {event.context.class_} is known by")
    if evidence.oom_killed:
        words.append("container state: killed for want of memory")
    if evidence.oom_kill:
        words.append(f"cgroup memory.events: oom_kill {evidence.oom_kill}")
    if evidence.out_of_memory and evidence.memory:
        words.append(f"memory limit: {evidence.memory}")
    if evidence.exit_code is not None:
        signal = f" (signal {evidence.exit_code - 128})" if 128 < evidence.exit_code < 160 else ""
        words.append(f"exit status {evidence.exit_code}{signal}")
    if log.fell is not None and (event is None or log.fell > event.line):
        words.append(f"line {log.fell} says that a process died")
    return tuple(words)


def _follows(event: Event | None, others: Iterable[Event], log: Log) -> tuple[Follows, ...]:
    """What else ends something: causes first, consequences after, each kind once for each rank."""
    seen: dict[tuple[str, str | None], Event] = {}
    for other in [*others, *_of(log, "wrapper"), *_of(log, "banner"), *_of(log, "consequence")]:
        if other is not event and (event is None or (other.kind, other.rank) != (event.kind, event.rank)):
            seen.setdefault((other.kind, other.rank), other)
    ordered = sorted(seen.values(), key=lambda other: other.line)[:_OTHERS]
    return tuple(
        Follows(kind=one.kind, line=one.line, rank=one.rank, message=redact(one.message)[:240]) for one in ordered
    )


def _where(line: int, rank: str | None) -> str:
    return f"line {line}" + (f", {rank}" if rank else "")


def _role(event: Event) -> Literal["cause", "wrapper", "banner", "consequence", "context", "warning", "exception"]:
    if event.role is None or event.role in ("marker", "harmless"):
        return "exception"
    return event.role


def _phase(event: Event) -> str | None:
    return None if event.phase == "unknown" else event.phase
