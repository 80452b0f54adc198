"""What a check sees and what it says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from forge_core.model import Frozen
from forge_validate.exchange import Exchange
from forge_validate.policy import Policy
from forge_validate.reply import NotAReply
from forge_validate.suite import Case, Question

Outcome = Literal["passed", "warned", "failed", "unmeasured"]

NO_REPLY = "no reply"
"""Value of a result that had no reply to judge."""


class CheckResult(Frozen):
    """One judgement: the outcome, the number or word it rests on, the model's answer, and why."""

    check: str
    """`case/check`."""
    outcome: Outcome
    value: str | float | None = None
    answer: str | None = None
    """What the model said, shortened, invisible characters escaped."""
    explanation: str
    lacks: str | None = None
    """What the server does not offer and the check needs: then it is unmeasured."""
    excused: str | None = None
    """Why a check that is unmeasured does not count: the policy's bootstrap rule holds for this subject."""
    reproduce: str | None = None
    """One line of shell that shows it, as small as it could be made; `$URL` and `$KEY` are the server's."""


@dataclass(frozen=True)
class Evidence:
    """All that one check may look at."""

    check: str
    """`case/check`."""
    case: Case
    exchange: Exchange
    question: Question | None
    served: str
    """The name the server was told to serve under."""
    policy: Policy
    flags: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """What the serving wants the server to run with."""
    others: Mapping[str, Exchange] = field(default_factory=dict)
    """The exchanges of all cases, by case."""

    @property
    def budget(self) -> object:
        """The token budget that was really sent."""
        body = self.exchange.request.body
        return body.get("max_tokens") if isinstance(body, dict) else None

    def passed(self, explanation: str, *, value: str | float | None = None, answer: str | None = None) -> CheckResult:
        """A pass."""
        return self._result("passed", explanation, value, answer)

    def failed(self, explanation: str, *, value: str | float | None = None, answer: str | None = None) -> CheckResult:
        """A fail."""
        return self._result("failed", explanation, value, answer)

    def no_reply(self, error: NotAReply) -> CheckResult:
        """A fail for want of a reply: an HTTP error, a stream that broke off."""
        return self._result("failed", str(error), NO_REPLY, None)

    def unmeasured(self, explanation: str) -> CheckResult:
        """No result: the case was not asked, timed out or crashed."""
        return self._result("unmeasured", explanation, None, None)

    def _result(self, outcome: Outcome, explanation: str, value: str | float | None, answer: str | None) -> CheckResult:
        return CheckResult(
            check=self.check,
            outcome=outcome,
            value=value,
            answer=None if answer is None else shown(answer),
            explanation=explanation,
        )


def quoted(text: str, limit: int = 200) -> str:
    """A text for people between quotes, as `shown` has it."""
    return f"'{shown(text, limit)}'"


def shown(text: str, limit: int = 200) -> str:
    """A text for people: shortened, line ends and whatever cannot be seen escaped."""
    cut = text if len(text) <= limit else text[:limit] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
