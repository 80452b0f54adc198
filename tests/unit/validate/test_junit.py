"""junit.xml: whatever a model says, it parses, and it is green exactly when the receipt is."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from junitparser import JUnitXml

from forge_core.model import Deviation, ImageRef
from forge_validate import junit
from forge_validate import receipt as receipts
from forge_validate.checks import CheckResult
from forge_validate.receipt import Receipt, Subject, Timings
from forge_validate.verdict import Verdict

from .conftest import DIGEST

OK = CheckResult(check="known-answer/known", outcome="passed", explanation="the known answer", answer="323")
WARNED = CheckResult(check="known-answer/slow", outcome="warned", explanation="slower than usual", value=2.5)
BAD = CheckResult(check="stream/text", outcome="failed", explanation="the content is garbage", value=16, answer="!!!!")
NONE = CheckResult(check="stream/same", outcome="unmeasured", explanation="no exchange")
PASSED = Verdict(outcome="passed", cause="2 required checks passed", next_step="promote the image", failing=())


def failed(*names: str) -> Verdict:
    cause, way_out = "stream/text: garbage", "suspect kernels"
    return Verdict(outcome="failed", kind="numbers", cause=cause, next_step=way_out, failing=names)


def make(*results: CheckResult, verdict: Verdict = PASSED, **changes: Any) -> Receipt:
    values: dict[str, Any] = {
        "profile": "rehearsal",
        "kind": "rehearsal",
        "finished": datetime(2026, 11, 30, tzinfo=UTC),
        "forge_version": "0.1.0",
        "target": "recorded",
        "record": "1" * 64,
        "subject": Subject(
            image=ImageRef(repository="127.0.0.1:1/x", digest=DIGEST),
            model="m",
            model_revision="2" * 64,
            serving="3" * 64,
            suite="4" * 64,
            answers="5" * 64,
            policy="6" * 64,
        ),
        "arguments": (),
        "resolved": {},
        "engine": "28",
        "deviations": (),
        "results": results,
        "verdict": verdict,
        "timings": Timings(pull=1, boot=2, probe=3.25, phases={}),
    }
    return Receipt(**(values | changes))


def parse(receipt: Receipt) -> ET.Element:
    """The document; fails where it is not what readers of JUnit XML rely on."""
    root = ET.fromstring(junit.render(receipt).encode("utf-8"))
    assert root.tag == "testsuites"
    (suite,) = root
    cases = suite.findall("testcase")
    assert [child.tag for child in suite] == ["properties"] + ["testcase"] * len(cases)
    seen = {tag: sum(len(c.findall(tag)) for c in cases) for tag in ("failure", "error", "skipped")}
    counts = {
        "tests": str(len(cases)),
        "failures": str(seen["failure"]),
        "errors": str(seen["error"]),
        "time": str(receipt.timings.probe),
    }
    assert root.attrib == {"name": "sm120-forge"} | counts
    assert suite.attrib == {"name": receipt.profile, "skipped": str(seen["skipped"])} | counts
    for case in cases:
        assert set(case.attrib) == {"name", "classname"}
        assert len(case) == 1 and case[0].tag in ("failure", "error", "skipped", "system-out")
    keys = [(case.get("classname"), case.get("name")) for case in cases]
    assert len(set(keys)) == len(keys)
    # The colour of the whole is the verdict.
    assert (not seen["failure"] + seen["error"]) == (receipt.verdict.outcome == "passed")
    return root


def case(root: ET.Element, name: str) -> ET.Element:
    found = root.find(f".//testcase[@name='{name}']")
    assert found is not None
    return found


def test_outcomes() -> None:
    root = parse(make(OK, WARNED, BAD, NONE, verdict=failed("stream/text", "stream/same")))
    assert case(root, "known-answer/known").get("classname") == "rehearsal.known-answer"
    assert case(root, "known-answer/known").findtext("system-out") == "passed\nthe known answer\nanswer: 323"
    assert case(root, "known-answer/slow").findtext("system-out") == "warned\nslower than usual\nvalue: 2.5"
    failure = case(root, "stream/text")[0]
    assert (failure.tag, failure.get("message"), failure.get("type")) == ("failure", "the content is garbage", "failed")
    assert failure.text == "the content is garbage\nvalue: 16\nanswer: !!!!"
    error = case(root, "stream/same")[0]
    assert (error.tag, error.get("message"), error.get("type")) == ("error", "no exchange", "unmeasured")
    verdict = case(root, "verdict")[0]
    assert (verdict.tag, verdict.get("message"), verdict.get("type")) == ("failure", "stream/text: garbage", "numbers")
    assert root.find(".//property[@name='kind of wrong'][@value='numbers']") is not None
    assert "next step: suspect kernels" in str(verdict.text) and DIGEST in str(verdict.text)


def test_a_check_that_is_not_required_is_skipped_and_says_what_it_found() -> None:
    root = parse(make(OK, BAD))
    skipped = case(root, "stream/text")[0]
    assert skipped.tag == "skipped"
    assert skipped.get("message") == "failed, not required by the policy: the content is garbage"
    assert "answer: !!!!" in str(skipped.text)


def test_a_required_check_without_a_result_is_an_error() -> None:
    root = parse(make(OK, verdict=failed("stream/text", "stream/text")))
    assert case(root, "stream/text")[0].tag == "error"


def test_no_results_are_no_success() -> None:
    verdict = Verdict(outcome="failed", cause="nothing was judged", next_step="look at the log", failing=())
    root = parse(make(verdict=verdict))
    assert root.get("failures") == "1"
    assert case(root, "verdict")[0].get("message") == "nothing was judged"


def test_properties_name_the_subject_and_the_verdict() -> None:
    done = make(OK, deviations=(Deviation(kind="base-moved", subject="libc6", detail="moved"),))
    found = {p.get("name"): p.get("value") for p in parse(done).iterfind(".//property")}
    assert found == {
        "verdict": "passed",
        "cause": "2 required checks passed",
        "next step": "promote the image",
        "profile": "rehearsal (rehearsal)",
        "target": "recorded",
        "image": f"127.0.0.1:1/x@{DIGEST}",
        "image digest": DIGEST,
        "model": "m",
        "model revision": "2" * 64,
        "serving sha256": "3" * 64,
        "suite sha256": "4" * 64,
        "answers sha256": "5" * 64,
        "policy sha256": "6" * 64,
        "receipt sha256": done.sha256,
        "build record sha256": "1" * 64,
        "finished": "2026-11-30T00:00:00+00:00",
        "deviation base-moved": "libc6: moved",
    }


def test_the_file_is_the_receipt_rendered_and_the_same_again(tmp_path: Path) -> None:
    done = make(OK, BAD, verdict=failed("stream/text"))
    receipts.save(done, tmp_path / receipts.FILE_NAME)
    junit.save(done, tmp_path / junit.FILE_NAME)
    written = (tmp_path / "junit.xml").read_text(encoding="utf-8")
    assert written == junit.render(receipts.load(tmp_path / receipts.FILE_NAME)) == junit.render(done)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["junit.xml", "results.json"]
    read = JUnitXml.fromstring(written.encode())
    assert [(len(list(suite)), suite.failures, suite.name) for suite in read] == [(3, 2, "rehearsal")]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x00", "\\x00"),
        ("\ufffe\uffff", "\\ufffe\\uffff"),
        ("\ud800", "\\ud800"),
        ("a\r\nb\tc", "a\\r\nb\tc"),
        ("\u202e", "\\u202e"),
        ("]]> <x a='1'> & \" é 漢 🙂", "]]> <x a='1'> & \" é 漢 🙂"),
    ],
)
def test_characters(text: str, shown: str) -> None:
    done = _said(text)
    failure = case(parse(done), "stream/text")[0]
    assert failure.get("message") == shown
    assert failure.text == f"{shown}\nanswer: {shown}"


@given(st.text(st.characters()))
def test_nothing_that_a_model_says_breaks_the_file(text: str) -> None:
    done = _said(text)
    failure = case(parse(done), "stream/text")[0]
    message = failure.get("message", "")
    assert failure.text == f"{message}\nanswer: {message}"
    # A text of printable characters comes back as it was.
    if text.isprintable():
        assert message == text
    assert junit.render(done) == junit.render(done)


def _said(text: str) -> Receipt:
    """A receipt with this text everywhere; not validated, since pydantic itself would refuse a lone surrogate."""
    bad = CheckResult.model_construct(check="stream/text", outcome="failed", explanation=text, answer=text, value=None)
    verdict = Verdict.model_construct(outcome="failed", kind=None, cause=text, next_step=text, failing=("stream/text",))
    return make().model_copy(update={"results": (bad,), "verdict": verdict})
