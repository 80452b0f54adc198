"""What an answer must be to a probe of the parsers: one rule for each kind of probe, all pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jsonschema

from forge_validate.checks.result import Outcome
from forge_validate.checks.tools import parsed
from forge_validate.families.pieces import Call, Choice

Rule = Literal["plain", "thought", "cut", "forced", "no-call", "call", "calls", "sound", "json"]

Judgement = tuple[Outcome, str, str | float | None]
"""The outcome, why, and the word or number it rests on; the value `length`: the token budget ran out."""


@dataclass(frozen=True)
class Told:
    """A probe's answer and what of the probe it is held to."""

    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Mapping[str, Any] | None
    response_format: Mapping[str, Any] | None
    tags: Sequence[str]
    said: Choice


def plain(told: Told) -> Judgement:
    """Thinking switched off: all that is said is content."""
    said = told.said
    if (tag := _tag(told, said.content)) is not None:
        return "failed", f"{tag} is in the content", tag
    if said.reasoning.strip():
        return "failed", "thinking is switched off, yet there is reasoning", None
    if said.calls:
        return "failed", "a call, and no tool was offered", said.calls[0].name
    if not said.content.strip():
        return "failed", "nothing is said", said.finish
    return "passed", "all of it is content", None


def thought(told: Told) -> Judgement:
    """Thinking switched on: the thought is in the reasoning, and nothing of its tags in the content."""
    said = told.said
    if (tag := _tag(told, said.content)) is not None:
        return "failed", f"{tag} is in the content", tag
    if not said.reasoning.strip():
        return "failed", "thinking is switched on, and all of the answer is content", said.finish
    return "passed", "the thought is in the reasoning", len(said.reasoning)


def cut(told: Told) -> Judgement:
    """The budget runs out in the middle of the thought: the content is empty, and the reasoning holds what there is."""
    said = told.said
    if said.finish != "length":
        return "unmeasured", f"the budget did not run out: the finish reason is {said.finish}", said.finish
    if (tag := _tag(told, said.content)) is not None:
        return "failed", f"{tag} is in the content", tag
    if said.content.strip() and not said.reasoning.strip():
        return "failed", "the unfinished thought is content", None
    if said.content.strip():
        return "unmeasured", "the thought ended before the budget did", None
    if not said.reasoning.strip():
        return "failed", "the unfinished thought is nowhere", None
    return "passed", "the unfinished thought is in the reasoning, the content is empty", None


def forced(told: Told) -> Judgement:
    """`tool_choice` demands a call: it comes, of an offered (the named) tool, with arguments as a `strict` schema says."""
    said = told.said
    named = told.tool_choice["function"]["name"] if isinstance(told.tool_choice, Mapping) else None
    if not said.calls:
        if said.finish == "length":
            return "failed", "the token budget ran out before there was a call", "length"
        return "failed", f"no call, though tool_choice is {named or told.tool_choice}", said.finish
    for call in said.calls:
        if named is not None and call.name != named:
            return "failed", f"a call of {call.name!r}, though {named!r} was demanded", call.name
        if (complaint := _complain(told, call)) is not None:
            return _short(said, call) or ("failed", complaint, call.name)
        # Without `strict` the protocol promises no more than JSON.
        if (strict := _strict(told, call.name)) and (
            complaint := _validate(strict, parsed(call.arguments))
        ) is not None:
            # SGLang 0.5.23 closes in a stream what the budget cut off, so it may be JSON.
            return _short(said, call) or (
                "failed",
                f"the arguments are not as the schema says: {complaint}",
                call.name,
            )
    return _finished(told, ("tool_calls", "stop", "length"))


def no_call(told: Told) -> Judgement:
    """`tool_choice` forbids a call: none comes, and something is said."""
    said = told.said
    if said.calls:
        return "failed", "a call, though tool_choice is none", said.calls[0].name
    if not (said.content.strip() or said.reasoning.strip()):
        return "failed", "nothing is said", said.finish
    if said.finish == "tool_calls":
        return "failed", "the finish reason is tool_calls, and there is no call", said.finish
    return "passed", "no call", None


def call(told: Told) -> Judgement:
    """A call that the model makes by itself arrives as one, whole, and not as text."""
    said = told.said
    if (complaint := _sound(told)) is not None:
        return complaint
    if not said.calls:
        if said.finish == "tool_calls":
            return "failed", "the finish reason is tool_calls, and there is no call", said.finish
        return "unmeasured", "the model made no call", said.finish
    return _finished(told, ("tool_calls",))


