"""The noise of a server's numbers: the same tokens computed twice by different paths, at batch size 1.

Two pairs, since the noise is larger where a token is less sure: what was decoded (mostly sure tokens) and its prefill; and
the words of a plain text (mostly unlikely tokens) prefilled in two lengths, which are two shapes for every kernel. All start
from an empty prefix cache (a request for the logprobs of a whole prompt is computed whole in SGLang and vLLM), so a broken
cache does not pass for noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from forge_validate import reply
from forge_validate.exchange import Exchange
from forge_validate.families import prompts, said
from forge_validate.families.equality import Noise, measure
from forge_validate.families.family import Ask, Wave, Waves
from forge_validate.families.said import Said
from forge_validate.policy import Threshold

if TYPE_CHECKING:
    from forge_validate.judge import Bench

_TEXTS = (("noise-short", 60), ("noise-long", 100))


def waves(family: str, index: int, cold: Exchange, bench: Bench, timeout: float) -> Waves:
    """Prefill what was decoded in `cold`, an exchange `FAMILY/cold/INDEX`, and at index 0 the plain text.

    Nothing where the server gives no logprobs, nothing was said, or it was said in a chat, which has no echo.
    """
    prompt = cold.request.body.get("prompt")
    try:
        text = said.read(cold).text
    except reply.NotAReply:
        return
    if "logprobs" not in bench.offers or not text or not isinstance(prompt, str):
        return
    yield Wave((Ask(f"{family}/noise/{index}", prompts.echo(bench, prompt + text), timeout),))
    if index == 0:
        for name, words in _TEXTS:
            yield Wave((Ask(f"{family}/{name}", prompts.echo(bench, prompts.filler("Words:", words)), timeout),))


def cost(tokens: int, prompt: str) -> int:
    """Tokens at most of the waves of one index."""
    texts = sum(prompts.filler_tokens(words) + 1 for _, words in _TEXTS)
    return prompts.tokens_at_most(prompt) + tokens + 1 + texts


def measured(exchanges: Mapping[str, Exchange], family: str) -> Noise | None:
    """The noise that the exchanges of a family show; none when it was not or could not be asked."""
    pairs = []
    for name, one in exchanges.items():
        if not name.startswith(f"{family}/noise/"):
            continue
        cold, whole = _said(exchanges.get(name.replace("/noise/", "/cold/", 1))), _said(one)
        if cold is not None and whole is not None and cold.prompt_tokens is not None:
            pairs.append((cold, whole.tail(cold.prompt_tokens)))
    texts = [found for name, _ in _TEXTS if (found := _said(exchanges.get(f"{family}/{name}"))) is not None]
    if len(texts) == len(_TEXTS):
        pairs.append((texts[0], texts[1]))
    return measure(pairs)


def _said(one: Exchange | None) -> Said | None:
    try:
        return said.read(one) if one is not None else None
    except reply.NotAReply:
        return None


def bound(exchanges: Mapping[str, Exchange], family: str, margin: Threshold) -> float | None:
    """Largest difference between two logprobs (nats) that is taken for noise; none: no noise was measured."""
    found = measured(exchanges, family)
    return None if found is None else found.largest * margin.value
