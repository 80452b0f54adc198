"""Which of the lines that may be a cause is the cause.

What the machine says (the kernel's killer) goes before what the log says; in the log the earliest cause, whichever rank it is of,
goes before exceptions nobody knows, those before headlines, those before consequences. What is tolerated where it
stands (an autotuner tries what cannot run) counts only when nothing else explains a death.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from forge_core.explain.event import Event
from forge_core.explain.model import UNCLASSIFIED, Evidence, LogFinding
from forge_core.explain.signatures import Book
from forge_core.explain.told import LEVELS, Log, follows, level_of, phase_of, role_of, where, words
from forge_core.redact import redact

_SURVIVED = 200
"""Lines a log must go on, with no sign of a death, for a doubtful line to have been harmless."""
_LAST = 40
"""Lines from the end in which an exception was hardly survived ..."""
_LAST_WORDS = 5
"""... and of a server that is ready, which answers a request with one now and then."""
_OF_A_KILL = ("oom_host", "oom_host_build", "killed_sigkill")
_ERROR = re.compile(
    r"(?:\S+: )?(?:fatal |internal )?error\b|E: |fatal: |(?:\w+\.)*\w+(?:Error|Exception)(?::|$)|panic: ", re.IGNORECASE
)


def conclude(log: Log, evidence: Evidence, book: Book, stalled: LogFinding | None) -> LogFinding | None:
    """The finding of a log, if there is one."""
    causes, tolerated = _causes(log, evidence)
    if evidence.out_of_memory:
        return _killed(log, evidence, causes)
    # What a server got ready after is not why it died later.
    sure = sorted((e for e in causes if level_of(e) > 0), key=lambda event: (event.line < log.ready, event.line))
    doubtful = _doubtful(log, evidence, causes)
    for group, note in (
        (sure, None),
        (doubtful, None),
        (log.of("banner"), "only a headline is in this log; the cause should stand below it"),
        (
            tolerated if evidence.died or log.fell else [],
            "tolerated where it stands, but nothing else explains the end",
        ),
        (
            [e for e in log.of("consequence") if level_of(e) > 0],
            "only consequences are in this log; the cause came earlier",
        ),
        (log.of("context") if not evidence.died else [], "a frame of a traceback whose end is not in this log"),
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
            evidence=words(log, evidence, None),
            last=log.last,
        )
    if evidence.died or (log.phase != "serving" and any(_ERROR.match(body) for body in log.bodies)):
        return _unclassified(log, evidence)
    if warnings := log.of("warning"):
        return _found(warnings[-1], log, evidence, (), None)
    return None


def _causes(log: Log, evidence: Evidence) -> tuple[list[Event], list[Event]]:
    """Causes by line, without those that another one outranks; and those that are tolerated where they stand."""
    causes: list[Event] = []
    tolerated: list[Event] = []
    for event in log.of("cause"):
        assert event.signature is not None
        spared = (event.signature.unless_tuning and event.phase == "autotune") or (
            event.signature.unless_survived and _survived(event, log, evidence)
        )
        (tolerated if spared else causes).append(event)
    misread = {kind for event in causes if event.signature for kind in event.signature.outranks}
    return [event for event in causes if event.kind not in misread], tolerated


def _doubtful(log: Log, evidence: Evidence, causes: Sequence[Event]) -> list[Event]:
    """Weak causes, wrappers with nothing inside, and exceptions that nobody caught."""
    weak = [event for event in causes if level_of(event) == 0]
    unknown = [
        event
        for event in log.events
        if event.role is None
        and not event.handled
        and (
            event.unhandled
            or evidence.died
            or (log.fell is not None and log.fell >= event.line)
            or log.lines - event.line < (_LAST_WORDS if log.phase == "serving" else _LAST)
        )
    ]
    # Told by where it was raised, an exception is no longer unknown.
    placed = [event for event in unknown if event.context is not None and event.context.explains]
    found = placed or [*weak, *log.of("wrapper"), *unknown]
    return sorted(found, key=lambda event: event.line)


def _survived(event: Event, log: Log, evidence: Evidence) -> bool:
    return not evidence.died and log.lines - event.line > _SURVIVED and (log.fell is None or log.fell < event.line)


def _found(event: Event, log: Log, evidence: Evidence, others: Iterable[Event], note: str | None) -> LogFinding:
    """The finding of an event."""
    if event.role is None and not (event.context and event.context.explains):
        return _unclassified(log, evidence, event, others)
    signature = event.signature or event.context
    assert signature is not None
    evident = list(words(log, evidence, event))
    level = LEVELS.index(signature.confidence)
    if note is not None:
        evident.insert(0, note)
        level = 0
    elif event.role is None:
        level = 1
    elif event.line < log.ready:
        evident.append(f"the server got ready after it, at line {log.ready}")
        level = max(0, level - 1)
    elif event.role == "cause" and _survived(event, log, evidence):
        evident.append(f"the log goes on for {log.lines - event.line} lines after it")
        level = max(0, level - 1)
    elif event.context is not None and event.context.class_ == event.kind:
        level = min(2, level + 1)
    return LogFinding(
        kind=signature.class_,
        where=where(event.line, event.rank),
        message=redact(event.message),
        severity="warning" if event.role == "warning" else "error",
        line=event.line,
        rank=event.rank,
        phase=phase_of(event),
        role=role_of(event),
        remedy=signature.remedy,
        fault=signature.fault,
        confidence=LEVELS[level],
        evidence=tuple(evident),
        source=signature.source,
        others=follows(event, others, log),
    )


def _killed(log: Log, evidence: Evidence, causes: Sequence[Event]) -> LogFinding:
    """The kernel says that it killed for want of memory: what the log says are words of the dying."""
    build = evidence.stage == "build" or (evidence.stage is None and log.phase == "build")
    line = next((event for event in causes if event.kind in _OF_A_KILL), None)
    rest = [event for event in causes if event is not line and event.kind not in _OF_A_KILL]
    limit = f", its limit is {evidence.memory}" if evidence.memory else ""
    return LogFinding(
        kind="oom_host_build" if build else "oom_host",
        where=where(line.line, line.rank) if line else "the container's state",
        message=redact(line.message) if line else f"out of memory{limit}",
        line=line.line if line else None,
        rank=line.rank if line else None,
        phase=phase_of(line) if line else log.phase,
        role="cause",
        remedy="free memory or take a larger machine; fewer compilers run side by side where less is free"
        if build
        else "raise `limits.memory` in the serving, or make the server take less",
        fault="machine" if build else "image",
        confidence="medium" if rest else "high",
        evidence=words(log, evidence, line),
        others=follows(line, rest, log),
    )


def _unclassified(log: Log, evidence: Evidence, event: Event | None = None, others: Iterable[Event] = ()) -> LogFinding:
    """Nothing known: the likeliest line, and the end of the log."""
    guess = next((body for body in log.bodies if _ERROR.match(body)), "")
    message = redact(event.message) if event else guess or (log.bodies[-1] if log.bodies else "")
    return LogFinding(
        kind=UNCLASSIFIED,
        where=where(event.line, event.rank) if event else "the end of the log",
        message=message,
        line=event.line if event else None,
        rank=event.rank if event else None,
        phase=phase_of(event) if event else log.phase,
        role="exception",
        remedy="no signature knows this: read the last lines; `explain --bundle FILE` makes a redacted report of it",
        fault="image",
        confidence="low",
        evidence=words(log, evidence, event),
        others=follows(event, others, log),
        last=log.last,
    )
