"""How far two answers to one context lie apart: divergence from the likeliest tokens of both. Pure arithmetic.

A row is what a server tells of one position: its k likeliest next tokens with their logprobs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Token = int | str
"""A token's id where it is told, else its text."""
Row = Mapping[Token, float]
"""Token -> natural logarithm of its probability; finite, at least one entry."""

DECIMALS = 5
"""Of the logprobs in a golden file."""
RESOLUTION = 10.0**-DECIMALS
"""What a golden file cannot tell from nothing, as a difference of logprobs and as a probability."""
# A grid that is hardly wider than the rounding fits any numbers.
_CLEAR = 8


@dataclass(frozen=True)
class Amount:
    """Divergences over many positions, in nats."""

    positions: int
    mean: float
    p99: float
    """Nearest rank: with 100 positions or fewer it is the largest."""
    largest: float
    top1: float
    """Share of positions at which both have the same likeliest token, or one that the reference cannot tell from it."""


def kl(reference: Row, other: Row) -> float:
    """Kullback-Leibler divergence KL(reference || other) of what the two rows tell, in nats, never negative.

    Both rows are cut to the length of the shorter one. The outcomes are all tokens that either row names, and one more for all
    the rest: sum of p * log(p / q), where the rest of p is 1 minus the sum of its named tokens. A token that one row does not
    name has at most the probability of the last one named there, and at most the rest: it is given that bound (the rest is
    shared out evenly where several need it), so both sides stay distributions, and equal rows give 0 exactly.

    Bias: mostly too small. What differs inside the rest is not seen, since joining outcomes never raises a divergence, and an
    absent token gets the most it can have, which is nearest to the other side. It is too small by more where the rest is
    large. Threshold and measurement are biased alike, so they can be compared; neither is the divergence over the vocabulary.
    """
    p, q = _completed(reference, other)
    return max(0.0, math.fsum(p[token] * math.log(p[token] / q[token]) for token in p))


def agree(reference: Row, other: Row, step: float) -> bool:
    """Whether the likeliest token is the same, or the reference has both within one step of its numbers."""
    chosen, mine = _first(other), _first(reference)
    return chosen == mine or (chosen in reference and reference[mine] - reference[chosen] <= step + RESOLUTION)


def amount(pairs: Iterable[tuple[Row, Row]], step: float) -> Amount | None:
    """The divergences of pairs (reference, other), summed up; none without any."""
    both = list(pairs)
    if not both:
        return None
    found = sorted(kl(reference, other) for reference, other in both)
    return Amount(
        positions=len(found),
        mean=math.fsum(found) / len(found),
        p99=found[math.ceil(0.99 * len(found)) - 1],
        largest=found[-1],
        top1=sum(agree(reference, other, step) for reference, other in both) / len(both),
    )


def step(rows: Iterable[Row]) -> float:
    """The grid on which a server's logits lie, read from the logprobs themselves; at least `RESOLUTION`.

    Logprobs of one position differ as their logits do, and logits that were made in a short number format lie on a grid
    whose width is a power of two (bfloat16 between 16 and 32: 0.125). The narrowest gap is the width if it is such a power,
    and all other gaps are multiples of it.
    """
    gaps = []
    for row in rows:
        values = sorted(row.values())
        gaps += [after - before for before, after in itertools.pairwise(values)]
    slack = 2 * RESOLUTION
    real = sorted(gap for gap in gaps if gap > slack)
    if not real:
        return RESOLUTION
    width = 2.0 ** round(math.log2(real[0]))
    if width < _CLEAR * slack or any(abs(gap - round(gap / width) * width) > slack for gap in real):
        return RESOLUTION
    return width


def by_text(row: Row, texts: Mapping[int, str]) -> Row:
    """The same row by the texts of its tokens; tokens of one text are added up, pieces of a character left to the rest."""
    found: dict[Token, float] = {}
    for token, logprob in row.items():
        text = texts.get(token) if isinstance(token, int) else token
        if text is None or "\ufffd" in text:
            continue
        found[text] = float(math.log(math.exp(found[text]) + math.exp(logprob))) if text in found else logprob
    return _best(found, len(found))


def alike(reference: Row, other: Row, texts: Mapping[int, str]) -> tuple[Row, Row]:
    """Both rows by ids where the other is told by ids, else both by texts."""
    if all(isinstance(token, int) for token in other):
        return reference, other
    return by_text(reference, texts), by_text(other, texts)


def row(pairs: Sequence[tuple[Token, float]]) -> Row:
    """A row, likeliest token first; equal ones as they came."""
    return dict(sorted(pairs, key=lambda pair: -pair[1]))


def _completed(reference: Row, other: Row) -> tuple[dict[Token | None, float], dict[Token | None, float]]:
    """Two distributions over the same outcomes; none stands for the rest."""
    length = min(len(reference), len(other))
    p, q = _best(reference, length), _best(other, length)
    return _filled(p, q), _filled(q, p)


def _filled(mine: Row, theirs: Row) -> dict[Token | None, float]:
    found: dict[Token | None, float] = {token: math.exp(logprob) for token, logprob in mine.items()}
    # Rounded numbers may add up to a little more than 1.
    rest = max(1.0 - math.fsum(found.values()), RESOLUTION)
    absent = [token for token in theirs if token not in mine]
    bound = min(min(found.values(), default=1.0), rest / (len(absent) + 1))
    found.update(dict.fromkeys(absent, bound))
    found[None] = rest - bound * len(absent)
    whole = math.fsum(found.values())
    return {token: value / whole for token, value in found.items()}


def _best(row: Row, count: int) -> Row:
    return dict(sorted(row.items(), key=lambda item: -item[1])[:count])


def _first(row: Row) -> Token:
    return max(row, key=lambda token: row[token])
