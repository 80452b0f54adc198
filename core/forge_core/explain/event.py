"""What a reader keeps of the lines it looked at."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from forge_core.explain.signatures import Role, Signature

WIDTH = 600
"""Characters kept of a line."""


@dataclass(frozen=True)
class Event:
    """A line that may be, or may follow, a cause."""

    role: Role | None
    """None: an exception that no signature knows."""
    kind: str
    signature: Signature | None
    line: int
    rank: str | None
    phase: str
    message: str
    """Not yet redacted."""
    frames: tuple[str, ...] = ()
    context: Signature | None = None
    """Of the traceback it ends."""
    unhandled: bool = False
    handled: bool = False
    """Another exception took its place."""


@dataclass
class Trace:
    """A traceback that is open."""

    indent: int
    unhandled: bool
    frames: deque[str] = field(default_factory=lambda: deque(maxlen=60))
    context: Signature | None = None
    last: int = 0
    """Number of the last line of it."""


@dataclass(frozen=True)
class Progress:
    """The last marker of a rank."""

    phase: str
    stamp: str | None
    line: int


def shown(text: str) -> str:
    """A line on one line, cut."""
    text = " ".join(text[: 2 * WIDTH].split())
    return text if len(text) <= WIDTH else text[:WIDTH] + "…"
