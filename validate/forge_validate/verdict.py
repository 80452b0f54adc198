"""The verdict: from results and a policy, and from nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal

from forge_core.model import Deviation, Frozen
from forge_validate.checks import CheckResult
from forge_validate.checks.result import quoted
from forge_validate.diagnose import Kind, diagnose
from forge_validate.families import FAMILIES
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
    waived: tuple[str, ...] = ()
    """Required checks that were not measured and that the policy waives."""


def decide(results: Sequence[CheckResult], policy: Policy) -> Verdict:
    """A pass demands that every required check passed (or warned), unless it is unmeasured and the policy waives it.

    No required result at all, or none that is not waived, is no pass.
    """
    spared = waived(results, policy)
    measured = sum(policy.requires(result.check) for result in results) - len(spared)
    names = tuple(result.check for result in spared)
    failing = lacking(results, policy)
    if not measured:
        next_step = "look at the server's log"
        return Verdict(outcome="failed", cause="nothing was judged", next_step=next_step, failing=(), waived=names)
    found = diagnose(failing)
    if found is None:
        more = f", {len(names)} not measured and waived" if names else ""
        return Verdict(
            outcome="passed",
            cause=f"{measured} required checks passed{more}",
            next_step="promote the image" if policy.promotion else "none: nothing is promoted under this policy",
            failing=(),
            waived=names,
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
        waived=names,
    )


def lacking(results: Sequence[CheckResult], policy: Policy) -> list[CheckResult]:
    """The required results without a pass, those that the policy waives left out."""
    spared = waived(results, policy)
    return [
        r for r in results if policy.requires(r.check) and r.outcome not in ("passed", "warned") and r not in spared
    ]


def waived(results: Sequence[CheckResult], policy: Policy) -> list[CheckResult]:
    """The required results that are unmeasured, never failed, and that the policy waives or excuses."""
    return [
        r
        for r in results
        if r.outcome == "unmeasured"
        and policy.requires(r.check)
        and (policy.waiver(r.check) is not None or _excused(r, policy))
    ]


def waivers(results: Sequence[CheckResult], policy: Policy) -> tuple[Deviation, ...]:
    """One deviation for each check that a verdict was spared, and one for all that the bootstrap rule excused."""
    spared = waived(results, policy)
    found = [
        Deviation(kind="waived-check", subject=r.check, detail=f"{r.explanation}; waived: {waiver.reason}")
        for r in spared
        if (waiver := policy.waiver(r.check)) is not None
    ]
    excused = [r for r in spared if policy.waiver(r.check) is None]
    if excused and policy.bootstrap is not None:
        detail = f"{len(excused)} golden checks not measured: {excused[0].excused}"
        found.append(Deviation(kind="bootstrap", subject=policy.bootstrap.image, detail=detail))
    return tuple(found)


def _excused(result: CheckResult, policy: Policy) -> bool:
    """Whether the policy's bootstrap rule spares this check."""
    return policy.bootstrap is not None and result.excused is not None and result.check.startswith("golden/")


def _evidence(check: str) -> str:
    case = check.partition("/")[0]
    if case == "numeric":
        return "numeric.json"
    return f"exchanges/{case}__*.json" if case in FAMILIES else f"exchanges/{case}.json"


def unaccepted(deviations: Sequence[Deviation], policy: Policy) -> tuple[Deviation, ...]:
    """The deviations that the policy does not name: promotion refuses them. A bootstrap rule names its own."""
    own = policy.bootstrap.image if policy.bootstrap is not None else None
    return tuple(
        d
        for d in deviations
        if not (d.kind == "bootstrap" and d.subject == own)
        and not any(d.kind == w.kind and fnmatchcase(d.subject, w.subject) for w in policy.accepts)
    )
