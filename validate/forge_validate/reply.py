"""A reply: what a model said in an exchange, whatever the server, the endpoint and the way it arrived.

Facts from recorded samples: empty content is `""` in SGLang and null in vLLM; reasoning is `reasoning_content` in
SGLang and `reasoning` in vLLM; a stream ends with `data: [DONE]`; NaN arrives as a null logprob. SGLang's own `/generate`
has `text` and `meta_info`, and its stream repeats all the text so far in every event.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from forge_validate import logprobs
from forge_validate.exchange import Exchange
from forge_validate.logprobs import Logprobs


@dataclass(frozen=True)
class ToolCall:
    """One call the model asks for; `arguments` is the text as sent, JSON or not."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    """What a model said."""

    model: str | None
    content: str
    """Empty for null; the refusal where a server tells one instead."""
    reasoning: str
    """Empty for null and for servers without the field."""
    finish: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[float | None, ...] | None = None
    """One per token; none: not sent. A null inside is a value JSON cannot say, such as NaN."""
    alternatives: tuple[float | None, ...] = ()
    """Logprobs of all alternatives of all tokens."""
    tokens: tuple[int | str, ...] = ()
    """Ids of the tokens where they are told, else their texts; empty: neither is told."""
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    streamed: bool = False

    @property
    def said(self) -> dict[str, str]:
        """The texts a person would read, by field, empty ones left out."""
        return {name: text for name, text in (("content", self.content), ("reasoning", self.reasoning)) if text}


class NotAReply(ValueError):
    """The exchange holds no model's reply; the message says what it holds instead.

    `kind`: the request was `refused` (HTTP 4xx), a stream broke off or holds an error, or there is `no-answer`.
    """

    def __init__(self, message: str, kind: Literal["refused", "broken-stream", "no-answer"] = "no-answer") -> None:
        super().__init__(message)
        self.kind = kind


def read(exchange: Exchange) -> Reply:
    """The first reply in an exchange with a completion or chat endpoint; raises NotAReply."""
    return replies(exchange)[0]


def replies(exchange: Exchange) -> tuple[Reply, ...]:
    """Every reply in an exchange (one, unless the request's `n` asked for more), at least one; raises NotAReply."""
    if exchange.error is not None:
        raise NotAReply(exchange.error)
    if exchange.status != 200:
        refused = exchange.status is not None and 400 <= exchange.status < 500
        raise NotAReply(f"HTTP {exchange.status}: {shown(exchange)}", "refused" if refused else "no-answer")
    if exchange.response is None and exchange.text and exchange.text.lstrip().startswith(("data:", "event:", ":")):
        return _streamed(exchange.text)
    body = document(exchange)
    if isinstance(body, dict) and "choices" not in body and isinstance(body.get("meta_info"), dict):
        return (_native(body, streamed=False),)
    if not isinstance(body, dict) or not isinstance(body.get("choices"), list) or not body["choices"]:
        raise NotAReply(f"no choices in the response: {shown(exchange)}")
    sent = exchange.request.body
    echo = isinstance(sent, dict) and sent.get("echo") is True
    return tuple(_buffered(body, _object(choice), echo) for choice in body["choices"])


def document(exchange: Exchange) -> Any:
    """The body as JSON, also where it was recorded as a text: `NaN` is no JSON, and some recorders refuse it."""
    if exchange.response is None and exchange.text and exchange.text.lstrip().startswith(("{", "[")):
        try:
            return json.loads(exchange.text)
        except (ValueError, RecursionError):
            return None
    return exchange.response


def _buffered(body: dict[str, Any], choice: dict[str, Any], echo: bool) -> Reply:
    # The completions endpoint has `text` where the chat endpoint has `message`.
    message = _object(choice["message"]) if "message" in choice else {"content": choice.get("text")}
    calls = [_object(_object(call).get("function")) for call in message.get("tool_calls") or ()]
    told = logprobs.read(choice.get("logprobs"), echo=echo)
    return Reply(
        model=body.get("model"),
        content=_text(message, "content") or _text(message, "refusal"),
        reasoning=_text(message, "reasoning_content") or _text(message, "reasoning"),
        finish=choice.get("finish_reason"),
        tool_calls=tuple(ToolCall(call.get("name") or "", _arguments(call)) for call in calls),
        logprobs=None if told is None else told.chosen,
        alternatives=() if told is None else told.alternatives,
        tokens=logprobs.ids(choice.get("token_ids")) or (() if told is None else told.tokens),
        completion_tokens=_object(body.get("usage")).get("completion_tokens"),
        prompt_tokens=_object(body.get("usage")).get("prompt_tokens"),
    )


def _native(body: dict[str, Any], *, streamed: bool) -> Reply:
    meta = _object(body["meta_info"])
    told, finish = logprobs.native(meta), meta.get("finish_reason")
    return Reply(
        model=None,
        content=_text(body, "text"),
        reasoning="",
        finish=finish.get("type") if isinstance(finish, dict) else finish,
        logprobs=None if told is None else told.chosen,
        alternatives=() if told is None else told.alternatives,
        tokens=logprobs.ids(body.get("output_ids")) or (() if told is None else told.tokens),
        completion_tokens=meta.get("completion_tokens"),
        prompt_tokens=meta.get("prompt_tokens"),
        streamed=streamed,
    )


@dataclass
class _Parts:
    """What the pieces of one choice in a stream add up to."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    finish: str | None = None
    names: dict[int, str] = field(default_factory=dict)
    arguments: dict[int, list[str]] = field(default_factory=dict)
    told: Logprobs | None = None
    ids: list[int] = field(default_factory=list)


def _streamed(text: str) -> tuple[Reply, ...]:
    parts: dict[int, _Parts] = {}
    model, usage, native, ended = None, dict[str, Any](), None, False
    for piece in events(text):
        if piece is None:
            ended = True
            continue
        if "error" in piece or piece.get("object") == "error":
            raise NotAReply(f"an error inside the stream: {json.dumps(piece)[:300]}", "broken-stream")
        if isinstance(piece.get("meta_info"), dict):
            native = piece
        model = piece.get("model") or model
        usage |= _object(piece.get("usage"))
        for choice in piece.get("choices") or ():
            _add(parts.setdefault(_object(choice).get("index") or 0, _Parts()), _object(choice))
    if not ended:
        raise NotAReply("the stream broke off: no `data: [DONE]`", "broken-stream")
    if native is not None:
        return (_native(native, streamed=True),)
    if not parts:
        raise NotAReply("a stream without a choice", "broken-stream")
    return tuple(_whole(parts[index], model, usage) for index in sorted(parts))


def _whole(parts: _Parts, model: str | None, usage: dict[str, Any]) -> Reply:
    return Reply(
        model=model,
        content="".join(parts.content),
        reasoning="".join(parts.reasoning),
        finish=parts.finish,
        tool_calls=tuple(
            ToolCall(parts.names.get(i, ""), "".join(parts.arguments.get(i, ())))
            for i in sorted(parts.names.keys() | parts.arguments.keys())
        ),
        logprobs=None if parts.told is None else parts.told.chosen,
        alternatives=() if parts.told is None else parts.told.alternatives,
        tokens=tuple(parts.ids) or (() if parts.told is None else parts.told.tokens),
        completion_tokens=usage.get("completion_tokens"),
        prompt_tokens=usage.get("prompt_tokens"),
        streamed=True,
    )


def _add(parts: _Parts, choice: dict[str, Any]) -> None:
    delta = _object(choice.get("delta"))
    parts.content.append(_text(delta, "content") or _text(delta, "refusal") or _text(choice, "text"))
    parts.reasoning.append(_text(delta, "reasoning_content") or _text(delta, "reasoning"))
    parts.finish = choice.get("finish_reason") or parts.finish
    parts.ids += logprobs.ids(choice.get("token_ids"))
    if (told := logprobs.read(choice.get("logprobs"))) is not None:
        parts.told = told if parts.told is None else parts.told + told
    for call in delta.get("tool_calls") or ():
        index, function = _object(call).get("index") or 0, _object(_object(call).get("function"))
        parts.names[index] = parts.names.get(index, "") + (function.get("name") or "")
        parts.arguments.setdefault(index, []).append(_arguments(function))


def events(text: str) -> Iterator[dict[str, Any] | None]:
    """The JSON objects of an event stream; None for `[DONE]`. Raises NotAReply for what is not JSON."""
    # Not splitlines(): a model may say U+2028, which ends no line here.
    for line in text.split("\n"):
        payload = line.removeprefix("data:").strip()
        if not line.startswith("data:") or not payload:
            continue
        if payload == "[DONE]":
            yield None
            continue
        try:
            piece = json.loads(payload)
        except (ValueError, RecursionError) as error:
            raise NotAReply(f"an event that is no JSON: {payload[:200]}", "broken-stream") from error
        yield _object(piece)


def _text(holder: dict[str, Any], name: str) -> str:
    value = holder.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    raise NotAReply(f"`{name}` is no text: {json.dumps(value)[:200]}")


def _arguments(function: dict[str, Any]) -> str:
    """As sent; some servers send the object itself where the protocol wants its text."""
    value = function.get("arguments")
    return value if isinstance(value, str) else "" if value is None else json.dumps(value, ensure_ascii=False)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def shown(exchange: Exchange) -> str:
    """A response's body for people, shortened; an error's own message where there is one (flat or nested)."""
    body = document(exchange)
    if isinstance(body, dict):
        inner = body.get("error") if isinstance(body.get("error"), dict) else body
        for name in ("message", "detail"):
            if isinstance(inner, dict) and isinstance(inner.get(name), str):
                return str(inner[name])[:300]
    return (json.dumps(body, ensure_ascii=False) if body is not None else (exchange.text or "an empty body"))[:300]
