"""The parsers: reasoning, calls and structured answers arrive where the protocol puts them, buffered and streamed.

Judged is what the protocol promises, not wisdom: forced calls and schemas bind the form of an answer whatever the model. What
only a willing model does (to think, to call a tool unasked) is not measured where it does not. The probes are in parsers.yaml.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from forge_core.model import Frozen
from forge_validate import data, reply
from forge_validate.checks.result import CheckResult
from forge_validate.exchange import Exchange, Request
from forge_validate.families import pieces, prompts
from forge_validate.families.family import Ask, Wave, Waves, result
from forge_validate.families.lacking import refused_for_parser, seen, without
from forge_validate.families.rules import RULES, Rule, Told
from forge_validate.suite import Name

if TYPE_CHECKING:
    from forge_validate.judge import Bench

# As in the family of templates.
_TEMPLATE_TOKENS = 512
_NEEDS_TOOLS = ("forced", "call", "calls")
_NEEDS_REASONING = ("thought", "cut")


class Probe(Frozen):
    """One request, asked buffered and streamed."""

    name: Name
    rule: Rule
    """What its answer must be (see `rules`)."""
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    thinking: bool = False
    """`enable_thinking`, always sent."""
    small: bool = False
    """With the small budget of the settings."""


class Probes(Frozen):
    """parsers.yaml."""

    schema_version: Literal[1] = Field(alias="schema")
    tags: tuple[str, ...]
    """What belongs to no content and to no arguments."""
    probes: Annotated[tuple[Probe, ...], Field(min_length=1)]


class Settings(Frozen):
    """The section `parsers` of a suite."""

    tokens: Annotated[int, Field(gt=0)]
    """Of each answer at most, thinking included."""
    small: Annotated[int, Field(gt=0)]
    """The budget that must run out in the middle of a thought."""
    at_once: Annotated[int, Field(gt=0)] = 4
    """Requests in one wave."""
    timeout: Annotated[float, Field(gt=0)]
    """Seconds for one answer."""


class Parsers:
    """The family."""

    name = "parsers"
    settings = Settings
    checks = "reasoning, calls and schemas, buffered and streamed"

    def waves(self, settings: Settings, bench: Bench) -> Waves:
        """What the server says of itself, then every probe buffered and streamed."""
        if "native" in bench.offers:
            yield Wave((Ask("parsers/about", Request(method="GET", path="/server_info"), settings.timeout),))
        asks = [Ask(name, _request(probe, settings, bench, name), settings.timeout) for name, probe in _named()]
        for start in range(0, len(asks), settings.at_once):
            yield Wave(tuple(asks[start : start + settings.at_once]))

    def judge(self, settings: Settings, bench: Bench, exchanges: Mapping[str, Exchange]) -> tuple[CheckResult, ...]:
        """One check for each probe and way of answering."""
        about = exchanges.get("parsers/about")
        lacks = {
            "tools": without(about, "tool_call_parser") or not (about or seen(exchanges, "parsers/", "arguments")),
            "reasoning": without(about, "reasoning_parser") or not _any_reasoning(exchanges, about),
        }
        return tuple(_judged(name, probe, exchanges, lacks) for name, probe in _named())

    def cost(self, settings: Settings) -> int:
        """Every probe twice, as if each byte were a token."""
        asked = probes().probes
        texts = sum(len(probe.model_dump_json().encode()) + _TEMPLATE_TOKENS for probe in asked)
        return 2 * (texts + sum(settings.small if probe.small else settings.tokens for probe in asked))


@cache
def probes() -> Probes:
    """The probes of this package; raises UsageError for a mistake in the file."""
    return data.load("families", "parsers", Probes)


def _named() -> Iterator[tuple[str, Probe]]:
    for probe in probes().probes:
        yield f"parsers/{probe.name}", probe
        yield f"parsers/{probe.name}-streamed", probe


def _request(probe: Probe, settings: Settings, bench: Bench, name: str) -> Request:
    body: dict[str, Any] = {
        "model": bench.served,
        "messages": list(probe.messages),
        "max_tokens": settings.small if probe.small else settings.tokens,
        "temperature": 0,
        "seed": bench.suite.seed,
        "chat_template_kwargs": {"enable_thinking": probe.thinking},
    }
    for field, value in (("tools", list(probe.tools)), ("tool_choice", probe.tool_choice)):
        if value:
            body[field] = value
    if probe.response_format:
        body["response_format"] = probe.response_format
    if name.endswith("-streamed"):
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return Request(method="POST", path="/v1/chat/completions", body=body)


def _judged(name: str, probe: Probe, exchanges: Mapping[str, Exchange], lacks: Mapping[str, bool]) -> CheckResult:
    exchange = exchanges.get(name)
    if exchange is None or exchange.error is not None:
        return result(name, "unmeasured", "was not asked" if exchange is None else str(exchange.error))
    if refused_for_parser(exchange):
        return result(name, "unmeasured", "the server refuses tools: it runs without a tool parser")
    if lacks["tools"] and probe.rule in _NEEDS_TOOLS:
        return result(name, "unmeasured", "the server runs without a tool parser, as far as it shows")
    if lacks["reasoning"] and probe.rule in _NEEDS_REASONING:
        return result(name, "unmeasured", "no reasoning came: no parser for it, or a model that does not think")
    try:
        said = pieces.read(exchange)
    except reply.NotAReply as error:
        return result(name, "failed", str(error), reproduce=prompts.curl(exchange.request))
    told = Told(probe.tools, probe.tool_choice, probe.response_format, probes().tags, said.first)
    outcome, explanation, value = RULES[probe.rule](told)
    shown = said.first.content or json.dumps([call.arguments for call in said.first.calls], ensure_ascii=False)
    return result(
        name,
        outcome,
        explanation,
        value=value,
        answer=shown,
        reproduce=prompts.curl(exchange.request) if outcome == "failed" else None,
    )


def _any_reasoning(exchanges: Mapping[str, Exchange], about: Exchange | None) -> bool:
    """Whether reasoning came apart from the content anywhere, or the server tells that it has a parser for it."""
    if about is not None and about.status == 200:
        return True
    for name, one in exchanges.items():
        if name.startswith("parsers/thinking-"):
            try:
                if pieces.read(one).first.reasoning:
                    return True
            except reply.NotAReply:
                continue
    return False
