"""The verdict: from results and a policy, and from nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal

from forge_core.model import Deviation, Frozen
from forge_validate.checks import CheckResult
from forge_validate.checks.result import quoted
from forge_validate.policy import Policy


class Verdict(Frozen):
    """Whether the subject may be released, and why not."""

    outcome: Literal["passed", "failed"]
    cause: str
    next_step: str
    failing: tuple[str, ...]
    """Required checks without a pass."""


def decide(results: Sequence[CheckResult], policy: Policy) -> Verdict:
    """A pass demands that every required check passed (or warned); no results at all is no pass."""
    failing = [r for r in results if policy.requires(r.check) and r.outcome not in ("passed", "warned")]
    if not results:
        return Verdict(outcome="failed", cause="nothing was judged", next_step="look at the boot's log", failing=())
    if not failing:
        count = sum(policy.requires(r.check) for r in results)
        return Verdict(
            outcome="passed", cause=f"{count} required checks passed", next_step="promote the image", failing=()
        )
    # What was answered wrongly tells more than what could not be asked after it.
    worst = next((r for r in failing if r.outcome == "failed"), failing[0])
    answer = f", it said {quoted(worst.answer, 48)}" if worst.answer else ""
    more = f" ({len(failing) - 1} more)" if len(failing) > 1 else ""
    return Verdict(
        outcome="failed",
        cause=f"{worst.check}: {worst.explanation}{answer}{more}",
        next_step=_next_step(worst),
        failing=tuple(r.check for r in failing),
    )


def unaccepted(deviations: Sequence[Deviation], policy: Policy) -> tuple[Deviation, ...]:
    """The deviations that the policy does not name: promotion refuses them."""
    return tuple(
        d for d in deviations if not any(d.kind == w.kind and fnmatchcase(d.subject, w.subject) for w in policy.accepts)
    )


def _next_step(worst: CheckResult) -> str:
    case, _, check = worst.check.partition("/")
    if worst.outcome == "unmeasured":
        return "read the end of the server's log: the server gave no answer"
    if check in ("text", "finite"):
        return "suspect kernels or weights: try another backend in the serving, compare the model's sha256"
    if check in ("known", "thinking"):
        return f"read exchanges/{case}.json: tokenizer, chat template, parser or weights differ from what was seen"
    return f"read exchanges/{case}.json"
