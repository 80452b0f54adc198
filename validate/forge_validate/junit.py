"""The receipt for CI systems: JUnit XML, rendered from the receipt alone and never read back."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

from junitparser import Error, Failure, JUnitXml, Skipped, TestCase, TestSuite

from forge_core.files import write_text
from forge_validate.checks import CheckResult
from forge_validate.receipt import Receipt, Subject

FILE_NAME = "junit.xml"

# JUnit XML has no one schema; this shape is what the readers of it show best:
# - One testsuite for the validation: time and properties belong to a testsuite, and the receipt knows them once.
#   A testsuite for each case would need times that nobody measured.
# - The case is the classname: GitLab's column "Suite" and the groups of GitHub's reporters are made of it, and Jenkins
#   makes package and class of `profile.case`.
# - A testcase's name is the whole `case/check`: GitLab's merge request shows the name alone, and `text` says nothing.
# - The explanation stands in `message` (Jenkins) and in the body (GitLab shows nothing else).
# - A testcase has no time: a check is a judgement, not a wait.
# - The verdict is a testcase of its own, since GitLab and GitHub's reporters show no properties. So the file is green
#   exactly when the receipt is: a required check may have no result, and no results at all must not look like success.


def render(receipt: Receipt) -> str:
    """The receipt as JUnit XML, the same text for the same receipt.

    A failed check is a failure, an unmeasured one an error; one that the policy does not require is skipped, as an
    expected failure is elsewhere, with what it said. Passed and warned ones say in `system-out` what they rest on.
    """
    suite = TestSuite(_fit(receipt.profile))
    for name, value in _properties(receipt):
        suite.add_property(name, _fit(value))
    suite.add_testcases([_verdict(receipt), *(_check(receipt, r) for r in receipt.results), *_absent(receipt)])
    # After the testcases: adding them sums up their times, and they have none.
    suite.time = receipt.timings.probe
    whole = JUnitXml("sm120-forge")
    whole.add_testsuite(suite)
    # Not `skipped`: the schema that Jenkins' xUnit plugin enforces has none here.
    whole.tests, whole.failures, whole.errors, whole.time = suite.tests, suite.failures, suite.errors, suite.time
    # Through the standard library: where lxml is installed junitparser writes with it, and not the same bytes.
    written = io.BytesIO()
    whole.write(written)
    tree = ET.fromstring(written.getvalue())  # noqa: S314 - our own bytes
    ET.indent(tree)
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{ET.tostring(tree, encoding="unicode")}\n'


def save(receipt: Receipt, path: Path) -> None:
    """Write the JUnit XML of a receipt, atomically."""
    write_text(path, render(receipt))


def _properties(receipt: Receipt) -> Iterator[tuple[str, str]]:
    subject, verdict = receipt.subject, receipt.verdict
    yield "verdict", verdict.outcome
    if verdict.kind is not None:
        yield "kind of wrong", verdict.kind
    yield "cause", verdict.cause
    yield "next step", verdict.next_step
    yield "profile", f"{receipt.profile} ({receipt.kind})" if receipt.kind else receipt.profile
    yield "target", receipt.target
    yield "model", subject.model
    if isinstance(subject, Subject):
        yield "image", str(subject.image)
        yield "image digest", subject.image.digest
        yield "model revision", subject.model_revision
        yield "serving sha256", subject.serving
    else:
        yield "server", subject.url
        yield "software", subject.software or "unknown"
    yield "suite sha256", subject.suite
    yield "answers sha256", subject.answers
    yield "policy sha256", subject.policy
    if subject.golden is not None:
        yield "golden sha256", subject.golden
    yield "receipt sha256", receipt.sha256
    if receipt.record is not None:
        yield "build record sha256", receipt.record
    yield "finished", receipt.finished.isoformat()
    for deviation in receipt.deviations:
        yield f"deviation {deviation.kind}", f"{deviation.subject}: {deviation.detail}"


def _verdict(receipt: Receipt) -> TestCase:
    verdict = receipt.verdict
    lines = [verdict.cause, f"next step: {verdict.next_step}", f"{_what(receipt)}: {receipt.subject.name}"]
    lines += [f"without a pass: {name}" for name in verdict.failing]
    lines += [f"not measured, and waived: {name}" for name in verdict.waived]
    case = _testcase(receipt, "verdict")
    if verdict.outcome == "passed":
        case.system_out = _fit("\n".join(lines))
    else:
        _end(case, Failure(_fit(verdict.cause), verdict.kind or verdict.outcome), lines)
    return case


def _check(receipt: Receipt, result: CheckResult) -> TestCase:
    lines = [result.explanation]
    lines += [] if result.value is None else [f"value: {_plain(result.value)}"]
    lines += [] if result.answer is None else [f"answer: {result.answer}"]
    case = _testcase(receipt, result.check)
    if result.outcome in ("passed", "warned"):
        case.system_out = _fit("\n".join([result.outcome, *lines]))
    elif result.check not in receipt.verdict.failing:
        spared = "waived" if result.check in receipt.verdict.waived else "not required"
        message = f"{result.outcome}, {spared} by the policy: {result.explanation}"
        _end(case, Skipped(_fit(message), result.outcome), lines)
    elif result.outcome == "failed":
        _end(case, Failure(_fit(result.explanation), result.outcome), lines)
    else:
        _end(case, Error(_fit(result.explanation), result.outcome), lines)
    return case


def _absent(receipt: Receipt) -> Iterator[TestCase]:
    """The required checks that have no result at all."""
    for name in dict.fromkeys(receipt.verdict.failing):
        if all(result.check != name for result in receipt.results):
            case = _testcase(receipt, name)
            _end(case, Error("no result", "absent"), ["required by the policy, and there is no result"])
            yield case


def _what(receipt: Receipt) -> str:
    return "image" if isinstance(receipt.subject, Subject) else "server"


def _testcase(receipt: Receipt, name: str) -> TestCase:
    return TestCase(_fit(name), _fit(f"{receipt.profile}.{name.partition('/')[0]}"))


def _end(case: TestCase, result: Failure | Error | Skipped, lines: list[str]) -> None:
    result.text = _fit("\n".join(lines))
    case.result = result


def _plain(value: str | float) -> str:
    """A count is a float in a receipt; people read 16, not 16.0."""
    return value if isinstance(value, str) else f"{value:.15g}"


def _fit(text: str) -> str:
    r"""A text that any XML 1.0 parser takes and gives back: what cannot be printed is escaped as in `\x00`.

    That covers all that XML forbids (most control characters, lone surrogates, U+FFFE, U+FFFF), the carriage return,
    which a parser turns into a line feed, and the controls of writing direction, which would reorder a report.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
