from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from forge_core.errors import IntegrityError, Refused, UsageError
from forge_core.model import Deviation, ImageRef
from forge_validate import receipt as receipts
from forge_validate import report
from forge_validate.checks import CheckResult
from forge_validate.pipeline import known_profile
from forge_validate.policy import Accepted, Optional, Policy
from forge_validate.promote import Promotion, demand_allowed, promote
from forge_validate.receipt import Receipt, Subject, Timings
from forge_validate.verdict import decide

from .conftest import DIGEST, moved_base

OK = CheckResult(check="a/known", outcome="passed", explanation="fine", answer="Paris")
BAD = CheckResult(check="a/text", outcome="failed", explanation="the content is garbage", answer="!!!!")


def make(rules: Policy, *results: CheckResult, **changes: Any) -> Receipt:
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
            policy=rules.content_sha256(),
        ),
        "arguments": ("--device", "cpu"),
        "resolved": {"attention_backend": "torch_native"},
        "engine": "28",
        "deviations": (),
        "results": results,
        "verdict": decide(results, rules),
        "timings": Timings(pull=1, boot=2, probe=3, phases={"start": 1.5}),
    }
    return Receipt(**(values | changes))


def test_a_receipt_is_sealed(rules: Policy, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    receipts.save(make(rules, OK), path)
    assert receipts.load(path) == make(rules, OK)
    data = json.loads(path.read_text())
    assert data["schema_version"] == 1
    data["verdict"]["outcome"] = "failed"
    path.write_text(json.dumps(data))
    with pytest.raises(IntegrityError):
        receipts.load(path)
    with pytest.raises(UsageError):
        receipts.load(tmp_path / "none.json")


def test_only_a_pass_is_promoted(rules: Policy, tmp_path: Path) -> None:
    # Nobody listens on the subject's registry: anything but the refusal would be another error.
    with pytest.raises(Refused, match="garbage"):
        promote(make(rules, OK, BAD), rules, log=tmp_path / "l", record=tmp_path / "promotion.json")
    with pytest.raises(Refused):
        promote(make(rules), rules, log=tmp_path / "l", record=tmp_path / "promotion.json")
    assert list(tmp_path.iterdir()) == []


def test_deviations(rules: Policy) -> None:
    demand_allowed(make(rules, OK, deviations=(moved_base(),)), rules)
    differs = Deviation(kind="model-differs", subject="m", detail="model.safetensors differs")
    with pytest.raises(Refused) as caught:
        demand_allowed(make(rules, OK, deviations=(moved_base(), differs)), rules)
    assert caught.value.details == ("model-differs: m: model.safetensors differs",)


def test_what_was_made_wrong_on_purpose_is_never_promoted(rules: Policy) -> None:
    fault = Deviation(kind="injected-fault", subject="nan-always", detail="layer")
    accepted = Accepted(kind="injected-fault", reason="only for this test")
    accepting = rules.model_copy(update={"accepts": (accepted,)})
    with pytest.raises(Refused, match="made wrong on purpose: nan-always"):
        demand_allowed(make(accepting, OK, deviations=(fault,)), accepting)


def test_a_rehearsal_reaches_a_loopback_registry_only(rules: Policy) -> None:
    anywhere = rules.model_copy(update={"promotion": rules.promotion.model_copy(update={"registries": "any"})})
    good = make(anywhere, OK)
    subject = good.subject.model_copy(update={"image": ImageRef(repository="registry.example/x", digest=DIGEST)})
    with pytest.raises(UsageError, match="loopback"):
        demand_allowed(good.model_copy(update={"subject": subject}), anywhere)
    demand_allowed(good.model_copy(update={"subject": subject, "kind": "production"}), anywhere)


def test_another_policy_than_the_judging_one_is_refused(rules: Policy) -> None:
    loose = rules.model_copy(update={"optional": (Optional(check="*", reason="only for this test"),)})
    with pytest.raises(UsageError, match="policy"):
        demand_allowed(make(rules, OK), loose)


def test_the_summary_begins_with_verdict_cause_and_next_step(rules: Policy) -> None:
    lines = list(report.lines(make(rules, OK, BAD), rules, None, None))
    assert [line.split()[0] for line in lines[1:4]] == ["verdict", "cause", "next"]
    assert "failed (garbage)" in lines[1] and "!!!!" in lines[2]
    assert lines[-1].startswith("promoted   nothing")


def test_the_summary_of_a_promotion_names_the_reference_and_what_it_replaced(rules: Policy) -> None:
    done = make(rules, OK)
    moved = Promotion(
        moved=done.finished,
        receipt=done.sha256,
        image=done.subject.image,
        candidate_tag="candidate",
        release_tag="release",
        previous="sha256:" + "9" * 64,
    )
    text = "\n".join(report.lines(done, rules, moved, None))
    assert f"127.0.0.1:1/x:release -> {DIGEST}" in text
    assert "sha256:" + "9" * 64 in text


def test_profiles() -> None:
    assert known_profile("rehearsal") == "rehearsal"
    for name in (None, "nope"):
        with pytest.raises(UsageError) as caught:
            known_profile(name)
        assert "rehearsal" in str(caught.value.hint)
