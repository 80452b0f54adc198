"""What the classifier is told, and what it says."""

from __future__ import annotations

from typing import Literal

from forge_core.model import Finding, Frozen

Confidence = Literal["high", "medium", "low"]
Fault = Literal["usage", "machine", "image"]
Said = Literal["cause", "wrapper", "banner", "consequence", "context", "warning", "exception", "exit", "stall"]

UNCLASSIFIED = "unclassified"


class Evidence(Frozen):
    """What is known beside the log: of the container's state, its cgroup, and how long it was waited for."""

    stage: Literal["build", "boot"] | None = None
    """Whose log it is; none: its lines tell."""
    exit_code: int | None = None
    """Of the process or container, 128 + signal for a killed one; none: it runs, or nobody knows."""
    oom_killed: bool = False
    """Container state: the kernel killed one of its processes at the memory limit."""
    oom_kill: int | None = None
    """The counter of that name in the cgroup's memory.events."""
    memory: str | None = None
    """The memory limit, for people."""
    over: bool = False
    """It ended though it was to go on, whatever its exit code."""
    silent: float | None = None
    """Seconds between the log's last line and the moment it was given up."""

    @property
    def out_of_memory(self) -> bool:
        """Whether the kernel killed something for want of memory."""
        return self.oom_killed or bool(self.oom_kill)

    @property
    def died(self) -> bool:
        """Whether it is known that it ended badly."""
        return self.over or self.out_of_memory or bool(self.exit_code)


class Follows(Frozen):
    """Another line that ends something: a later one, or one at another rank."""

    kind: str
    line: int
    rank: str | None
    message: str


class LogFinding(Finding):
    """Why a build or a server died. `kind` is the class, `where` the place for people, `message` the cause line, redacted."""

    line: int | None
    """Number of the cause line, from 1; none where evidence beside the log speaks."""
    rank: str | None
    """As the log names it, for example `TP1` or `rank3`."""
    phase: str | None
    """The phase the rank was in."""
    role: Said
    """What it is in the log: a cause, or what stands where the cause should stand earlier, below or inside."""
    remedy: str
    fault: Fault
    """Whose: `usage` (flags, model folder), `machine` (driver, memory, port), `image` (what was built)."""
    confidence: Confidence
    evidence: tuple[str, ...] = ()
    """What else speaks for it, in words."""
    source: str | None = None
    """Where the signature is from."""
    others: tuple[Follows, ...] = ()
    """What follows, earliest first."""
    last: tuple[str, ...] = ()
    """The log's last lines, of an unclassified end alone."""

    @property
    def known(self) -> bool:
        """Whether a signature knows it."""
        return self.kind != UNCLASSIFIED

    @property
    def hint(self) -> str | None:
        """Class and remedy, as an error's hint; none of what nothing is known of, or but a consequence."""
        return f"{self.kind}: {self.remedy}" if self.known and self.role != "consequence" else None


class Marker(Frozen):
    """The last line of a kind that is no cause: progress, readiness, a resolved backend, harmless noise."""

    kind: str
    phase: str | None
    line: int
    rank: str | None
    message: str
    times: int


class Reading(Frozen):
    """A log that was read to its end."""

    finding: LogFinding | None
    """None: nothing in it says that anything is wrong."""
    phase: str | None
    """The last phase that was reached."""
    ranks: tuple[str, ...]
    markers: tuple[Marker, ...]
    lines: int
    size: int
    """Bytes."""
    last: tuple[str, ...] = ()
    """Its last lines, redacted."""
