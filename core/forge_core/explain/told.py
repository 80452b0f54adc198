"""What was seen of a log, and how an event in it is told."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from forge_core.explain.event import Event
from forge_core.explain.model import Confidence, Evidence, Follows, Said
from forge_core.explain.signatures import UNKNOWN
from forge_core.redact import redact

_OTHERS = 8
LEVELS: tuple[Confidence, ...] = ("low", "medium", "high")
"""By what `level_of` gives."""


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
    fell: int | None = None
    """Number of the last line that says that a process died."""
    ready: int = 0
    """Number of the last line that says that the server is ready; 0: none."""

    def of(self, role: Said) -> list[Event]:
        """The events of a role, by line."""
        return sorted((event for event in self.events if event.role == role), key=lambda event: event.line)


def level_of(event: Event) -> int:
    """How certain a line of its kind is by itself, 0 to 2."""
    return LEVELS.index(event.signature.confidence) if event.signature else 0


def words(log: Log, evidence: Evidence, event: Event | None) -> tuple[str, ...]:
    """What speaks for a finding, in words."""
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


def follows(event: Event | None, others: Iterable[Event], log: Log) -> tuple[Follows, ...]:
    """What else ends something: causes first, consequences after, each kind once for each rank."""
    seen: dict[tuple[str, str | None], Event] = {}
    for other in [*others, *log.of("wrapper"), *log.of("banner"), *log.of("consequence")]:
        if other is not event and (event is None or (other.kind, other.rank) != (event.kind, event.rank)):
            seen.setdefault((other.kind, other.rank), other)
    ordered = sorted(seen.values(), key=lambda other: other.line)[:_OTHERS]
    return tuple(
        Follows(kind=one.kind, line=one.line, rank=one.rank, message=redact(one.message)[:240]) for one in ordered
    )


def where(line: int, rank: str | None) -> str:
    """A place in a log, for people."""
    return f"line {line}" + (f", {rank}" if rank else "")


def role_of(event: Event) -> Said:
    """What an event is in the log."""
    if event.role is None or event.role == "marker" or event.role == "harmless":
        return "exception"
    return event.role


def phase_of(event: Event) -> str | None:
    """The phase it came in; none before any marker."""
    return None if event.phase == UNKNOWN else event.phase
