"""Given tokens, prefilled with the likeliest tokens at each of their places: teacher forcing, as each server offers it.

SGLang: `/generate` with `input_ids` and `logprob_start_len` (row 0 of what comes back is null: nothing is told of the token at
the start itself; measured with 0.5.23). vLLM: `/v1/completions` with `prompt_logprobs` (read in its documentation, not measured
here). Others: `echo` with `logprobs`, at most five and by text; not every server still has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from forge_validate import logprobs, reply
from forge_validate.exchange import Exchange, Request
from forge_validate.families import prompts
from forge_validate.golden.divergence import Row, Token, row
from forge_validate.offers import Offers

if TYPE_CHECKING:
    from forge_validate.judge import Bench

Way = Literal["native", "vllm", "echo"]

_GENERATE = "/generate"
# The completions endpoint of the OpenAI protocol gives no more.
_ECHO_MOST = 5
# How vLLM names a token that it is asked to name by its id.
_BY_ID = "token_id:"


class Broken(ValueError):
    """A logprob that is no number: null (NaN), infinite."""


def way(offers: Offers) -> Way:
    """How this server is asked."""
    if "native" in offers:
        return "native"
    return "vllm" if offers.metrics == "vllm" or (offers.software or "").startswith("vllm") else "echo"


def prefill(bench: Bench, ids: Sequence[int], first: int, alternatives: int) -> Request:
    """A request for the rows of `ids` from position `first` on; computed anew, whatever the prefix cache holds."""
    asked, salt = way(bench.offers), prompts.nonce()
    if asked == "native":
        body = _native(ids, 1, alternatives, salt) | {"logprob_start_len": first - 1}
        return Request(method="POST", path=_GENERATE, body=body)
    if asked == "vllm":
        return _completion(bench, ids, 1, {"prompt_logprobs": alternatives, "cache_salt": salt})
    return _completion(bench, ids, 1, {"echo": True, "logprobs": min(alternatives, _ECHO_MOST)})


def decode(bench: Bench, ids: Sequence[int], tokens: int, alternatives: int) -> Request:
    """A request for what the server goes on with, greedily, with its rows; past the end of a text where it can be told to."""
    asked, salt = way(bench.offers), prompts.nonce()
    if asked == "native":
        body = _native(ids, tokens, alternatives, salt)
        body["sampling_params"] |= {"ignore_eos": True}
        return Request(method="POST", path=_GENERATE, body=body)
    more: dict[str, Any] = {"logprobs": alternatives if asked == "vllm" else min(alternatives, _ECHO_MOST)}
    if asked == "vllm":
        more |= {"ignore_eos": True, "return_tokens_as_token_ids": True, "cache_salt": salt}
    return _completion(bench, ids, tokens, more)


def prefilled(exchange: Exchange, first: int) -> list[Row]:
    """The rows of a `prefill` of positions from `first` on; raises reply.NotAReply, and Broken for what is no number."""
    reply.read(exchange)
    body, sent = _object(exchange.response), _object(exchange.request.body)
    if exchange.request.path == _GENERATE:
        told = _list(_object(body.get("meta_info")).get("input_top_logprobs"))[1:]
        rows = [_triples(one) for one in told]
        expected = len(sent["input_ids"]) - first
    else:
        choice = _object(_list(body.get("choices"))[0])
        expected = len(sent["prompt"]) - first
        if "prompt_logprobs" in sent:
            told = _list(choice.get("prompt_logprobs"))[first:]
            rows = [_by_ids(one, sent["prompt_logprobs"]) for one in told]
        else:
            told = _list(_object(choice.get("logprobs")).get("top_logprobs"))[first : first + expected]
            rows = [_named(one, sent["logprobs"]) for one in told]
    if len(rows) != expected:
        raise reply.NotAReply(f"{len(rows)} rows of logprobs for {expected} places of the prompt", "refused")
    return rows


def decoded(exchange: Exchange) -> tuple[list[Token], list[Row]]:
    """What a `decode` said, with its rows; raises reply.NotAReply, and Broken for what is no number."""
    reply.read(exchange)
    body, sent = _object(exchange.response), _object(exchange.request.body)
    if exchange.request.path == _GENERATE:
        meta = _object(body.get("meta_info"))
        tokens: list[Token] = [one[1] for one in _list(meta.get("output_token_logprobs")) if len(_list(one)) > 1]
        rows = [_triples(one) for one in _list(meta.get("output_top_logprobs"))]
    else:
        told = _object(_object(_list(body.get("choices"))[0]).get("logprobs"))
        tokens = [_token(str(one)) for one in _list(told.get("tokens"))]
        rows = [_named(one, sent["logprobs"]) for one in _list(told.get("top_logprobs"))]
    if not tokens or len(rows) != len(tokens):
        raise reply.NotAReply(f"{len(rows)} rows of logprobs for {len(tokens)} tokens")
    return tokens, rows


def ids(exchange: Exchange) -> tuple[int, ...]:
    """What was decoded, as ids; empty where they are not told, or nothing was said."""
    try:
        tokens, _ = decoded(exchange)
    except (reply.NotAReply, Broken):
        return ()
    found = tuple(token for token in tokens if isinstance(token, int))
    return found if len(found) == len(tokens) else ()


def not_offered(forced: Exchange, first: int) -> bool:
    """Whether the answer to a `prefill` shows that the server does not tell logprobs of a prompt."""
    try:
        prefilled(forced, first)
    except reply.NotAReply as error:
        return error.kind == "refused"
    except Broken:
        return False
    return False


def texts(exchange: Exchange) -> Iterator[tuple[int, str]]:
    """Ids and texts of tokens, as far as an exchange of either kind tells both."""
    body = _object(exchange.response)
    meta = _object(body.get("meta_info"))
    for name in ("input_top_logprobs", "output_top_logprobs"):
        for told in _list(meta.get(name)):
            yield from ((one[1], one[2]) for one in _list(told) if isinstance(one[2], str))
    for name in ("input_token_logprobs", "output_token_logprobs"):
        yield from ((one[1], one[2]) for one in _list(meta.get(name)) if isinstance(one[2], str))
    for choice in _list(body.get("choices")):
        for told in _list(_object(choice).get("prompt_logprobs")):
            for token, one in _object(told).items():
                if isinstance(text := _object(one).get("decoded_token"), str):
                    yield int(token), text


def _completion(bench: Bench, ids: Sequence[int], tokens: int, more: dict[str, Any]) -> Request:
    plain = prompts.complete(bench, list(ids), tokens, stream=False, logprobs=False)
    return plain.model_copy(update={"body": plain.body | more})


def _native(ids: Sequence[int], tokens: int, alternatives: int, salt: str) -> dict[str, Any]:
    return {
        "input_ids": list(ids),
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0},
        "return_logprob": True,
        "top_logprobs_num": alternatives,
        "return_text_in_logprobs": True,
        "cache_salt": salt,
    }


def _triples(told: Any) -> Row:
    """From SGLang's `[logprob, id, text]`."""
    return _row([(one[1], one[0]) for one in _list(told)])


def _by_ids(told: Any, most: int) -> Row:
    """From vLLM's `{id: {logprob, rank, decoded_token}}`, where the token that stands there is added if it is none of the best."""
    pairs: list[tuple[Token, Any]] = [(int(token), _object(one).get("logprob")) for token, one in _object(told).items()]
    return _cut(_row(pairs), most)


def _named(told: Any, most: int) -> Row:
    """From `{text: logprob}`; some servers add the token that was chosen."""
    return _cut(_row([(_token(text), value) for text, value in _object(told).items()]), most)


def _token(text: str) -> Token:
    named = text.removeprefix(_BY_ID)
    return int(named) if text.startswith(_BY_ID) and named.isdecimal() else text


def _row(pairs: Sequence[tuple[Token, Any]]) -> Row:
    found: list[tuple[Token, float]] = []
    for token, value in pairs:
        number = logprobs.number(value)
        if number is None or not math.isfinite(number):
            raise Broken(f"the logprob of token {token!r} is {'null (NaN)' if value is None else value}")
        found.append((token, number))
    if not found:
        raise reply.NotAReply("no logprobs at one of the places of the prompt", "refused")
    return row(found)


def _cut(found: Row, most: int) -> Row:
    return dict(list(found.items())[:most])


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
