"""The chat template: every shape of request comes to exactly as many prompt tokens as the model's own files make of it.

A wrong template leaves answers plausible and worse; the length of the prompt shows it without any wisdom of the model. The
shapes and the ways of servers to read a request are in template.yaml.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from forge_core.errors import UsageError
from forge_core.model import Frozen
from forge_validate import data
from forge_validate.checks.result import CheckResult
from forge_validate.exchange import Exchange, Request
from forge_validate.families import prompts
from forge_validate.families.family import Ask, Wave, Waves, result
from forge_validate.families.lacking import refused_for_parser
from forge_validate.families.render import Dialect, Refusal, Renderer, renderer
from forge_validate.suite import Name

if TYPE_CHECKING:
    from forge_validate.judge import Bench

# Tokens that a template may add of its own, with tools described at length; a guess well above those looked at.
_TEMPLATE_TOKENS = 512


class Shape(Frozen):
    """One form a request can have."""

    name: Name
    long: bool = False
    """Its last message is a text of as many words as the settings say."""
    body: dict[str, Any]
    """What is sent beside the model's name and the limits."""


class Shapes(Frozen):
    """template.yaml."""

    schema_version: Literal[1] = Field(alias="schema")
    dialects: Annotated[tuple[Dialect, ...], Field(min_length=1)]
    shapes: Annotated[tuple[Shape, ...], Field(min_length=20)]


class Settings(Frozen):
    """The section `template` of a suite."""

    words: Annotated[int, Field(gt=0)]
    """Of the long text."""
    at_once: Annotated[int, Field(gt=0)] = 8
    """Requests in one wave; they do not disturb each other."""
    timeout: Annotated[float, Field(gt=0)]
    """Seconds for one answer of one token."""


class Template:
    """The family."""

    name = "template"
    settings = Settings
    checks = "prompt lengths against an offline render, shape by shape"

    def waves(self, settings: Settings, bench: Bench) -> Waves:
        """Every shape once, for one token of answer."""
        asks = []
        for shape in shapes().shapes:
            request = Request(method="POST", path="/v1/chat/completions", body=_body(shape, settings, bench.served))
            asks.append(Ask(f"template/{shape.name}", request, settings.timeout))
        for start in range(0, len(asks), settings.at_once):
            yield Wave(tuple(asks[start : start + settings.at_once]))

    def judge(self, settings: Settings, bench: Bench, exchanges: Mapping[str, Exchange]) -> tuple[CheckResult, ...]:
        """One check for each shape, all held to the one dialect that explains most of them."""
        names = [f"template/{shape.name}" for shape in shapes().shapes]
        if bench.model is None:
            return tuple(result(name, "unmeasured", "no model folder to render the prompt from") for name in names)
        try:
            made = renderer(bench.model)
        except UsageError as error:
            return tuple(result(name, "unmeasured", error.message) for name in names)
        dialect = _dialect(made, [exchanges[name] for name in names if name in exchanges])
        return tuple(_judged(name, exchanges.get(name), made, dialect) for name in names)

    def cost(self, settings: Settings) -> int:
        """Every shape as if each byte were a token, and one token of answer."""
        asked = [(shape, json.dumps(_body(shape, settings, ""), ensure_ascii=False)) for shape in shapes().shapes]
        texts = sum(
            prompts.filler_tokens(settings.words) if shape.long else len(text.encode()) for shape, text in asked
        )
        return texts + len(asked) * (_TEMPLATE_TOKENS + 1)


@cache
def shapes() -> Shapes:
    """The shapes and dialects of this package; raises UsageError for a mistake in the file."""
    return data.load("families", "template", Shapes)


def _body(shape: Shape, settings: Settings, served: str) -> dict[str, Any]:
    body = {**shape.body, "model": served, "max_tokens": 1, "temperature": 0}
    if shape.long:
        *before, last = body["messages"]
        body["messages"] = [*before, {**last, "content": prompts.filler("The", settings.words)}]
    return body


def _dialect(made: Renderer, exchanges: Sequence[Exchange]) -> Dialect:
    """The dialect in which most shapes are as long as they should be; the first of equals."""
    known = shapes().dialects
    return max(known, key=lambda dialect: sum(1 for one in exchanges if _expected(made, dialect, one) == _told(one)))


def _judged(name: str, exchange: Exchange | None, made: Renderer, dialect: Dialect) -> CheckResult:
    if exchange is None or exchange.error is not None:
        return result(name, "unmeasured", "was not asked" if exchange is None else str(exchange.error))
    expected, told = _expected(made, dialect, exchange), _told(exchange)
    if isinstance(expected, str):
        if exchange.status is not None and 400 <= exchange.status < 500:
            return result(name, "passed", f"refused, as the template does: {expected}")
        return result(name, "failed", f"the template refuses this ({expected}), the server does not", value=told)
    if exchange.status != 200:
        outcome: Literal["unmeasured", "failed"] = "unmeasured" if refused_for_parser(exchange) else "failed"
        return result(name, outcome, f"HTTP {exchange.status}, and the template makes {expected} tokens of it")
    if told is None:
        return result(name, "failed", "the reply does not say how long the prompt was")
    if told != expected:
        why = f"the prompt was {told} tokens long, the model's own template makes {expected}"
        return result(name, "failed", f"{why} (read as {dialect.name})", value=told)
    return result(name, "passed", f"{told} tokens, as rendered (read as {dialect.name})", value=told)


def _expected(made: Renderer, dialect: Dialect, exchange: Exchange) -> int | str:
    """The length of the prompt, or why the template does not take the request."""
    try:
        return made.length(exchange.request.body, dialect, _when(exchange))
    except Refusal as error:
        return str(error)


def _when(exchange: Exchange) -> datetime:
    """When the server answered, for templates that write the date."""
    try:
        return parsedate_to_datetime(exchange.headers["date"])
    except (KeyError, ValueError):
        return datetime.now(UTC)


def _told(exchange: Exchange) -> int | None:
    body = exchange.response
    usage = body.get("usage") if isinstance(body, dict) else None
    found = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return found if isinstance(found, int) else None
