"""Repetition: one unit over and over, of characters, words or tokens, whatever the script."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import eq
from typing import Any


@dataclass(frozen=True)
class Stretch:
    """A stretch in which one unit stands again and again."""

    start: int
    length: int
    """Items, the last repetition perhaps unfinished."""
    period: int
    """Items of the unit."""

    @property
    def times(self) -> int:
        """How often the unit stands there, whole."""
        return self.length // self.period

    @property
    def end(self) -> int:
        """The item after the last."""
        return self.start + self.length


def stretches(items: Sequence[Any], longest: int, times: int) -> Iterator[Stretch]:
    """Every stretch of `times` or more repetitions of a unit of up to `longest` items, shortest unit first.

    A stretch of a short unit is also one of its multiples; the caller takes the longest, and of equals the first.
    """
    for period in range(1, min(longest, len(items) // times) + 1):
        # One byte per item: whether it equals the one a period before. The loop runs in C.
        equal = bytes(map(eq, items[period:], items))
        for run in re.finditer(rb"\x01{%d,}" % ((times - 1) * period), equal):
            yield Stretch(run.start(), run.end() - run.start() + period, period)


def fewest_distinct(items: Sequence[Any], window: int) -> int | None:
    """The smallest number of different items in any full window; none: there is no full window."""
    if len(items) < window:
        return None
    counts: dict[Any, int] = {}
    fewest = window
    for here, item in enumerate(items):
        counts[item] = counts.get(item, 0) + 1
        if here >= window:
            leaving = items[here - window]
            counts[leaving] -= 1
            if not counts[leaving]:
                del counts[leaving]
        if here >= window - 1:
            fewest = min(fewest, len(counts))
    return fewest


def repeated_share(items: Sequence[Any], size: int) -> float:
    """Share of the n-grams of `size` items that stood before; 0 for fewer items than one n-gram."""
    total = len(items) - size + 1
    if total <= 0:
        return 0.0
    return 1 - len({tuple(items[here : here + size]) for here in range(total)}) / total
