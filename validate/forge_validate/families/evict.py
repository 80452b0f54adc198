"""Pushing a prompt out of the prefix cache: as many others as the KV pool holds, and none that touches it.

SGLang (0.5.23, and 6ffc74efd) takes a prompt that has no more than its first token in common with a cached one for a use of
all of that one: its node is split, and the rest of it gets the time of now. So no prompt here begins as the kept one does.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING

from forge_validate.exchange import Exchange, Request
from forge_validate.families import hits, prompts
from forge_validate.families.family import Ask, Wave, Waves, named

if TYPE_CHECKING:
    from forge_validate.families.cache import Settings
    from forge_validate.judge import Bench

KEPT = "Kept "
"""What the kept prompt begins with; the others begin with a digit or a small letter."""

_AT_ONCE = 4


def waves(settings: Settings, bench: Bench, pool: int, kept: Request) -> Waves:
    """The prompt, a pool's worth of others, the prompt; with twice as many while it is cached and the budget lasts."""
    yield from hits.measured("cache/before-eviction/0", kept, bench, settings.timeout)
    spent = number = 0
    while True:
        wanted = pool << number
        filled = yield from _fill(settings, bench, wanted, number)
        found = yield from hits.measured(f"cache/evicted/{number}", kept, bench, settings.timeout)
        spent, number = spent + filled, number + 1
        # Asking has made it the latest again, so that the next round starts from nothing.
        if filled <= wanted or not hits.hit({found.name: found}, found.name) or spent + 2 * wanted > settings.evict:
            return


def last(exchanges: Mapping[str, Exchange]) -> str:
    """The kept prompt after the last round."""
    rounds = [name for name in exchanges if name.startswith("cache/evicted/") and name.count("/") == 2]
    return max(rounds, key=lambda name: int(name.rpartition("/")[2]), default="cache/evicted/0")


def filled(exchanges: Mapping[str, Exchange]) -> int:
    """Tokens of the others that were computed, and took new room."""
    return sum(map(_new, named(exchanges, "cache/fill-").values()))


def cost(settings: Settings) -> int:
    """Tokens of the others at most: a round ends with a whole wave."""
    return settings.evict + _AT_ONCE * (prompts.filler_tokens(settings.evict_words) + 1) if settings.evict else 0


def line(exchanges: Mapping[str, Exchange]) -> str:
    """As many prompts as filled the pool, each with a beginning of its own; `$S` is new in each run."""
    fills = list(named(exchanges, "cache/fill-").values())
    one = prompts.curl(prompts.beginning(fills[0].request, "FIRST"))
    return f"for i in $(seq {len(fills)}); do {one} >/dev/null; done".replace("FIRST", "'\"$i-$S\"'")


def _fill(settings: Settings, bench: Bench, wanted: int, number: int) -> Generator[Wave, tuple[Exchange, ...], int]:
    """Prompts that no cache has seen, until they are more than the wanted tokens; returns how many."""
    total = wave = 0
    while total <= wanted:
        asks = []
        for index in range(_AT_ONCE):
            text = prompts.filler(prompts.nonce(), settings.evict_words)
            request = prompts.complete(bench, text, 1, stream=False, logprobs=False)
            asks.append(Ask(f"cache/fill-{number}/{_AT_ONCE * wave + index}", request, settings.timeout))
        found = yield Wave(tuple(asks))
        if not all(map(hits.prompt_tokens, found)):
            return total
        total, wave = total + sum(map(_new, found)), wave + 1
    return total


def _new(one: Exchange) -> int:
    return hits.prompt_tokens(one) - (hits.hit({one.name: one}, one.name) or 0)
