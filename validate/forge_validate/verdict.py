"""The verdict: from results and a policy, and from nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal

from forge_core.model import Deviation, Frozen
from forge_validate.checks import CheckResult
from forge_validate.checks.result import quoted
from forge_validate.diagnose import Kind, diagnose
from forge_validate.policy import Policy


class Verdict(Frozen):
    """Whether the subject may be released, and why not."""

    outcome: Literal["passed", "failed"]
    kind: Kind | None = None
    """The kind of wrong; none for a pass, and when nothing was judged."""
    cause: str
    next_step: str
    failing: tuple[str, ...]
    """Required checks without a pass."""


def decide(results: Sequence[CheckResult], policy: Policy) -> Verdict:
    """A pass demands that every required check passed (or warned); no required result at all is no pass."""
    required = [result for result in results if policy.requires(result.check)]
    failing = lacking(results, policy)
    if not required:
        return Verdict(outcome="failed", cause="nothing was judged", next_step="look at the boot's log", failing=())
    found = diagnose(failing)
    if found is None:
        return Verdict(
            outcome="passed", cause=f"{len(required)} required checks passed", next_step="promote the image", failing=()
        )
    worst = next(result for result in failing if result.check == found.check)
    answer = f", it said {quoted(worst.answer, 48)}" if worst.answer else ""
    more = f" ({len(failing) - 1} more)" if len(failing) > 1 else ""
    return Verdict(
        outcome="failed",
        kind=found.kind,
        cause=f"{found.meaning}: {worst.check}: {worst.explanation}{answer}{more}",
        next_step=f"{found.next_step}; read {_evidence(worst.check)}",
        failing=tuple(result.check for result in failing),
    )


def lacking(results: Sequence[CheckResult], policy: Policy) -> list[CheckResult]:
    """The required results without a pass."""
    return [r for r in results if policy.requires(r.check) and r.outcome not in ("passed", "warned")]


def _evidence(check: str) -> str:
    case = check.partition("/")[0]
    return "numeric.json" if case == "numeric" else f"exchanges/{case}.json"


def unaccepted(deviations: Sequence[Deviation], policy: Policy) -> tuple[Deviation, ...]:
    """The deviations that the policy does not name: promotion refuses them."""
    return tuple(
        d for d in deviations if not any(d.kind == w.kind and fnmatchcase(d.subject, w.subject) for w in policy.accepts)
    )
