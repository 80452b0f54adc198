"""What the answers to `ask` show that a server offers: pure, from live and from recorded exchanges alike.

Facts, from recorded answers of both servers: SGLang tells its parsers in /server_info; without a tool parser it answers
a required call with plain text and 200; vLLM refuses `tools` with 400 then. vLLM's `usage` has
`prompt_tokens_details: null` unless it was started to report cached tokens and there are some.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from forge_validate import reply
from forge_validate.exchange import Exchange
from forge_validate.offers import UNSEEN, Offer, Offers, Seen

PREFIX = "offers/"
_REFUSED = (400, 404, 405, 415, 422, 501)
# A name that only a live scheduler of each server has.
_GAUGES: Mapping[Literal["sglang", "vllm"], str] = {
    "sglang": "sglang:num_running_reqs",
    "vllm": "vllm:num_requests_running",
}


def see(exchanges: Mapping[str, Exchange]) -> Offers:
    """What a server offers, from the exchanges whose names begin with `offers/`; empty without any."""
    asked = {name.removeprefix(PREFIX): one for name, one in exchanges.items() if name.startswith(PREFIX)}
    if not asked:
        return UNSEEN
    info = native_info(asked.get("server-info"))
    path = next((asked[n].request.path for n in ("tokenize-v1", "tokenize") if token_ids(asked.get(n))), None)
    return Offers(
        software=_software(asked, info),
        seen=tuple(_all(asked, info)),
        tokenize_path=path,
        metrics=_metrics(asked.get("metrics")),
    )


def native_info(exchange: Exchange | None) -> dict[str, Any] | None:
    """SGLang's description of itself; none for another server's, or no answer."""
    body = exchange.response if exchange is not None and exchange.status == 200 else None
    return body if isinstance(body, dict) and "model_path" in body else None


def token_ids(exchange: Exchange | None) -> list[int] | None:
    """The token ids in an answer; none without."""
    body = exchange.response if exchange is not None and exchange.status == 200 else None
    found = body.get("tokens") if isinstance(body, dict) else None
    return found if isinstance(found, list) and found else None


def refused(exchange: Exchange | None) -> bool:
    """Whether the server says that it does not do this (and not that it is busy, broken, or wants a key)."""
    return exchange is not None and exchange.status in _REFUSED


def _all(asked: Mapping[str, Exchange], info: dict[str, Any] | None) -> Iterator[Seen]:
    yield _native(asked, info)
    yield _by_metrics(asked.get("metrics"))
    yield _completions(asked.get("completions"))
    yield _tokenize(asked)
    yield _logprobs(asked.get("logprobs"))
    yield _told("tools", info, "tool_call_parser") or _tools(asked)
    yield _told("reasoning", info, "reasoning_parser") or _reasoning(asked)
    yield _switch(asked.get("thinking"), info)
    yield _told("cache-report", info, "enable_cache_report") or _cache_report(asked)


def _told(name: Offer, info: dict[str, Any] | None, setting: str) -> Seen | None:
    """What the server tells of itself; none where it tells nothing."""
    if info is None or setting not in info:
        return None
    return _seen(name, bool(info[setting]), f"/server_info tells {setting} {info[setting]!r}")


def _native(asked: Mapping[str, Exchange], info: dict[str, Any] | None) -> Seen:
    about = asked.get("server-info")
    if about is None or _untold(about):
        return _seen("native", None, _line(about))
    if info is None:
        return _seen("native", False, f"{_line(about)}, not as SGLang describes itself")
    generate, flush = asked.get("generate"), asked.get("flush")
    if refused(generate) or (flush is not None and flush.status in (404, 501)):
        return _seen("native", False, f"{_line(generate)}, {_line(flush)}")
    body = generate.response if generate is not None else None
    if not isinstance(body, dict) or "meta_info" not in body or flush is None or flush.status is None:
        return _seen("native", None, f"{_line(generate)}, {_line(flush)}")
    return _seen("native", True, f"{_line(about)}, {_line(generate)}, {_line(flush)}")


def _metrics(exchange: Exchange | None) -> Literal["sglang", "vllm"] | None:
    lines = (exchange.text or "").splitlines() if exchange is not None and exchange.status == 200 else []
    return next((who for who, gauge in _GAUGES.items() if any(line.startswith(gauge) for line in lines)), None)


def _by_metrics(exchange: Exchange | None) -> Seen:
    if exchange is None or _untold(exchange):
        return _seen("metrics", None, _line(exchange))
    who = _metrics(exchange)
    return _seen("metrics", who is not None, f"{_line(exchange)}, {_GAUGES[who] if who else 'no gauge we know'}")


def _completions(exchange: Exchange | None) -> Seen:
    """A server that fails on them offers them."""
    if exchange is None or (_untold(exchange) and exchange.status != 500):
        return _seen("completions", None, _line(exchange))
    return _seen("completions", not refused(exchange), _line(exchange))


def _tokenize(asked: Mapping[str, Exchange]) -> Seen:
    tried = [asked[name] for name in ("tokenize-v1", "tokenize") if name in asked]
    for exchange in tried:
        if (found := token_ids(exchange)) is not None:
            return _seen("tokenize", True, f"{_line(exchange)}, {len(found)} token ids")
    told = ", ".join(map(_line, tried)) or _line(None)
    absent = len(tried) == 2 and all(refused(one) or one.status == 200 for one in tried)
    return _seen("tokenize", False if absent else None, told)


def _logprobs(exchange: Exchange | None) -> Seen:
    """A server that fails on them (500) offers them: that is a finding, and the check's business."""
    if exchange is None or (_untold(exchange) and exchange.status != 500):
        return _seen("logprobs", None, _line(exchange))
    if refused(exchange):
        return _seen("logprobs", False, _line(exchange))
    try:
        said = reply.read(exchange)
    except reply.NotAReply:
        return _seen("logprobs", True, f"{_line(exchange)}, so it tried")
    return _seen("logprobs", bool(said.logprobs), f"{_line(exchange)}, {len(said.logprobs or ())} logprobs")


