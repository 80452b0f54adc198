"""Asking a server for rows, a set of prompts on one path; what a golden cannot be made of is an error here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from forge_core.errors import Inconclusive, Refused
from forge_validate import reply
from forge_validate.exchange import Exchange, Request
from forge_validate.families import forcing
from forge_validate.families.family import Ask, Wave
from forge_validate.families.golden import Settings
from forge_validate.families.runner import Sender
from forge_validate.golden.divergence import Row, Token
from forge_validate.golden.document import Prompt
from forge_validate.judge import Bench

Told = Callable[[str], None]
"""Told what is being asked, for people."""
Said = tuple[list[Token], list[Row]]
"""Tokens that were decoded, and the row of each."""

T = TypeVar("T")

# As many as any server computes at once, and far fewer than it would refuse.
_AT_ONCE = 16


class Asker:
    """Asks a set of prompts on one path; keeps the texts of all tokens it hears of."""

    def __init__(self, sender: Sender, bench: Bench, settings: Settings, alternatives: int, told: Told) -> None:
        self._sender, self._bench, self._settings, self._told = sender, bench, settings, told
        self._alternatives = alternatives
        self._texts: dict[int, str] = {}

    def prefilled(
        self, path: str, whole: Mapping[str, Sequence[int]], firsts: Mapping[str, int], *, at_once: bool = False
    ) -> dict[str, list[Row]]:
        """The rows of given tokens, by prompt."""
        requests = {
            name: forcing.prefill(self._bench, ids, firsts[name], self._alternatives) for name, ids in whole.items()
        }
        found = {}
        for name, exchange in self._send(path, requests, at_once):
            found[name] = self._read(exchange, lambda one, first=firsts[name]: forcing.prefilled(one, first))  # type: ignore[misc]
        return found

    def decoded(self, path: str, ids: Mapping[str, Sequence[int]], *, at_once: bool = False) -> dict[str, Said]:
        """Tokens and rows of what it goes on with, by prompt."""
        tokens = self._settings.continuation
        requests = {name: forcing.decode(self._bench, one, tokens, self._alternatives) for name, one in ids.items()}
        return {name: self._read(found, forcing.decoded) for name, found in self._send(path, requests, at_once)}

    def named(self, prompts: Sequence[Prompt]) -> dict[int, str]:
        """The texts of all tokens in rows and continuations; raises Inconclusive where the server does not tell them."""
        wanted = {token for one in prompts for token in one.continuation}
        wanted |= {token for one in prompts for found in one.rows for token, _ in found}
        if lacking := wanted - self._texts.keys():
            raise Inconclusive(
                f"the server does not tell the texts of {len(lacking)} tokens, {min(lacking)} is one",
                hint="a golden is recorded from SGLang or vLLM",
            )
        return {token: self._texts[token] for token in sorted(wanted)}

    def _send(self, path: str, requests: Mapping[str, Request], at_once: bool) -> Iterator[tuple[str, Exchange]]:
        asks = [
            (name, Ask(f"golden/{path}/{name}", request, self._settings.timeout)) for name, request in requests.items()
        ]
        size = _AT_ONCE if at_once else 1
        for start in range(0, len(asks), size):
            some = asks[start : start + size]
            self._told(some[0][1].name)
            yield from zip(
                (name for name, _ in some), self._sender.send(Wave(tuple(one for _, one in some))), strict=True
            )

    def _read(self, exchange: Exchange, read: Callable[[Exchange], T]) -> T:
        try:
            found = read(exchange)
        except forcing.Broken as error:
            raise Refused(f"no golden is taken from this server: {exchange.name}: {error}") from error
        except reply.NotAReply as error:
            raise Inconclusive(
                f"{exchange.name}: {error}",
                hint="a golden needs logprobs of given tokens, as SGLang and vLLM tell them",
            ) from error
        self._texts.update(forcing.texts(exchange))
        return found
