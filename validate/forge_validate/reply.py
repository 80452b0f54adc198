"""A reply: what a model said in an exchange, whatever the server, the endpoint and the way it arrived.

Facts from recorded samples: empty content is `""` in SGLang and null in vLLM; reasoning is `reasoning_content` in
SGLang and `reasoning` in vLLM; a stream ends with `data: [DONE]`; NaN arrives as a null logprob.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from forge_validate.exchange import Exchange


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
    """Empty for null."""
    reasoning: str
    """Empty for null and for servers without the field."""
    finish: str | None
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[float | None, ...] | None = None
    """One per token; none: not sent. A null inside is a value JSON cannot say, such as NaN."""
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    streamed: bool = False

    @property
    def said(self) -> dict[str, str]:
        """The texts a person would read, by field, empty ones left out."""
        return {name: text for name, text in (("content", self.content), ("reasoning", self.reasoning)) if text}


class NotAReply(ValueError):
    """The exchange holds no model's reply; the message says what it holds instead."""


def read(exchange: Exchange) -> Reply:
    """The reply in an exchange with a completion or chat endpoint; raises NotAReply."""
    if exchange.error is not None:
        raise NotAReply(exchange.error)
    if exchange.status != 200:
        raise NotAReply(f"HTTP {exchange.status}: {_shown(exchange)}")
    if exchange.response is None and exchange.text and exchange.text.lstrip().startswith("data:"):
        return _streamed(exchange.text)
    body = exchange.response
    if not isinstance(body, dict) or not isinstance(body.get("choices"), list) or not body["choices"]:
        raise NotAReply(f"no choices in the response: {_shown(exchange)}")
    return _buffered(body)


def _buffered(body: dict[str, Any]) -> Reply:
    choice = _object(body["choices"][0])
    # The completions endpoint has `text` where the chat endpoint has `message`.
    message = _object(choice["message"]) if "message" in choice else {"content": choice.get("text")}
    calls = [_object(call.get("function")) for call in message.get("tool_calls") or ()]
    return Reply(
        model=body.get("model"),
        content=_text(message, "content"),
        reasoning=_text(message, "reasoning_content") or _text(message, "reasoning"),
        finish=choice.get("finish_reason"),
        tool_calls=tuple(ToolCall(call.get("name") or "", call.get("arguments") or "") for call in calls),
        logprobs=_logprobs(choice.get("logprobs")),
        completion_tokens=_object(body.get("usage")).get("completion_tokens"),
        prompt_tokens=_object(body.get("usage")).get("prompt_tokens"),
    )


@dataclass
class _Parts:
    """What the pieces of a stream add up to."""

    model: str | None = None
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    finish: str | None = None
    names: dict[int, str] = field(default_factory=dict)
    arguments: dict[int, list[str]] = field(default_factory=dict)
    logprobs: list[float | None] | None = None
    tokens: int | None = None
    prompt: int | None = None


def _streamed(text: str) -> Reply:
    parts = _Parts()
    ended = False
    for piece in events(text):
        if piece is None:
            ended = True
            continue
        if "error" in piece or piece.get("object") == "error":
            raise NotAReply(f"an error inside the stream: {json.dumps(piece)[:300]}")
        _add(parts, piece)
    if not ended:
        raise NotAReply("the stream broke off: no `data: [DONE]`")
    return Reply(
        model=parts.model,
        content="".join(parts.content),
        reasoning="".join(parts.reasoning),
        finish=parts.finish,
        tool_calls=tuple(
            ToolCall(parts.names.get(i, ""), "".join(parts.arguments.get(i, ())))
            for i in sorted(parts.names.keys() | parts.arguments.keys())
        ),
        logprobs=None if parts.logprobs is None else tuple(parts.logprobs),
        completion_tokens=parts.tokens,
        prompt_tokens=parts.prompt,
        streamed=True,
    )


def _add(parts: _Parts, piece: dict[str, Any]) -> None:
    parts.model = piece.get("model") or parts.model
    usage = _object(piece.get("usage"))
    parts.tokens = usage.get("completion_tokens", parts.tokens)
    parts.prompt = usage.get("prompt_tokens", parts.prompt)
    for choice in piece.get("choices") or ():
        delta = _object(choice.get("delta"))
        parts.content.append(_text(delta, "content") or _text(choice, "text"))
        parts.reasoning.append(_text(delta, "reasoning_content") or _text(delta, "reasoning"))
        parts.finish = choice.get("finish_reason") or parts.finish
        if (logprobs := _logprobs(choice.get("logprobs"))) is not None:
            parts.logprobs = [*(parts.logprobs or ()), *logprobs]
        for call in delta.get("tool_calls") or ():
            index, function = call.get("index") or 0, _object(call.get("function"))
            parts.names[index] = parts.names.get(index, "") + (function.get("name") or "")
            parts.arguments.setdefault(index, []).append(function.get("arguments") or "")


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
        except ValueError as error:
            raise NotAReply(f"an event that is no JSON: {payload[:200]}") from error
        yield _object(piece)


def _logprobs(found: Any) -> tuple[float | None, ...] | None:
    """Per token, from the chat endpoint's shape (`content`) or the completions endpoint's (`token_logprobs`)."""
    if not isinstance(found, dict):
        return None
    if isinstance(found.get("token_logprobs"), list):
        return tuple(found["token_logprobs"])
    if isinstance(found.get("content"), list):
        return tuple(_object(token).get("logprob") for token in found["content"])
    return None


def _text(holder: dict[str, Any], name: str) -> str:
    value = holder.get(name)
    if value is None or isinstance(value, str):
        return value or ""
    raise NotAReply(f"`{name}` is no text: {json.dumps(value)[:200]}")


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _shown(exchange: Exchange) -> str:
    """A response's body for people, shortened; an error's own message where there is one (flat or nested)."""
    body = exchange.response
    if isinstance(body, dict):
        inner = body.get("error") if isinstance(body.get("error"), dict) else body
        if isinstance(inner, dict) and isinstance(inner.get("message"), str):
            return str(inner["message"])[:300]
    return (json.dumps(body, ensure_ascii=False) if body is not None else (exchange.text or "an empty body"))[:300]
