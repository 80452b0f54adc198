"""How near a server's likeliest tokens are to the golden's, and what it prefills to what it decodes: rows paired, then judged."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from forge_validate import reply
from forge_validate.checks.result import CheckResult
from forge_validate.exchange import Exchange, Request
from forge_validate.families import forcing, prompts
from forge_validate.families.family import Wave, result
from forge_validate.golden.divergence import Row, alike, amount, kl
from forge_validate.golden.document import Golden, Prompt
from forge_validate.golden.limits import Limits

Forcing = Generator[Wave, tuple[Exchange, ...], bool]
"""Asks; returns whether the server tells logprobs of a prompt."""

Named = Sequence[tuple[str, Prompt]]


@dataclass
class Pairs:
    """Rows to compare, the reference first, and what came in the way."""

    rows: list[tuple[Row, Row]] = field(default_factory=list)
    forced: bool = True
    """Whether the context was given; else only the places before a divergence are there."""
    request: Request | None = None
    """Where the two lie farthest apart."""
    missing: str | None = None
    """What was not measured, the first of it."""
    wrong: str | None = None
    """What no right server answers, the first of it."""
    _farthest: float = -1.0

    def add(self, pairs: Iterable[tuple[Row, Row]], request: Request) -> None:
        """Add the pairs that one request gave."""
        for pair in pairs:
            self.rows.append(pair)
            if (distance := kl(*pair)) > self._farthest:
                self._farthest, self.request = distance, request

    def lack(self, exchange: Exchange | None, otherwise: str = "was not asked") -> bool:
        """Note an exchange that is not there, or that brought no response; returns whether it is so."""
        why = otherwise if exchange is None else exchange.error
        self.missing = self.missing or why
        return why is not None

    def blame(self, exchange: Exchange, error: Exception) -> None:
        """Note a response that holds no rows, or rows that are no numbers."""
        if self.wrong is None:
            self.wrong, self.request = str(error), exchange.request


def against(golden: Golden, chosen: Named, exchanges: Mapping[str, Exchange]) -> Pairs:
    """The golden's rows and the server's: forced, or along what it decoded where it cannot be forced."""
    found = Pairs()
    for name, prompt in chosen:
        forced = exchanges.get(f"golden/forced/{name}")
        if forced is None or forcing.not_offered(forced, prompt.first):
            found.forced = False
            _along(golden, prompt, exchanges.get(f"golden/decoded/{name}"), found)
        elif not found.lack(forced):
            try:
                rows = forcing.prefilled(forced, prompt.first)
            except (reply.NotAReply, forcing.Broken) as error:
                found.blame(forced, error)
                continue
            found.add(_paired(golden, prompt, prompt.first, rows), forced.request)
    return found


def again(chosen: Named, exchanges: Mapping[str, Exchange]) -> Pairs:
    """What the server prefilled of its own words, and what it had decoded."""
    found = Pairs()
    for name, prompt in chosen:
        decoded, twice = exchanges.get(f"golden/decoded/{name}"), exchanges.get(f"golden/again/{name}")
        if found.lack(decoded) or decoded is None:
            continue
        try:
            _, theirs = forcing.decoded(decoded)
        except (reply.NotAReply, forcing.Broken) as error:
            found.blame(decoded, error)
            continue
        why = "the server does not tell logprobs of given tokens, or not the ids of its own"
        if found.lack(twice, why) or twice is None:
            continue
        try:
            mine = forcing.prefilled(twice, prompt.prompt)
        except (reply.NotAReply, forcing.Broken) as error:
            found.blame(twice, error)
            continue
        found.add(zip(mine, theirs, strict=False), twice.request)
    return found


def divergence(check: str, pairs: Pairs, step: float, most: Limits, least: int) -> CheckResult:
    """Judge how far apart the rows are."""
    if (early := _unable(check, pairs, least)) is not None:
        return early
    found = amount(pairs.rows, step)
    assert found is not None
    told = f"{_places(pairs)}: divergence mean {found.mean:.2g}, p99 {found.p99:.2g}, largest {found.largest:.2g} nats"
    if (why := most.excess(found)) is not None:
        return result(check, "failed", f"{told}: {why}", value=found.mean, reproduce=_curl(pairs))
    allowed = f"at most {most.mean:.2g}, {most.p99:.2g}, {most.largest:.2g}"
    return result(check, "passed", f"{told} ({allowed})", value=found.mean)


def agreement(check: str, pairs: Pairs, step: float, most: Limits, least: int) -> CheckResult:
    """Judge at how many places the likeliest token is another one."""
    if (early := _unable(check, pairs, least)) is not None:
        return early
    found = amount(pairs.rows, step)
    assert found is not None
    other = round((1 - found.top1) * found.positions)
    allowed = most.disagreements(found.positions)
    told = f"{_places(pairs)}: another likeliest token at {other}, at most {allowed}"
    if other > allowed:
        return result(check, "failed", told, value=found.top1, reproduce=_curl(pairs))
    return result(check, "passed", told, value=found.top1)


def _unable(check: str, pairs: Pairs, least: int) -> CheckResult | None:
    """The result where there is nothing to judge; a response that no right server gives is a failure."""
    if pairs.wrong is not None:
        return result(check, "failed", pairs.wrong, reproduce=_curl(pairs))
    if pairs.missing is not None:
        return result(check, "unmeasured", pairs.missing)
    if len(pairs.rows) < least:
        return result(check, "unmeasured", f"{_places(pairs)}, at least {least} are wanted")
    return None


def _places(pairs: Pairs) -> str:
    if pairs.forced:
        return f"{len(pairs.rows)} places"
    return f"{len(pairs.rows)} places before its answers left the golden's (the server cannot be given tokens to judge)"


def _curl(pairs: Pairs) -> str | None:
    return None if pairs.request is None else prompts.curl(pairs.request)


def _along(golden: Golden, prompt: Prompt, decoded: Exchange | None, found: Pairs) -> None:
    """The places of an answer up to the first that is not the golden's, that one included: its context is still equal."""
    if found.lack(decoded) or decoded is None:
        return
    try:
        tokens, rows = forcing.decoded(decoded)
    except (reply.NotAReply, forcing.Broken) as error:
        found.blame(decoded, error)
        return
    by_id = all(isinstance(token, int) for token in tokens)
    wanted = [token if by_id else golden.texts[token] for token in prompt.continuation]
    differ = (at for at, (one, other) in enumerate(zip(tokens, wanted, strict=False)) if one != other)
    same = next(differ, min(len(tokens), len(wanted)) - 1)
    found.add(_paired(golden, prompt, prompt.prompt, rows[: same + 1]), decoded.request)


def _paired(golden: Golden, prompt: Prompt, start: int, rows: Sequence[Row]) -> Iterable[tuple[Row, Row]]:
    """The golden's rows from a position on, each with the server's."""
    for place, row in enumerate(rows, start):
        reference, other = alike(prompt.row(place), row, golden.texts)
        # A place whose likely tokens are all pieces of characters has nothing to compare by text.
        if reference and other:
            yield reference, other
