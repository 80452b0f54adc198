"""Judging what the numeric test measured: pure, from the document and the policy."""

from __future__ import annotations

import math
from collections.abc import Sequence

from forge_validate.checks import CheckResult
from forge_validate.numeric.document import Document, Measured
from forge_validate.policy import Kernel, Numeric


def judge(found: Document, demand: Numeric) -> tuple[CheckResult, ...]:
    """One result, `numeric/<kernel>`, for each kernel of the demand: the worst of its cases."""
    if found.gpu is None or found.device != "cuda":
        return unmeasured(demand, found.absent or "it did not run on a GPU")
    return tuple(_judge(k, [c for c in found.cases if c.kernel == k]) for k in dict.fromkeys(demand.kernels))


def unmeasured(demand: Numeric, why: str) -> tuple[CheckResult, ...]:
    """The results where nothing was measured."""
    return tuple(_result(kernel, "unmeasured", why) for kernel in dict.fromkeys(demand.kernels))


def _judge(kernel: Kernel, cases: Sequence[Measured]) -> CheckResult:
    if not cases:
        return _result(kernel, "unmeasured", "the test has no case of it")
    if wrong := [case for case in cases if _outcome(case) == "failed"]:
        worst = max(wrong, key=_excess)
        return _result(kernel, "failed", f"{len(wrong)} of {len(cases)} cases: {_told(worst)}", worst.value)
    if silent := [case for case in cases if _outcome(case) == "unmeasured"]:
        return _result(kernel, "unmeasured", f"{len(silent)} of {len(cases)} cases: {_told(silent[0])}")
    worst = max(cases, key=_excess)
    took = sum(case.seconds for case in cases)
    return _result(kernel, "passed", f"{len(cases)} cases in {took:.1f} s; the worst: {_told(worst)}", worst.value)


def _outcome(case: Measured) -> str:
    """From the numbers alone, except where there is none: an output that is not finite has failed without one."""
    if case.value is None:
        return "failed" if case.outcome == "failed" else "unmeasured"
    return "passed" if case.value <= case.bound else "failed"


def _excess(case: Measured) -> float:
    """How bad a case is, comparable between metrics."""
    if case.value is None or math.isnan(case.value):
        return math.inf
    return case.value / case.bound if case.bound else case.value


def _told(case: Measured) -> str:
    if case.value is None:
        return f"{case.case}: {case.reason or 'no number, and no reason given'}"
    return f"{case.case}: {case.metric}: {case.value:.4g}, bound {case.bound:g}"


def _result(kernel: Kernel, outcome: str, explanation: str, value: float | None = None) -> CheckResult:
    return CheckResult.model_validate(
        {"check": f"numeric/{kernel}", "outcome": outcome, "value": value, "explanation": explanation}
    )
