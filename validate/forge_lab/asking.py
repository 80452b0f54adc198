"""Asks a suite as a validation does, without its talk, without looking for reproducers, and on demand only to the first kill."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from forge_lab.plan import Checks
from forge_validate import reply
from forge_validate.checks import CheckResult
from forge_validate.exchange import Exchange
from forge_validate.families import runner
from forge_validate.families.runner import Sender
from forge_validate.judge import Bench
from forge_validate.offers import UNSEEN, Offers
from forge_validate.offers.ask import ask as ask_offers
from forge_validate.offers.see import see
from forge_validate.probe import probe
from forge_validate.server import Server
from forge_validate.verdict import lacking

GENERATES = ("/v1/completions", "/v1/chat/completions", "/generate")


@dataclass
class Asked:
    """What came of it; seconds."""

    results: list[CheckResult] = field(default_factory=list)
    exchanges: dict[str, Exchange] = field(default_factory=dict)
    offers: Offers = UNSEEN
    took: dict[str, float] = field(default_factory=dict)
    """By family; `cases` for the offers and the cases."""

    @property
    def generating(self) -> int:
        """Requests in which the model was to speak."""
        return sum(1 for one in self.exchanges.values() if one.request.path in GENERATES)

    def tokens(self) -> tuple[int, int]:
        """Tokens of the prompts and of the replies, as `usage` tells them; a cancelled request tells none."""
        told = [_usage(one) for one in self.exchanges.values()]
        return (
            sum(usage.get("prompt_tokens") or 0 for usage in told),
            sum(usage.get("completion_tokens") or 0 for usage in told),
        )


class _Late(Exception):
    """The time of a trial is over."""


def ask(
    server: Server,
    bench: Bench,
    folder: Path,
    checks: Checks,
    *,
    backwards: bool = False,
    limit: float = float("inf"),
) -> Asked:
    """Ask the suite of `bench`; writes the exchanges to `folder`.

    With `checks` "first" it ends with the case or the family in which a required check did not pass. `backwards`: the
    families in reverse order. After `limit` seconds nothing more is asked, and what was not is unmeasured: a server that
    hangs would cost the deadline of every question.
    """
    ends = time.monotonic() + limit

    def look(*_: object) -> None:
        if time.monotonic() > ends:
            raise _Late

    asked, began = Asked(), time.monotonic()
    told = ask_offers(server, folder)
    asked.exchanges.update(told)
    server = replace(server, offers=server.offers.joined(see(told)))
    bench = replace(bench, offers=server.offers)
    asked.offers = server.offers
    recorded: dict[str, Exchange] = {}
    for case, exchange in probe(server, bench.suite, bench.answers, folder):
        recorded[case.name] = asked.exchanges[case.name] = exchange
        asked.results += bench.judge_case(case, recorded)
        if _over(asked.results, bench, checks) or time.monotonic() > ends:
            break
    asked.results += [
        result
        for case in bench.suite.cases
        if case.name not in recorded and checks == "all"
        for result in bench.judge_case(case, recorded)
    ]
    asked.took["cases"] = round(time.monotonic() - began, 3)
    if _over(asked.results, bench, checks):
        return asked
    families = bench.families[::-1] if backwards else bench.families
    with Sender(server, folder) as sender:
        for family, settings in families:
            began = time.monotonic()
            with suppress(_Late):
                look()
                runner.run(sender, bench, family, settings, recorded, look)
            asked.results += family.judge(settings, bench, recorded)
            asked.took[family.name] = round(time.monotonic() - began, 3)
            asked.exchanges.update(recorded)
            if _over(asked.results, bench, checks):
                break
    return asked


def _over(results: Sequence[CheckResult], bench: Bench, checks: Checks) -> bool:
    return checks == "first" and bool(lacking(results, bench.policy))


def _usage(one: Exchange) -> dict[str, Any]:
    if isinstance(one.response, dict) and isinstance(one.response.get("usage"), dict):
        return dict(one.response["usage"])
    found: dict[str, Any] = {}
    if one.text and "data:" in one.text:
        try:
            for piece in reply.events(one.text):
                if piece is not None and isinstance(piece.get("usage"), dict):
                    found = dict(piece["usage"])
        except reply.NotAReply:
            return found
    return found
