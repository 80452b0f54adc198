"""The held-out probe: how far the numbers of a broken server lie from those of the healthy one, on texts no suite asks.

Each text is prefilled (the likeliest token at every place, the same text before it), gone on with alone from an empty cache, and
gone on with together with the others from a warm one. An answer is compared up to its first other token, since what
follows has another text before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from forge_core.model import Frozen
from forge_lab.journal import Count, Measured
from forge_lab.mutants import Hardness, Mutant, load
from forge_validate import reply
from forge_validate.exchange import Exchange
from forge_validate.families import Ask, Wave, prompts, said
from forge_validate.families.runner import Sender
from forge_validate.families.said import Said
from forge_validate.judge import Bench

Readings = Mapping[str, Said | None]
"""What was said, by the place of the ask; none: no answer."""


class HeldOut(Frozen):
    """held_out.yaml."""

    schema_version: Literal[1] = Field(alias="schema")
    tokens: Annotated[int, Field(gt=0)]
    """Of each answer."""
    timeout: Annotated[float, Field(gt=0)]
    """Seconds for one answer."""
    texts: Annotated[tuple[str, ...], Field(min_length=2)]


def ask(sender: Sender, bench: Bench) -> dict[str, Said | None]:
    """Ask all of it. Requests are the same each time but for a salt, so that nothing is cached that should be cold."""
    settings = load("held_out", HeldOut)
    salt, found = prompts.nonce(), {}
    waves = [
        *((f"prefill/{i}", prompts.complete(bench, text, 1, stream=False, echo=True)) for i, text in _texts(settings)),
        *((f"alone/{i}", prompts.complete(bench, text, settings.tokens, salt=salt)) for i, text in _texts(settings)),
    ]
    for place, request in waves:
        found[place] = _one(sender, Wave((Ask(f"held-out/{place}", request, settings.timeout),)))
    together = tuple(
        Ask(f"held-out/together/{i}", prompts.complete(bench, text, settings.tokens, salt=salt), settings.timeout)
        for i, text in _texts(settings)
    )
    for one in sender.send(Wave(together)):
        found[one.name.removeprefix("held-out/")] = _read(one)
    return found


def compare(healthy: Readings, other: Readings) -> Measured:
    """Hold readings against those of the healthy server."""
    counts: dict[str, Count] = {}
    nonfinite = unanswered = 0
    for place, reference in healthy.items():
        mine, way = other.get(place), place.partition("/")[0]
        if reference is None:
            continue
        if mine is None or not mine.tokens:
            unanswered += 1
            continue
        # The first token of a prompt has no logprob on any server.
        values = mine.logprobs[1:] if way == "prefill" else mine.logprobs
        nonfinite += sum(1 for value in values if value is None or not math.isfinite(value))
        found = _prefilled(reference, mine) if way == "prefill" else _decoded(reference, mine)
        before = counts.get(way, Count(compared=0, differing=0))
        counts[way] = Count(compared=before.compared + found.compared, differing=before.differing + found.differing)
    return Measured(counts=counts, nonfinite=nonfinite, unanswered=unanswered)


def hard(mutant: Mutant, measured: Measured | None, rule: Hardness) -> bool:
    """Whether a mutant must not escape; without a measurement only a broken promise tells."""
    if mutant.promise is not None:
        return True
    if measured is None:
        return False
    # Every request is answered: that is a promise of the protocol too.
    return bool(measured.nonfinite or measured.unanswered or measured.share >= rule.share.value)


def _texts(settings: HeldOut) -> list[tuple[int, str]]:
    return list(enumerate(settings.texts))


def _one(sender: Sender, wave: Wave) -> Said | None:
    (found,) = sender.send(wave)
    return _read(found)


def _read(one: Exchange) -> Said | None:
    try:
        return None if one.error is not None else said.read(one)
    except reply.NotAReply:
        return None


def _prefilled(reference: Said, mine: Said) -> Count:
    """At every place of a prompt but the first: what stands before it is the same."""
    pairs = [(_likeliest(one), _likeliest(other)) for one, other in zip(reference.top[1:], mine.top[1:], strict=False)]
    return Count(compared=len(pairs), differing=sum(one != other for one, other in pairs))


def _decoded(reference: Said, mine: Said) -> Count:
    """Up to the first other token, or the end of the shorter answer, where the longer one goes on."""
    for place, (one, other) in enumerate(zip(reference.tokens, mine.tokens, strict=False)):
        if one != other:
            return Count(compared=place + 1, differing=1)
    ends = len(mine.tokens) < len(reference.tokens)
    return Count(compared=len(mine.tokens) + ends, differing=int(ends))


def _likeliest(top: Mapping[str, float | None]) -> str | None:
    finite = {token: value for token, value in top.items() if value is not None and math.isfinite(value)}
    return max(finite, key=lambda token: finite[token]) if finite else None
