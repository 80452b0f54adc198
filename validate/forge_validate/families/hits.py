"""How much of a prompt came from the prefix cache, as `usage` or the counters of /metrics tell it."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING

from forge_validate import reply
from forge_validate.exchange import Exchange, Request
from forge_validate.families import about, said
from forge_validate.families.family import Ask, Wave

if TYPE_CHECKING:
    from forge_validate.judge import Bench


def measured(
    name: str, request: Request, bench: Bench, timeout: float
) -> Generator[Wave, tuple[Exchange, ...], Exchange]:
    """One request alone, between two looks at the counters where there are some (`NAME/before`, `NAME/after`)."""
    counted = "metrics" in bench.offers
    if counted:
        yield Wave((about.metrics(f"{name}/before"),))
    (found,) = yield Wave((Ask(name, request, timeout),))
    if counted:
        yield Wave((about.metrics(f"{name}/after"),))
    return found


def hit(exchanges: Mapping[str, Exchange], name: str) -> int | None:
    """Prompt tokens from the cache: as `usage` tells, else as the counters grew; none: nobody tells."""
    one = exchanges.get(name)
    try:
        told = said.read(one).cached if one is not None else None
    except reply.NotAReply:
        return None
    if told is not None:
        return told
    before = about.gauge(exchanges.get(f"{name}/before"), about.CACHED)
    after = about.gauge(exchanges.get(f"{name}/after"), about.CACHED)
    return None if after is None else int(after - (before or 0.0))


def prompt_tokens(one: Exchange | None) -> int:
    """Tokens of the prompt; 0: not told."""
    try:
        return said.read(one).prompt_tokens or 0 if one is not None else 0
    except reply.NotAReply:
        return 0


def salted(request: Request, salt: str) -> Request:
    """The same request, in a part of the prefix cache of its own."""
    return request.model_copy(update={"body": request.body | {"cache_salt": salt}})