def _tools(asked: Mapping[str, Exchange]) -> Seen:
    """A call that was required and came as text shows that nobody parses calls."""
    auto, required = asked.get("tools"), asked.get("tools-required")
    if refused(auto):
        return _seen("tools", False, f"{_line(auto)} to `tools`")
    try:
        said = reply.read(required) if required is not None else None
    except reply.NotAReply:
        return _seen("tools", False if refused(required) else None, f"{_line(required)} to `tool_choice: required`")
    if said is None:
        return _seen("tools", None, _line(auto))
    if said.tool_calls:
        return _seen("tools", True, f"{_line(required)}, a required call came as a call")
    # Cut off, or nothing said at all: that tells nothing about parsers.
    if said.finish == "length" or not said.said:
        return _seen("tools", None, f"{_line(required)}, no call, finish reason {said.finish}")
    return _seen("tools", False, f"{_line(required)}, a required call came as text")


def _reasoning(asked: Mapping[str, Exchange]) -> Seen:
    exchange = asked.get("thinking")
    exchange = asked.get("plain", exchange) if refused(exchange) else exchange
    try:
        said = reply.read(exchange) if exchange is not None else None
    except reply.NotAReply:
        said = None
    if said is None or not said.said:
        return _seen("reasoning", None, _line(exchange))
    where = "reasoning in a field of its own" if said.reasoning else "no reasoning in a field of its own"
    return _seen("reasoning", bool(said.reasoning), f"{_line(exchange)}, {where}")


def _switch(exchange: Exchange | None, info: dict[str, Any] | None) -> Seen:
    if exchange is None:
        told = "SGLang gives `chat_template_kwargs` to the template" if info is not None else _line(None)
        return _seen("thinking-switch", True if info is not None else None, told)
    taken = True if exchange.status == 200 else False if refused(exchange) else None
    return _seen("thinking-switch", taken, f"{_line(exchange)} to `chat_template_kwargs`")


def _cache_report(asked: Mapping[str, Exchange]) -> Seen:
    """The same long prompt was sent more than once: a server that reports hits has one to report."""
    chats = [asked[name] for name in ("logprobs", "thinking", "plain") if name in asked]
    usages = [one.response.get("usage") for one in chats if one.status == 200 and isinstance(one.response, dict)]
    details = [usage.get("prompt_tokens_details") for usage in usages if isinstance(usage, dict)]
    hits = [one["cached_tokens"] for one in details if isinstance(one, dict) and "cached_tokens" in one]
    if hits:
        return _seen("cache-report", True, f"usage tells of {max(hits)} cached tokens")
    asked_twice = len(details) > 1
    told = "no cached tokens in the usage of a prompt that was sent twice" if asked_twice else "no two replies"
    return _seen("cache-report", False if asked_twice else None, told)


def _software(asked: Mapping[str, Exchange], info: dict[str, Any] | None) -> str | None:
    """What the server calls itself: SGLang in /server_info, vLLM in /version, both as the owner of the model."""
    owner = _owner(asked.get("models"))
    if info is not None:
        return " ".join(["sglang", *([str(info["version"])] if info.get("version") else [])])
    version = asked.get("version")
    told = version.response if version is not None and version.status == 200 else None
    number = told.get("version") if isinstance(told, dict) else None
    return f"{owner} {number}" if owner and isinstance(number, str) else owner


def _owner(models: Exchange | None) -> str | None:
    body = models.response if models is not None and models.status == 200 else None
    listed = body.get("data") if isinstance(body, dict) else None
    first = listed[0] if isinstance(listed, list) and listed and isinstance(listed[0], dict) else {}
    return str(first["owned_by"]) if first.get("owned_by") else None


def _untold(exchange: Exchange) -> bool:
    """Whether the answer tells nothing: none came, another key is wanted, the server is busy or broken."""
    status = exchange.status
    return status is None or status in (401, 403, 429) or (status >= 500 and status != 501)


def _seen(name: Offer, offered: bool | None, evidence: str) -> Seen:
    state: Literal["offered", "absent", "unknown"]
    state = "unknown" if offered is None else "offered" if offered else "absent"
    return Seen(name=name, state=state, evidence=evidence)


def _line(exchange: Exchange | None) -> str:
    if exchange is None:
        return "not asked"
    asked = f"{exchange.request.method} {exchange.request.path}"
    return f"{asked}: {exchange.error}" if exchange.error else f"{asked}: HTTP {exchange.status}"
