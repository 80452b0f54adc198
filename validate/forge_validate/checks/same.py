"""Two ways of asking, one answer."""

from __future__ import annotations

from forge_validate import reply
from forge_validate.checks.result import CheckResult, Evidence, quoted


def same(evidence: Evidence) -> CheckResult:
    """The reply equals that of the case named by `same_as`: content, reasoning, tool calls and finish reason."""
    other = evidence.others.get(evidence.case.same_as or "")
    if other is None or other.error is not None:
        return evidence.unmeasured(f"there is no reply of {evidence.case.same_as} to compare with")
    try:
        here, there = reply.read(evidence.exchange), reply.read(other)
    except reply.NotAReply as error:
        return evidence.failed(str(error))
    for name in ("content", "reasoning", "tool_calls", "finish"):
        mine, theirs = getattr(here, name), getattr(there, name)
        if mine != theirs:
            return evidence.failed(
                f"{name} is {quoted(str(mine))} here and {quoted(str(theirs))} in {evidence.case.same_as}",
                value=name,
                answer=here.content,
            )
    return evidence.passed(f"equal to {evidence.case.same_as}", answer=here.content.strip())
