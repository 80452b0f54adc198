"""Logprobs are present and finite. NaN arrives as null, not as an error."""

from __future__ import annotations

import math

from forge_validate import reply
from forge_validate.checks.result import CheckResult, Evidence


def finite(evidence: Evidence) -> CheckResult:
    """Every token has a logprob that is a number no greater than 0."""
    try:
        said = reply.read(evidence.exchange)
    except reply.NotAReply as error:
        # Some servers fail with 500 `Out of range float values are not JSON compliant: nan` instead.
        return evidence.failed(str(error))
    if not said.logprobs:
        return evidence.failed("logprobs were asked for and none came")
    wrong = [value for value in said.logprobs if value is None or not math.isfinite(value) or value > 1e-6]
    if wrong:
        what = "null (NaN)" if wrong[0] is None else str(wrong[0])
        return evidence.failed(
            f"{len(wrong)} of {len(said.logprobs)} logprobs are no log of a probability, the first is {what}",
            value=len(wrong),
            answer=said.content,
        )
    lowest = min(value for value in said.logprobs if value is not None)
    return evidence.passed(f"{len(said.logprobs)} finite logprobs", value=lowest)
