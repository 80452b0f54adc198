"""Two ways of asking, one answer."""

from __future__ import annotations

from collections.abc import Mapping

from forge_validate import reply
from forge_validate.checks.result import CheckResult, Evidence, quoted
from forge_validate.checks.tools import parsed
from forge_validate.reply import Reply


def same(evidence: Evidence) -> CheckResult:
    """The reply equals that of the case named by `same_as`: content, reasoning, tool calls and finish reason."""
    other = evidence.others.get(evidence.case.same_as or "")
    if other is None or other.error is not None:
        return evidence.unmeasured(f"there is no reply of {evidence.case.same_as} to compare with")
    try:
        here, there = reply.read(evidence.exchange), reply.read(other)
    except reply.NotAReply as error:
        return evidence.no_reply(error)
    theirs = _compared(there)
    for name, mine in _compared(here).items():
        if mine != theirs[name]:
            return evidence.failed(
                f"{name} is {quoted(str(mine))} here and {quoted(str(theirs[name]))} in {evidence.case.same_as}",
                value=name,
                answer=here.content,
            )
    return evidence.passed(f"equal to {evidence.case.same_as}", answer=here.content.strip() or None)


def _compared(said: Reply) -> Mapping[str, object]:
    # White space around a call is nobody's text: SGLang 0.5.23 streams it and drops it when buffered.
    content = said.content.strip() if said.tool_calls else said.content
    calls = [(call.name, parsed(call.arguments) or call.arguments) for call in said.tool_calls]
    return {"content": content, "reasoning": said.reasoning, "tool calls": calls, "finish": said.finish}
