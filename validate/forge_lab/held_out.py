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
from forge_lab.journal import Measured
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
    compared = differing = nonfinite = unanswered = 0
    for place, reference in healthy.items():
        mine = other.get(place)
        if reference is None:
            continue
        if mine is None or not mine.tokens:
            unanswered += 1
            continue
        # The first token of a prompt has no logprob on any server.
        skip = 1 if place.startswith("prefill/") else 0
        nonfinite += sum(1 for value in mine.logprobs[skip:] if value is None or not math.isfinite(value))
        tokens, others = (_prefilled, _prefilled) if skip else (_decoded, _decoded)
        theirs, ours = tokens(reference), others(mine)
        for first, second in zip(theirs, ours, strict=False):
            compared += 1
            if first != second:
                differing += 1
                if not skip:
                    break
        else:
            if len(ours) < len(theirs):
                compared, differing = compared + 1, differing + 1
    return Measured(compared=compared, differing=differing, nonfinite=nonfinite, unanswered=unanswered)


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


def _prefilled(one: Said) -> list[str | None]:
    """The likeliest token at each place of a prompt but the first, as the server had it."""
    return [_likeliest(top) for top in one.top[1:]]


def _decoded(one: Said) -> list[str | None]:
    return list(one.tokens)


def _likeliest(top: Mapping[str, float | None]) -> str | None:
    finite = {token: value for token, value in top.items() if value is not None and math.isfinite(value)}
    return max(finite, key=lambda token: finite[token]) if finite else None
