"""The smallest reproducer: a failing check is asked again smaller, in one respect after the other, while it still fails."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from forge_validate.checks.result import CheckResult
from forge_validate.exchange import Exchange
from forge_validate.families.family import Wave

if TYPE_CHECKING:
    from forge_validate.judge import Bench


@dataclass(frozen=True)
class Size:
    """How large a failing question is; what a family has no use for stays 1."""

    batch: int = 1
    """Requests at one moment."""
    length: int = 1
    """Of the prompt, in the family's own unit."""
    tokens: int = 1
    """Of the answer."""


Tried = Generator[Wave, tuple[Exchange, ...], bool]
"""Asks one size; returns whether the fault shows there."""


@runtime_checkable
class Shrinks(Protocol):
    """A family whose failures can be asked again in another size."""

    @property
    def tries(self) -> int:
        """Sizes that may be tried; 0: the reproducer is of the size that failed."""

    def start(self, settings: Any, failed: CheckResult, exchanges: Mapping[str, Exchange]) -> Size | None:
        """The size at which the check failed; none: this one cannot be made smaller."""

    def again(
        self,
        settings: Any,
        bench: Bench,
        failed: CheckResult,
        size: Size,
        exchanges: Mapping[str, Exchange],
        place: str,
    ) -> Tried:
        """Ask it in another size; the names of the asks begin with `place`."""

    def line(
        self, settings: Any, bench: Bench, failed: CheckResult, size: Size, exchanges: Mapping[str, Exchange]
    ) -> str:
        """One line of shell that shows the fault in this size."""


def shrink(start: Size, budget: int) -> Generator[Size, bool, Size]:
    """Yields sizes to try and is sent whether they fail; returns the smallest that did.

    Each respect is halved while the fault stays, then brought down by halving the step between the last size that was
    well and the smallest that was not. At most `budget` sizes are tried.
    """
    best = start
    for respect in ("batch", "length", "tokens"):
        well = 0
        while (now := getattr(best, respect)) - well > 1 and budget > 0:
            # The first step is a half of all; later ones lie in the middle between well and not.
            smaller = replace(best, **{respect: (now + well) // 2})
            budget -= 1
            if (yield smaller):
                best = smaller
            else:
                well = getattr(smaller, respect)
    return best
