"""Bounds on rates: exact, from counts alone."""

from __future__ import annotations

import math
from collections.abc import Iterable

_STEPS = 100


def upper(events: int, trials: int, confidence: float = 0.95) -> float:
    """One-sided upper bound of a rate (Clopper and Pearson): with it, so few events have probability 1 - `confidence`.

    Without any event in n trials it is 1 - (1 - confidence)^(1/n), about 3/n at 95 %. Raises ValueError for no trial.
    """
    if not 0 <= events <= trials or trials < 1:
        raise ValueError(f"{events} events in {trials} trials")
    if events == trials:
        return 1.0
    low, high = events / trials, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(events, trials, middle) > 1 - confidence else (low, middle)
    return high


def interval(events: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Two-sided bounds of a rate (Clopper and Pearson)."""
    each = 1 - (1 - confidence) / 2
    return 1 - upper(trials - events, trials, each), upper(events, trials, each)


def caught(requests: int, one_in: float) -> float:
    """The chance that at least one of so many requests is a corrupted one, if one in `one_in` is, each by itself."""
    return -math.expm1(requests * math.log1p(-1 / one_in)) if one_in > 1 else float(requests > 0)


def mean(values: Iterable[float]) -> float:
    """Their mean; 0 without any."""
    found = list(values)
    return sum(found) / len(found) if found else 0.0


def _at_most(events: int, trials: int, rate: float) -> float:
    """The probability of at most so many events."""
    if rate in (0.0, 1.0):
        return 1.0 if rate == 0.0 or events >= trials else 0.0
    logs = (
        math.lgamma(trials + 1)
        - math.lgamma(k + 1)
        - math.lgamma(trials - k + 1)
        + k * math.log(rate)
        + (trials - k) * math.log1p(-rate)
        for k in range(events + 1)
    )
    return min(1.0, math.fsum(map(math.exp, logs)))
