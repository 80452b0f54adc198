"""What a model said, token by token, whatever the endpoint and the way it arrived: the ground of every equality."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from forge_validate import reply
from forge_validate.exchange import Exchange


@dataclass(frozen=True)
class Said:
    """A reply and its tokens."""

    text: str
    """Reasoning and content, in this order."""
    tokens: tuple[str, ...]
    """As the logprobs name them; empty where none were sent."""
    logprobs: tuple[float | None, ...]
    """Natural logarithms, one for each token; null stands for NaN."""
    top: tuple[Mapping[str, float | None], ...]
    """The alternatives of each token, where they were asked for."""
    finish: str | None
    prompt_tokens: int | None
    completion_tokens: int | None
    cached: int | None
    """Prompt tokens taken from the prefix cache; none: not told, which SGLang and vLLM do for 0 too."""

    def tail(self, start: int) -> Said:
        """The same from a token on: what an echoed prompt is followed by."""
        return Said(
            text="".join(self.tokens[start:]),
            tokens=self.tokens[start:],
            logprobs=self.logprobs[start:],
            top=self.top[start:],
            finish=self.finish,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached=self.cached,
        )


def read(exchange: Exchange) -> Said:
    """The reply of a completion or chat exchange, token by token; raises reply.NotAReply."""
    whole = reply.read(exchange)
    tokens: list[tuple[str, float | None, Mapping[str, float | None]]] = []
    cached = None
    for piece in _pieces(exchange):
        for choice in piece.get("choices") or ():
            tokens += _tokens(choice.get("logprobs"))
        cached = _cached(piece) if _cached(piece) is not None else cached
    return Said(
        text=whole.reasoning + whole.content,
        tokens=tuple(token for token, _, _ in tokens),
        logprobs=tuple(logprob for _, logprob, _ in tokens),
        top=tuple(top for _, _, top in tokens),
        finish=whole.finish,
        prompt_tokens=whole.prompt_tokens,
        completion_tokens=whole.completion_tokens,
        cached=cached,
    )


def _pieces(exchange: Exchange) -> Iterator[dict[str, Any]]:
    if isinstance(exchange.response, dict):
        yield exchange.response
    elif exchange.text:
        yield from (piece for piece in reply.events(exchange.text) if piece is not None)


def _tokens(found: Any) -> Iterator[tuple[str, float | None, Mapping[str, float | None]]]:
    """From the chat endpoint's shape (`content`) or the completions endpoint's (`tokens`)."""
    if not isinstance(found, dict):
        return
    if isinstance(found.get("content"), list):
        for token in found["content"]:
            top = {one["token"]: one.get("logprob") for one in token.get("top_logprobs") or ()}
            yield str(token.get("token")), token.get("logprob"), top
        return
    tokens, logprobs = found.get("tokens") or (), found.get("token_logprobs") or ()
    tops = found.get("top_logprobs") or [None] * len(tokens)
    for token, logprob, top in zip(tokens, logprobs, tops, strict=False):
        yield str(token), logprob, top or {}


def _cached(piece: dict[str, Any]) -> int | None:
    usage = piece.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    found = details.get("cached_tokens") if isinstance(details, dict) else None
    if found is None and isinstance(piece.get("meta_info"), dict):
        found = piece["meta_info"].get("cached_tokens")
    return found if isinstance(found, int) else None
