"""Two answers to one question are the same, up to the noise of the numbers.

A model that computes in another order (another batch, a cached prefix, a prefill in place of a decode) rounds otherwise.
So logprobs may differ a little, and where two tokens are nearly equally likely the greedy choice may fall on the other;
what follows such a flip has another context and is not compared. How much is a little is measured, never typed in: the
server computes the same tokens twice by different paths at batch size 1 (decode, and prefill of what was decoded), and
the largest difference times a margin that the suite gives with its reason is the bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from forge_validate.checks.result import quoted
from forge_validate.families.said import Said


@dataclass(frozen=True)
class Noise:
    """How far equal computations of this server lie apart, in nats (differences of logprobs)."""

    largest: float
    tokens: int
    """How many were compared."""


@dataclass(frozen=True)
class Comparison:
    """What came of comparing an answer with its reference."""

    tokens: int
    """How many were compared, up to the end or to a flip between nearly equal tokens."""
    largest: float
    """Largest difference of their logprobs, in nats."""
    complaint: str | None = None
    """Why they are not the same; none if they are."""
    sure: bool = True
    """False: the complaint may be noise, or a fault of the reference; nobody can tell."""


def measure(pairs: Iterable[tuple[Said, Said]]) -> Noise | None:
    """The largest difference over pairs of computations of the same tokens; none when there was nothing to compare."""
    differences = [
        abs(one - other)
        for first, second in pairs
        for one, other in _common(first, second)
        if one is not None and other is not None and math.isfinite(one - other)
    ]
    return Noise(max(differences), len(differences)) if differences else None


def compare(reference: Said, other: Said, bound: float | None) -> Comparison:
    """Compare token by token. `bound` in nats; none: no noise was measured, so only equal texts are sure to be the same."""
    if not reference.tokens or not other.tokens:
        return _texts(reference, other)
    largest = 0.0
    for place, (token, mine) in enumerate(zip(reference.tokens, other.tokens, strict=False)):
        here, there = reference.logprobs[place], other.logprobs[place]
        if not _finite(here):
            return Comparison(place, largest, f"the reference's own token {place} has no finite logprob", sure=False)
        if not _finite(there):
            return Comparison(place, largest, f"token {place} has the logprob {there}, alone it had {here:.4f}")
        if token != mine:
            return _flip(reference, other, place, largest, bound)
        difference = abs((here or 0.0) - (there or 0.0))
        largest = max(largest, difference)
        if bound is not None and difference > bound:
            return Comparison(
                place, largest, f"the logprob of token {place} is {difference:.2g} off, the bound is {bound:.2g}"
            )
    shorter, longer = sorted((reference, other), key=lambda said: len(said.tokens))
    if len(shorter.tokens) < len(longer.tokens) and shorter.finish != "length":
        return Comparison(
            len(shorter.tokens),
            largest,
            f"one ends after {len(shorter.tokens)} tokens ({shorter.finish}), the other goes on",
        )
    return Comparison(len(shorter.tokens), largest)


def _flip(reference: Said, other: Said, place: int, largest: float, bound: float | None) -> Comparison:
    """At another token: fine where both were nearly equally likely."""
    chosen = other.tokens[place]
    told = f"token {place} is {quoted(chosen)} instead of {quoted(reference.tokens[place])}"
    alternative = reference.top[place].get(chosen) if place < len(reference.top) else None
    if bound is None:
        return Comparison(place, largest, f"{told}, and no noise was measured to hold it against", sure=False)
    mine = reference.logprobs[place]
    if alternative is None or mine is None:
        return Comparison(place, largest, f"{told}, which was not among the likely ones")
    # Each of the two may have moved by the bound.
    if (gap := abs(mine - alternative)) > 2 * bound:
        return Comparison(place, largest, f"{told}, which was {gap:.2g} nats less likely")
    return Comparison(place, largest)


def _texts(reference: Said, other: Said) -> Comparison:
    """Without logprobs: by the text alone, and a difference may be a legitimate flip."""
    if reference.text == other.text:
        return Comparison(len(other.text), 0.0)
    shorter, longer = sorted((reference, other), key=lambda said: len(said.text))
    if shorter.text and longer.text.startswith(shorter.text) and shorter.finish == "length":
        return Comparison(len(shorter.text), 0.0)
    # One that says nothing at all did not flip a coin.
    sure = not other.text.strip() and bool(reference.text.strip())
    return Comparison(0, 0.0, f"the texts differ, and there are no logprobs: {quoted(other.text, 48)}", sure=sure)


def _common(first: Said, second: Said) -> Iterable[tuple[float | None, float | None]]:
    """The logprobs of the tokens that two computations have in common from the start."""
    for place, (token, other) in enumerate(zip(first.tokens, second.tokens, strict=False)):
        if token != other:
            return
        yield first.logprobs[place], second.logprobs[place]


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
