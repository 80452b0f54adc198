"""The receipt for people: verdict, cause and next step first, then everything it rests on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from forge_core.console import Console, duration
from forge_validate.checks import CheckResult
from forge_validate.checks.result import quoted
from forge_validate.policy import Policy
from forge_validate.receipt import Receipt, Subject
from forge_validate.verdict import waived

if TYPE_CHECKING:
    # Promotion speaks to registries; judging a server at an address needs none.
    from forge_validate.promote import Promotion

_MARKS = {"passed": "ok", "warned": "warn", "failed": "FAIL", "unmeasured": "none"}
_STYLES = {"passed": "", "warned": "yellow", "failed": "red", "unmeasured": "red"}
_WEIGHTS = {"passed": 0, "warned": 2, "unmeasured": 3, "failed": 4}
# Of all that a server tells, what decided between right and wrong in the public record.
_BACKENDS = ("attention_backend", "moe_runner_backend", "fp4_gemm_runner_backend", "kv_cache_dtype", "log.kv-dtype")


def show(console: Console, receipt: Receipt, policy: Policy, promotion: Promotion | None, note: str | None) -> None:
    """Print the summary on stderr; `note` says why nothing was promoted."""
    passed = receipt.verdict.outcome == "passed"
    for number, line in enumerate(lines(receipt, policy, promotion, note)):
        console.say(line, "bold green" if passed and number == 1 else "bold red" if number == 1 else "")
        if line.startswith("checks"):
            show_results(console, receipt.results, policy)


def show_results(console: Console, results: Sequence[CheckResult], policy: Policy) -> None:
    """One line for each check."""
    for result in results:
        sign, style = mark(result, policy)
        console.say(f"  {sign:<4}  {result.check:<36}  {told(result)}", style)


def mark(result: CheckResult, policy: Policy) -> tuple[str, str]:
    """Word and style of an outcome; what the policy does not ask for, or waives, is no alarm."""
    if not policy.requires(result.check) and result.outcome in ("failed", "unmeasured"):
        return "opt", "dim"
    if waived([result], policy):
        return "skip", "yellow"
    return _MARKS[result.outcome], _STYLES[result.outcome]


def weight(result: CheckResult, policy: Policy) -> int:
    """Larger is worse."""
    alarming = policy.requires(result.check) and not waived([result], policy)
    return _WEIGHTS[result.outcome] if alarming else min(1, _WEIGHTS[result.outcome])


def told(result: CheckResult) -> str:
    """A result in one line: why, and what the model said."""
    return result.explanation + (f" - {quoted(result.answer, 72)}" if result.answer else "")


def lines(receipt: Receipt, policy: Policy, promotion: Promotion | None, note: str | None) -> Iterator[str]:
    """The summary, line by line, without the rows of the checks."""
    subject, times = receipt.subject, receipt.timings
    yield ""
    kind = f" ({receipt.verdict.kind})" if receipt.verdict.kind else ""
    yield f"verdict    {receipt.verdict.outcome}{kind}"
    yield f"cause      {receipt.verdict.cause}"
    yield f"next step  {receipt.verdict.next_step if promotion is None else 'none: the release tag has moved'}"
    yield f"checks     {counts(receipt.results, policy)}"
    if isinstance(subject, Subject):
        yield f"image      {subject.image}"
        yield f"model      {subject.model}, revision {subject.model_revision[:16]}"
    else:
        yield f"server     {subject.url} ({subject.software or 'it does not tell what it is'})"
        yield f"model      {subject.model}, as it is called there"
    backends = [f"{name} {receipt.resolved[name]}" for name in _BACKENDS if name in receipt.resolved]
    yield f"runs with  {', '.join(backends) or 'unknown: the server does not tell'}"
    for deviation in receipt.deviations:
        yield f"deviation  {deviation.kind}: {deviation.subject}: {deviation.detail}"
    phases = ", ".join(f"{name} {duration(seconds)}" for name, seconds in times.phases.items())
    pull, boot, probe = duration(times.pull), duration(times.boot), duration(times.probe)
    started = f"pull {pull}, boot {boot} ({phases}), " if isinstance(subject, Subject) else ""
    yield f"times      {started}probe {probe}"
    if promotion is not None:
        before = promotion.previous or "none"
        if promotion.previous == promotion.image.digest:
            before = "the same digest"
        yield f"promoted   {promotion.reference} -> {promotion.image.digest}"
        yield f"before     {before}"
    else:
        yield f"promoted   nothing: {note or 'no tag moves without a pass'}"


def counts(results: Sequence[CheckResult], policy: Policy) -> str:
    """How many of each outcome; what the policy does not ask for, or waives, is counted apart."""
    spared = {result.check for result in waived(results, policy)}
    found = Counter(
        "optional" if not policy.requires(one.check) else "waived" if one.check in spared else one.outcome
        for one in results
    )
    return ", ".join(f"{count} {outcome}" for outcome, count in found.items()) or "none"