def calls(told: Told) -> Judgement:
    """Several calls in one answer are told apart."""
    said = told.said
    if (complaint := _sound(told)) is not None:
        return complaint
    if len(said.calls) < 2:
        return "unmeasured", f"the model made {len(said.calls)} call, not several", len(said.calls)
    ids = [one.id for one in said.calls]
    if None in ids or len(set(ids)) < len(ids):
        return "failed", "the calls share an id, or have none", len(ids)
    return _finished(told, ("tool_calls",))


def sound(told: Told) -> Judgement:
    """Whatever the model does, it is one of the two: a text without tags, or a whole call."""
    said = told.said
    if (complaint := _sound(told)) is not None:
        return complaint
    if said.calls:
        return _finished(told, ("tool_calls",))
    if not (said.content.strip() or said.reasoning.strip()):
        return "failed", "neither text nor call", said.finish
    return "passed", "a text without tags", None


def structured(told: Told) -> Judgement:
    """The content is JSON, and as the schema says."""
    said = told.said
    wanted = (told.response_format or {})["json_schema"]["schema"]
    try:
        found = json.loads(said.content)
    except ValueError:
        if said.finish == "length":
            return "failed", "the token budget ran out within the JSON", "length"
        return "failed", "the content is no JSON", said.finish
    if (complaint := _validate(wanted, found)) is not None:
        return "failed", f"the content is not as the schema says: {complaint}", None
    return "passed", "as the schema says", None


RULES: Mapping[Rule, Callable[[Told], Judgement]] = {
    "plain": plain,
    "thought": thought,
    "cut": cut,
    "forced": forced,
    "no-call": no_call,
    "call": call,
    "calls": calls,
    "sound": sound,
    "json": structured,
}
"""By the name that parsers.yaml gives."""


def _sound(told: Told) -> Judgement | None:
    """What is wrong with an answer of either form."""
    said = told.said
    if (tag := _tag(told, said.content)) is not None:
        # A call that the budget cut off was none yet.
        return _spent(said, None) or ("failed", f"{tag} is in the content", tag)
    for one in said.calls:
        if (complaint := _complain(told, one)) is not None:
            return _spent(said, one) or ("failed", complaint, one.name)
        if (tag := _tag(told, one.arguments)) is not None:
            return "failed", f"{tag} is in the arguments", tag
    return None


def _complain(told: Told, one: Call) -> str | None:
    """Why this is no call of an offered tool."""
    if _schema(told, one.name) is None:
        return f"a call of {one.name!r}, which was not offered"
    if not one.id:
        return "the call has no id"
    if parsed(one.arguments) is None:
        return f"the arguments are no JSON object: {one.arguments[:80]!r}"
    return None


def _short(said: Choice, one: Call) -> Judgement | None:
    """The budget ran out within a call that had to come."""
    return ("failed", "the token budget ran out within the call", "length") if _spent(said, one) else None


def _spent(said: Choice, one: Call | None) -> Judgement | None:
    """The budget ran out in what would be wrong otherwise; nothing can be said of the parser then."""
    if said.finish == "length" and (one is None or one is said.calls[-1]):
        return "unmeasured", "the token budget ran out within the call", "length"
    return None


def _finished(told: Told, reasons: Sequence[str]) -> Judgement:
    said = told.said
    if said.finish not in reasons:
        return "failed", f"the finish reason is {said.finish!r}, and there is a call", said.finish
    return "passed", f"{len(said.calls)} whole call" + ("s" if len(said.calls) > 1 else ""), len(said.calls)


def _schema(told: Told, name: str) -> Any:
    """The schema of an offered tool's arguments; none for a tool that was not offered."""
    tools = (tool["function"] for tool in told.tools)
    return next((tool.get("parameters") or {} for tool in tools if tool["name"] == name), None)


def _strict(told: Told, name: str) -> Any:
    """The schema that a call's arguments are promised to follow, if any."""
    strict = {tool["function"]["name"] for tool in told.tools if tool["function"].get("strict")}
    return _schema(told, name) if name in strict else None


def _validate(schema: Any, value: Any) -> str | None:
    error = next(iter(jsonschema.Draft202012Validator(schema).iter_errors(value)), None)
    return None if error is None else error.message[:160]


def _tag(told: Told, text: str) -> str | None:
    return next((tag for tag in told.tags if tag in text), None)
