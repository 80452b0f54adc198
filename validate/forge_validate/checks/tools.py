"""Tool calls: the one known call arrives as a call, whole, and not as text."""

from __future__ import annotations

import json
from typing import Any

from forge_validate import reply
from forge_validate.checks.result import CheckResult, Evidence
from forge_validate.checks.tokens import tags


def tool_call(evidence: Evidence) -> CheckResult:
    """Exactly the known call: name, arguments by value, finish reason; no trace of it in the texts."""
    known = evidence.question.call if evidence.question else None
    if known is None:
        return evidence.unmeasured(f"no call in answer to {evidence.case.question!r} is known for this model")
    try:
        said = reply.read(evidence.exchange)
    except reply.NotAReply as error:
        return evidence.no_reply(error)
    for place, text in {**said.said, "arguments": "\n".join(call.arguments for call in said.tool_calls)}.items():
        if (tag := tags.tools(text)) is not None:
            return evidence.failed(f"{tag} is in the {place}: the tool parser does not know it", answer=text)
    if not said.tool_calls:
        if said.finish == "length":
            return evidence.failed(
                f"the token budget of {evidence.budget} ran out before there was a call", value=said.finish
            )
        return evidence.failed("no call", value=said.finish, answer=said.content or said.reasoning)
    if len(said.tool_calls) > 1:
        return evidence.failed(f"{len(said.tool_calls)} calls, not one", value=len(said.tool_calls))
    call = said.tool_calls[0]
    shown = f"{call.name}({call.arguments})"
    if said.finish == "length":
        return evidence.failed(
            f"the token budget of {evidence.budget} ran out in the middle of a call", value=said.finish, answer=shown
        )
    if call.name != known.name:
        return evidence.failed(f"a call of {call.name!r}, not {known.name!r}", value=call.name, answer=shown)
    given = parsed(call.arguments)
    if given is None:
        return evidence.failed("the arguments are no JSON object", value=call.name, answer=shown)
    if given != known.arguments:
        return evidence.failed(f"the arguments are not {json.dumps(known.arguments)}", value=call.name, answer=shown)
    if said.finish != "tool_calls":
        return evidence.failed(f"the finish reason is {said.finish!r}, not 'tool_calls'", value=said.finish)
    return evidence.passed("the known call", value=call.name, answer=shown)


def parsed(arguments: str) -> dict[str, Any] | None:
    """A call's arguments as JSON values; none when they are no JSON object."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
