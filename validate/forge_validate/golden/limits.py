"""What a golden file allows: the noise of its trusted run, times a suite's margin, and what its own numbers cannot resolve.

Two runs whose logits are rounded to a grid of width d differ by up to d in each logit, and by d/sqrt(6) in the root mean
square. A change of logits within a range r raises the divergence by at most r*r/8 (Hoeffding's lemma), here d*d/2, and by half of
its variance on average, here d*d/12: these are added. d is read from the golden's rows (`divergence.step`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from forge_validate.golden.divergence import Amount
from forge_validate.golden.document import Golden


@dataclass(frozen=True)
class Limits:
    """The largest amounts that are noise, for one bucket; divergences in nats."""

    mean: float
    p99: float
    largest: float
    disagreeing: float
    """Share of positions whose likeliest token may differ; one position is always allowed: a share cannot be finer."""

    def excess(self, found: Amount) -> str | None:
        """Which divergence is too large, for people; none if none is."""
        pairs = {
            "mean": (found.mean, self.mean),
            "p99": (found.p99, self.p99),
            "largest": (found.largest, self.largest),
        }
        wrong = [f"{name} {value:.2g}, at most {limit:.2g}" for name, (value, limit) in pairs.items() if value > limit]
        return "; ".join(wrong) or None

    def disagreements(self, positions: int) -> int:
        """How many of so many positions may have another likeliest token."""
        return math.floor(self.disagreeing * positions) + 1


def limits(golden: Golden, bucket: int, margin: float) -> Limits | None:
    """The limits of a bucket: the worst of all paths counts. None: the golden has no such bucket."""
    found = [one for one in golden.noise if one.bucket == bucket]
    if not found:
        return None
    square = golden.step**2
    return Limits(
        mean=margin * max(one.mean for one in found) + square / 12,
        p99=margin * max(one.p99 for one in found) + square / 2,
        largest=margin * max(one.largest for one in found) + square / 2,
        disagreeing=min(1.0, margin * max(1.0 - one.top1 for one in found)),
    )
