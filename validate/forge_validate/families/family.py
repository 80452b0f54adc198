"""What a family of checks is: for what needs several requests at one time, or steps that depend on what came before.

A case of a suite is one request. A family asks in waves: the requests of a wave are sent at the same moment, and what
came back decides what is asked next. Its judgement rests on the recorded exchanges alone, as that of a case does.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from forge_core.model import Frozen
from forge_validate.checks.result import CheckResult, Outcome, shown
from forge_validate.exchange import Exchange, Request

if TYPE_CHECKING:
    from forge_validate.judge import Bench

MEMORY = "container:memory"
"""Path of a request that no server sees: the runner answers `{"bytes": N}`, the server's memory as its host counts it."""

GPU_MEMORY = "host:gpu-memory"
"""The same for the memory of the GPUs that were given to the server, as their driver tells it."""


@dataclass(frozen=True)
class Ask:
    """One request of a wave; times in seconds."""

    name: str
    """Path-like and of one run only once, for example `batch/8/3`; begins with the family's name."""
    request: Request
    timeout: float
    """For the whole exchange, from its sending."""
    stall: float | None = None
    """Longest silence after the first byte of the answer; none: the time-out alone."""
    abort_after: float | None = None
    """The client hangs up so long after sending; none: it reads to the end."""
    abort_at: int | None = None
    """The client hangs up when so many events of the stream have come."""
    follows: str | None = None
    """Sent when this other ask of the same wave has said its first word or ended; none: at once."""


@dataclass(frozen=True)
class Wave:
    """Requests that are sent at the same moment; it ends when all have ended."""

    asks: tuple[Ask, ...]
    pause: float = 0.0
    """Seconds of silence before it."""


Waves = Generator[Wave, tuple[Exchange, ...], None]
"""Yields what to ask next and is sent what came back, in the order of the asks."""


class Family(Protocol):
    """One family; a stateless object."""

    @property
    def name(self) -> str:
        """First part of its checks and of its exchanges, and its key in a suite."""

    @property
    def settings(self) -> type[Frozen]:
        """The model of its section in a suite."""

    @property
    def checks(self) -> str:
        """Its checks in a few words, for people who choose a suite."""

    def waves(self, settings: Any, bench: Bench) -> Waves:
        """What to ask, wave after wave."""

    def judge(self, settings: Any, bench: Bench, exchanges: Mapping[str, Exchange]) -> tuple[CheckResult, ...]:
        """Every check of the family, from all exchanges so far by name; one that was not exercised is unmeasured."""

    def cost(self, settings: Any) -> int:
        """Tokens at most, prompts and replies together."""


def named(exchanges: Mapping[str, Exchange], prefix: str) -> dict[str, Exchange]:
    """The exchanges below a prefix, by what follows it, in the order they were asked."""
    return {name.removeprefix(prefix): one for name, one in exchanges.items() if name.startswith(prefix)}


def result(
    check: str,
    outcome: Outcome,
    explanation: str,
    *,
    value: str | float | None = None,
    answer: str | None = None,
    reproduce: str | None = None,
) -> CheckResult:
    """A result of a family's check; the answer is shortened and made visible."""
    return CheckResult(
        check=check,
        outcome=outcome,
        value=value,
        answer=None if answer is None else shown(answer),
        explanation=explanation,
        reproduce=reproduce,
    )
