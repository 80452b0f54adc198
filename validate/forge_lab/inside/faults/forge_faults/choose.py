"""Which requests of a batch a fault is for: conditions that all its parameters share.

`from_batch` (so many at one time), `phase` (`decode` or `prefill`), `after_prefill` (decoding right after another's
prefill), `after_abort` (once a client has hung up), `after_requests`, `every`, `one_in` (of the requests, in the order they
were seen since the fault was switched on), `from_length`, `prefix` (cached tokens, exactly), `prefixed` (any cached).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .switch import Mode


@dataclass(frozen=True)
class Batch:
    """What is computed in one step."""

    ids: Sequence[str]
    """Of its requests."""
    decode: bool
    lengths: Sequence[int]
    """Tokens of each request so far, what is computed now included."""
    prefixes: Sequence[int]
    """Of these, tokens whose KV was there before; when decoding all but one."""
    follows_prefill: bool = False
    """The step before was a prefill of others."""

    @property
    def size(self) -> int:
        """Requests."""
        return len(self.ids)

    @property
    def new(self) -> list[int]:
        """Tokens of each request that are computed in this step."""
        return [length - prefix for length, prefix in zip(self.lengths, self.prefixes)]


def ordinals(mode: Mode, batch: Batch) -> list[int]:
    """The number of each request among those seen since the fault was switched on."""
    seen: dict[str, int] = mode.state.setdefault("seen", {})
    return [seen.setdefault(name, len(seen)) for name in batch.ids]


def chosen(mode: Mode, batch: Batch) -> list[bool]:
    """Which of the requests meet all conditions."""
    p = mode.parameters
    numbers = ordinals(mode, batch)
    none = [False] * batch.size
    if batch.size < p.get("from_batch", 1):
        return none
    if "phase" in p and (p["phase"] == "decode") != batch.decode:
        return none
    if p.get("after_prefill") and not (batch.decode and batch.follows_prefill):
        return none
    if p.get("after_abort") and not mode.state.get("aborted"):
        return none
    found = []
    for place, number in enumerate(numbers):
        prefix = batch.prefixes[place] if not batch.decode else 0
        found.append(
            number >= p.get("after_requests", 0)
            and ("every" not in p or number % p["every"] == p["every"] - 1)
            and ("one_in" not in p or mode.lucky(number, p["one_in"]))
            and batch.lengths[place] >= p.get("from_length", 0)
            and ("prefix" not in p or prefix == p["prefix"])
            and (not p.get("prefixed") or prefix > 0)
        )
    return found
