"""Logprobs and tokens of a reply, out of the shapes in which servers tell them.

Chat: `logprobs.content[]` with `token`, `logprob`, `top_logprobs`. Completions: `token_logprobs`, `tokens`, `top_logprobs`.
SGLang's own `/generate`: `meta_info.output_token_logprobs[]` as `[logprob, id, text]`. Ids: `token_ids` in vLLM,
`output_ids` in SGLang. A NaN arrives as null, as a bare `NaN` (no JSON, which Python reads all the same) or as a text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_WORDS = {"nan", "inf", "+inf", "-inf", "infinity", "+infinity", "-infinity"}


@dataclass(frozen=True)
class Logprobs:
    """What was told, token by token."""

    chosen: tuple[float | None, ...]
    """Of the tokens that were said; none for null and for what is no number."""
    alternatives: tuple[float | None, ...] = ()
    """Of all alternatives of all tokens."""
    tokens: tuple[str, ...] = ()
    """Texts of the tokens, where they are told."""

    def __add__(self, other: Logprobs) -> Logprobs:
        return Logprobs(self.chosen + other.chosen, self.alternatives + other.alternatives, self.tokens + other.tokens)


def read(found: Any, *, echo: bool = False) -> Logprobs | None:
    """From a choice's `logprobs`; none if there are none.

    `echo`: the prompt's tokens are told too. The first has none before it and so no logprob: its null is left out.
    """
    if not isinstance(found, dict):
        return None
    if isinstance(found.get("token_logprobs"), list):
        chosen = [number(value) for value in found["token_logprobs"]]
        if echo and chosen and chosen[0] is None:
            del chosen[0]
        others = [number(value) for token in _list(found.get("top_logprobs")) for value in _object(token).values()]
        return Logprobs(tuple(chosen), tuple(others), _texts(_list(found.get("tokens"))))
    if isinstance(found.get("content"), list):
        tokens = [_object(token) for token in found["content"]]
        others = [number(_object(one).get("logprob")) for token in tokens for one in _list(token.get("top_logprobs"))]
        return Logprobs(
            tuple(number(token.get("logprob")) for token in tokens),
            tuple(others),
            _texts([token.get("token") for token in tokens]),
        )
    return None


def native(meta: dict[str, Any]) -> Logprobs | None:
    """From the `meta_info` of SGLang's `/generate`; none if there are none."""
    chosen = meta.get("output_token_logprobs")
    if not isinstance(chosen, list):
        return None
    others = [number(_first(one)) for token in _list(meta.get("output_top_logprobs")) for one in _list(token)]
    texts = [one[2] if isinstance(one, list) and len(one) > 2 else None for one in chosen]
    return Logprobs(tuple(number(_first(one)) for one in chosen), tuple(others), _texts(texts))


def ids(found: Any) -> tuple[int, ...]:
    """Token ids, from a list of nothing else; otherwise empty."""
    return tuple(found) if isinstance(found, list) and all(type(one) is int for one in found) else ()


def number(value: Any) -> float | None:
    """A logprob as a number, not always a finite one; none for null and whatever else is no number."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str) and value.strip().lower() in _WORDS:
        return float(value)
    return None


def _texts(found: list[Any]) -> tuple[str, ...]:
    # vLLM can be told to write ids as `token_id:5`; they repeat and differ as texts do.
    return tuple(found) if all(isinstance(one, str) for one in found) else ()


def _first(found: Any) -> Any:
    return found[0] if isinstance(found, list) and found else None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
