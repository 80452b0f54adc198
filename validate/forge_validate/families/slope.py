"""A straight line through equally spaced measurements, and how sure its slope is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

# Student's t, 97.5 %, for 1, 2, 3 ... degrees of freedom; beyond, the normal distribution's 1.96 is close.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True)
class Slope:
    """Growth per step, with its 95 % confidence interval."""

    value: float
    low: float
    high: float


def slope(values: Sequence[float]) -> Slope:
    """Least squares over the steps 0, 1, 2 ...; raises ValueError for fewer than three values."""
    count = len(values)
    if count < 3:
        raise ValueError("a slope needs three values")
    middle, mean = (count - 1) / 2, fmean(values)
    spread = sum((step - middle) ** 2 for step in range(count))
    value = sum((step - middle) * (one - mean) for step, one in enumerate(values)) / spread
    rest = sum((one - mean - value * (step - middle)) ** 2 for step, one in enumerate(values))
    degrees = count - 2
    half = (_T[degrees - 1] if degrees <= len(_T) else 1.96) * math.sqrt(rest / degrees / spread)
    return Slope(value, value - half, value + half)
