"""The receipt for people: verdict, cause and next step first, then everything it rests on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from forge_core.console import Console, duration
from forge_validate.checks import CheckResult
from forge_validate.checks.result import quoted
from forge_validate.promote import Promotion
from forge_validate.receipt import Receipt

_MARKS = {"passed": "ok", "warned": "warn", "failed": "FAIL", "unmeasured": "none"}
_STYLES = {"passed": "", "warned": "yellow", "failed": "red", "unmeasured": "red"}


def show(console: Console, receipt: Receipt, promotion: Promotion | None, note: str | None) -> None:
    """Print the summary on stderr; `note` says why nothing was promoted."""
    passed = receipt.verdict.outcome == "passed"
    for number, line in enumerate(lines(receipt, promotion, note)):
        console.say(line, "bold green" if passed and number == 1 else "bold red" if number == 1 else "")
        if line.startswith("checks"):
            for result in receipt.results:
                console.say(f"  {_MARKS[result.outcome]:<4}  {_row(result)}", _STYLES[result.outcome])


def _row(result: CheckResult) -> str:
    said = f" - {quoted(result.answer, 72)}" if result.answer else ""
    return f"{result.check:<32}  {result.explanation}{said}"


def lines(receipt: Receipt, promotion: Promotion | None, note: str | None) -> Iterator[str]:
    """The summary, line by line, without the rows of the checks."""
    subject, times = receipt.subject, receipt.timings
    yield ""
    yield f"verdict    {receipt.verdict.outcome}"
    yield f"cause      {receipt.verdict.cause}"
    yield f"next step  {receipt.verdict.next_step if promotion is None else 'none: the release tag has moved'}"
    yield f"checks     {_counts(receipt)}"
    yield f"image      {subject.image}"
    yield f"model      {subject.model}, revision {subject.model_revision[:16]}"
    for deviation in receipt.deviations:
        yield f"deviation  {deviation.kind}: {deviation.subject}: {deviation.detail}"
    phases = ", ".join(f"{name} {duration(seconds)}" for name, seconds in times.phases.items())
    pull, boot, probe = duration(times.pull), duration(times.boot), duration(times.probe)
    yield f"times      pull {pull}, boot {boot} ({phases}), probe {probe}"
    if promotion is not None:
        before = promotion.previous or "none"
        if promotion.previous == subject.image.digest:
            before = "the same digest"
        yield f"promoted   {promotion.reference} -> {subject.image.digest}"
        yield f"before     {before}"
    else:
        yield f"promoted   nothing: {note or 'no tag moves without a pass'}"


def _counts(receipt: Receipt) -> str:
    counts = Counter(result.outcome for result in receipt.results)
    return ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "none"
