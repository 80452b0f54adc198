"""The garbage detector: looks at content, reasoning and the arguments of tool calls, at any character of any script.

What broken kernels say, as reported: `!!!!` (argmax over NaN is token 0), `////`, `????`, one word over and over,
U+FFFD, control characters, word salad of many scripts, special tokens in the text, or nothing at all; from the first
token on, or after a good start.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from forge_validate import reply
from forge_validate.checks.result import CheckResult, Evidence
from forge_validate.checks.tokens.measures import Measures, complain, complain_of_tokens, measure
from forge_validate.checks.tokens.prompt import asked_text
from forge_validate.policy import Text
from forge_validate.reply import Reply

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')

LEAK = "tag"
"""Value of a result that found special tokens in a text: they are no garbage of the model's, a parser let them through."""


def text(evidence: Evidence) -> CheckResult:
    """Nothing the model says is garbage, and it says something."""
    try:
        said = reply.read(evidence.exchange)
    except reply.NotAReply as error:
        return evidence.no_reply(error)
    asked = _asked(said, evidence)
    prompt = asked_text(evidence.exchange.request.body)
    if (found := garbage(said, evidence.policy.text, asked=asked, prompt=prompt)) is not None:
        place, why = found
        shown = said.said.get(place, said.content)
        return evidence.failed(why, value=place if shown else 0, answer=shown)
    for place, part in texts(said).items():
        if tags := measure(part, evidence.policy.text, repeats=True).special:
            return evidence.failed(f"special tokens in the {place} ({tags[0]})", value=LEAK, answer=part)
    if not said.said:
        return evidence.passed("a tool call, no text", value=0)
    return evidence.passed("reads as text", value=sum(map(len, said.said.values())))


def garbage(said: Reply, limits: Text, *, asked: Collection[str] = (), prompt: str = "") -> tuple[str, str] | None:
    """Where a reply is garbage and why; none if it is not.

    `asked`: the places where repetition was asked for. `prompt`: all that was asked; what repeats there may repeat in
    the reply.
    """
    cut = said.finish == "length"
    for place, part in texts(said).items():
        found = measure(part, limits, cut=cut, repeats=place in asked)
        if found.repeat is not None and _stands_in(prompt, found.repeat.unit, limits):
            found = measure(part, limits, cut=cut, repeats=True)
        if (complaint := complain(found, limits)) is not None:
            return place, f"the {place} is garbage: {complaint}"
    seen = sum(
        len("".join(part.split())) for part in (*said.said.values(), *(call.arguments for call in said.tool_calls))
    )
    if not asked and (complaint := complain_of_tokens(said.tokens, seen, limits)) is not None:
        unseen = "" if said.said or said.tool_calls else ", and no text"
        return "tokens", f"the tokens are garbage: {complaint}{unseen}"
    if not any(part.strip() for part in said.said.values()) and not said.tool_calls:
        tokens = f" for {said.completion_tokens} tokens" if said.completion_tokens else ""
        return "content", f"not one character{tokens}, finish reason {said.finish}"
    return None


def _asked(said: Reply, evidence: Evidence) -> frozenset[str]:
    """The places of a reply where repetition was asked for."""
    question = evidence.question
    if question is None:
        return frozenset()
    if question.repeats:
        return frozenset(texts(said))
    return frozenset({"content"}) if question.is_known(said.content) else frozenset()


def texts(said: Reply) -> Mapping[str, str]:
    """Every text of a reply by its place; of a tool call each text inside its arguments, and what is around them.

    Arguments that are no JSON are one text.
    """
    found = {place: part for place, part in said.said.items() if part.strip()}
    for number, call in enumerate(said.tool_calls, 1):
        place = "arguments of the tool call" if len(said.tool_calls) == 1 else f"arguments of tool call {number}"
        if not call.arguments.strip():
            continue
        try:
            value = json.loads(call.arguments)
        except (ValueError, RecursionError):
            found[place] = call.arguments
            continue
        found[place] = _structure(call.arguments)
        found |= {f"{place}, {key}": part for key, part in _inside(value)}
    return found


def _structure(arguments: str) -> str:
    """JSON with a number for each different text: the texts are looked at by themselves, their escapes undone."""
    known: dict[str, int] = {}
    return _STRING.sub(lambda match: f'"{known.setdefault(match[0], len(known))}"', arguments)


def _inside(value: Any) -> Iterator[tuple[str, str]]:
    """Texts below a JSON value, by their place in it; an escaped control character shows only here."""
    waiting = [("", value)]
    while waiting:
        place, here = waiting.pop()
        if isinstance(here, dict):
            waiting += [(f"{place}.{name}", item) for name, item in here.items()]
        elif isinstance(here, list) and all(isinstance(item, str) for item in here):
            # Lines of one text, more often than not.
            waiting.append((place, "\n".join(here)))
        elif isinstance(here, list):
            waiting += [(f"{place}[{number}]", item) for number, item in enumerate(here)]
        elif isinstance(here, str) and here.strip():
            yield place, here


def _stands_in(prompt: str, unit: str, limits: Text) -> bool:
    """Whether the prompt repeats this unit itself, long enough to be no accident: a few `----` stand in many prompts."""
    said = "".join(unit.split())
    times = max(limits.repeat_times.value, limits.repeat_length.value / max(1, len(said)))
    return bool(said) and said * math.ceil(times) in "".join(prompt.split())


__all__ = ["LEAK", "Measures", "asked_text", "complain", "complain_of_tokens", "garbage", "measure", "text", "texts"]
