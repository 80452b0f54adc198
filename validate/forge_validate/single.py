"""One exchange by itself: what class of reply it holds, without a suite, without a known answer, whoever recorded it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from forge_validate import reply
from forge_validate.checks import finite
from forge_validate.checks.result import quoted
from forge_validate.checks.tokens import asked_text, garbage, tags, texts
from forge_validate.exchange import Exchange
from forge_validate.policy import Text
from forge_validate.reply import Reply

Class = Literal["ok", "numbers", "garbage", "budget", "parser", "wrong-server", "refused", "broken-stream", "no-answer"]
"""`ok`, or a kind of wrong as a verdict names it; `refused` and `broken-stream` are kinds of their own here."""

Found = tuple[Class, str]

_SPEAKS = ("choices", "meta_info")


def judge(exchange: Exchange, limits: Text, listed: frozenset[str] = frozenset()) -> Found:
    """The class of an exchange and why. `listed`: models that the same server is known to serve; empty if unknown.

    The order is that of `diagnose`: what spoils everything after it comes first.
    """
    if (why := finite.broken_numbers(exchange)) is not None:
        return "numbers", why
    if not _generates(exchange):
        return _described(exchange)
    try:
        said = reply.replies(exchange)
    except reply.NotAReply as error:
        return error.kind, str(error)
    sent = exchange.request.body if isinstance(exchange.request.body, dict) else {}
    model = sent.get("model")
    if listed and isinstance(model, str) and model not in listed:
        served = ", ".join(sorted(listed))
        return "wrong-server", f"answers for {model!r}, which the server does not list: it serves {served}"
    found = [_reply(one, exchange, sent, limits) for one in said]
    return next((one for one in found if one[0] != "ok"), found[0])


def listed_models(exchange: Exchange) -> frozenset[str]:
    """The models that an exchange with `/v1/models` lists; empty for any other exchange."""
    body = reply.document(exchange)
    if exchange.error is not None or exchange.status != 200 or not isinstance(body, dict) or "choices" in body:
        return frozenset()
    models = body.get("data")
    if body.get("object") != "list" or not isinstance(models, list):
        return frozenset()
    found = [one for one in models if isinstance(one, dict) and one.get("object") == "model"]
    return frozenset(one["id"] for one in found if isinstance(one.get("id"), str))


def _generates(exchange: Exchange) -> bool:
    body = reply.document(exchange)
    if isinstance(body, dict) and any(name in body for name in _SPEAKS):
        return True
    return exchange.request.path.rstrip("/").endswith(("/completions", "/generate")) or (
        exchange.response is None and (exchange.text or "").lstrip().startswith("data:")
    )


def _described(exchange: Exchange) -> Found:
    """An endpoint at which no model speaks."""
    if exchange.error is not None:
        return "no-answer", exchange.error
    status, body = exchange.status, reply.document(exchange)
    if status is not None and 400 <= status < 500:
        return "refused", f"HTTP {status}: {reply.shown(exchange)}"
    if status != 200:
        return "no-answer", f"HTTP {status}: {reply.shown(exchange)}"
    if isinstance(body, dict) and (body.get("object") == "error" or isinstance(body.get("error"), dict)):
        return "refused", f"an error under HTTP 200: {reply.shown(exchange)}"
    if models := listed_models(exchange):
        return "ok", f"lists {', '.join(sorted(models))}"
    if not body and not (exchange.text or "").strip():
        # /health says nothing but its status.
        return ("ok", "HTTP 200") if exchange.request.method == "GET" else ("no-answer", "an empty body")
    return "ok", f"HTTP 200 at {exchange.request.path}, where no model speaks"


def _reply(said: Reply, exchange: Exchange, sent: Mapping[str, Any], limits: Text) -> Found:
    if (why := finite.complain(said, exchange)) is not None:
        return "numbers", why
    if said.completion_tokens == 0 and not said.said and not said.tool_calls:
        return "no-answer", f"not one token, finish reason {said.finish}"
    if (bad := garbage(said, limits, prompt=asked_text(sent))) is not None:
        place, why = bad
        shown = said.said.get(place, "")
        return "garbage", why + (f" - {quoted(shown, 72)}" if shown else "")
    if (why := _leaks(said)) is not None:
        return "parser", why
    chat = _is_chat(exchange)
    if said.streamed and said.finish is None:
        return "broken-stream", "the stream ended without a finish reason"
    if chat and said.finish == "length":
        return "budget", _cut(said, sent)
    if chat and (why := _misplaced(said, sent)) is not None:
        return "parser", why
    return "ok", _told(said)


def _leaks(said: Reply) -> str | None:
    for place, part in texts(said).items():
        # Inside the reasoning a model may speak of its tags; a special token it cannot even write.
        tag = tags.tools(part) or next(iter(tags.special(part)), None) if place == "reasoning" else tags.leaked(part)
        if tag is not None:
            return f"{tag} leaks into the {place} - {quoted(part, 72)}"
    return None


def _cut(said: Reply, sent: Mapping[str, Any]) -> str:
    """In which part of a reply the budget ran out."""
    given = sent.get("max_completion_tokens") or sent.get("max_tokens")
    budget = f"the token budget of {given}" if given else "the token budget"
    if said.tool_calls:
        return f"{budget} ran out in the middle of a tool call"
    if said.content.strip():
        return f"{budget} ran out in the middle of the answer"
    return f"{budget} ran out while it was thinking, before there was any content"


def _misplaced(said: Reply, sent: Mapping[str, Any]) -> str | None:
    """What is not where the request wants it; none if all is."""
    choice, tools = sent.get("tool_choice"), _tool_names(sent)
    for call in said.tool_calls:
        if choice == "none":
            return f"a call of {call.name!r}, though `tool_choice` is none"
        if tools and call.name not in tools:
            return f"a call of {call.name!r}, which is none of the tools ({', '.join(tools)})"
        if not _is_object(call.arguments):
            return f"the arguments of {call.name!r} are no JSON object - {quoted(call.arguments, 72)}"
    if not said.tool_calls:
        if choice == "required" or isinstance(choice, dict):
            return f"a tool call is required, and there is none - {quoted(said.content or said.reasoning, 72)}"
        if said.finish == "tool_calls":
            return "the finish reason is 'tool_calls', and there is no call"
    elif tools and choice in (None, "auto") and said.finish != "tool_calls":
        return f"there is a tool call, and the finish reason is {said.finish!r}"
    switch = sent.get("chat_template_kwargs")
    if isinstance(switch, dict) and switch.get("enable_thinking") is False and said.reasoning.strip():
        return f"thinking is switched off, yet there is reasoning - {quoted(said.reasoning, 72)}"
    if not said.content.strip() and not said.tool_calls:
        return (
            "the content is empty and all of the answer lies in the reasoning: parser, template or thinking switch - "
            + quoted(said.reasoning, 72)
        )
    kind = sent.get("response_format")
    wanted = kind.get("type") if isinstance(kind, dict) else None
    if wanted in ("json_object", "json_schema") and not said.tool_calls and not _is_json(said.content):
        return f"`response_format` is {wanted}, and the content is no JSON - {quoted(said.content, 72)}"
    return None


def _told(said: Reply) -> str:
    """What a clean reply holds."""
    parts = [f"{place} {quoted(text.strip(), 48)}" for place, text in said.said.items() if text.strip()]
    parts += [f"call {call.name}({quoted(call.arguments, 48)})" for call in said.tool_calls]
    if said.logprobs:
        parts.append(f"{len(said.logprobs)} finite logprobs")
    return ", ".join(parts)


def _is_chat(exchange: Exchange) -> bool:
    """Raw completions have no end of their own and no parsers: what is cut or misplaced says nothing there."""
    body = reply.document(exchange)
    if isinstance(body, dict) and isinstance(body.get("choices"), list):
        return any(isinstance(choice, dict) and "message" in choice for choice in body["choices"])
    return exchange.request.path.rstrip("/").endswith("/chat/completions")


def _tool_names(sent: Mapping[str, Any]) -> tuple[str, ...]:
    tools = sent.get("tools")
    functions = [tool.get("function") for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []
    return tuple(str(one["name"]) for one in functions if isinstance(one, dict) and "name" in one)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
