"""Judging: pure, no server. Recorded exchanges go the same way as live ones."""

from __future__ import annotations

from collections.abc import Iterable

from forge_core.errors import UsageError
from forge_validate.checks import CHECKS, CheckResult, Evidence
from forge_validate.exchange import Exchange
from forge_validate.policy import Policy
from forge_validate.suite import Answers, Suite


def demand_known_checks(suite: Suite) -> None:
    """Raise UsageError for a check that no code stands behind."""
    unknown = tuple(f"{case.name}: {name}" for case in suite.cases for name in case.checks if name not in CHECKS)
    if unknown:
        raise UsageError(
            f"suites/{suite.suite}.yaml names unknown checks",
            details=unknown,
            hint=f"there are: {', '.join(sorted(CHECKS))}",
        )


def judge(
    suite: Suite, exchanges: Iterable[Exchange], answers: Answers, policy: Policy, served: str
) -> tuple[CheckResult, ...]:
    """Judge every check of every case; a case without a response is unmeasured, never passed."""
    demand_known_checks(suite)
    recorded = {exchange.name: exchange for exchange in exchanges}
    results = []
    for case in suite.cases:
        for name in case.checks:
            label = f"{case.name}/{name}"
            exchange = recorded.get(case.name)
            if exchange is None or exchange.error is not None:
                why = "was not asked" if exchange is None else exchange.error
                results.append(CheckResult(check=label, outcome="unmeasured", explanation=str(why)))
                continue
            question = answers.questions.get(case.question) if case.question else None
            evidence = Evidence(label, case, exchange, question, served, policy, recorded)
            results.append(CHECKS[name](evidence))
    return tuple(results)
