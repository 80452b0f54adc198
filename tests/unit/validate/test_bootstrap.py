"""The bootstrap rule: one named subject without a golden file, once; never a check that failed, never another subject."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from forge_core import registry
from forge_core.errors import IntegrityError, Refused
from forge_core.model import Deviation, ImageRef
from forge_validate import bootstrap
from forge_validate.checks import CheckResult
from forge_validate.policy import Accepted, Bootstrap, Policy
from forge_validate.promote import demand_allowed
from forge_validate.receipt import Receipt
from forge_validate.verdict import decide, unaccepted, waivers

from .conftest import DIGEST
from .test_receipt import make

IMAGE = ImageRef(repository="127.0.0.1:1/x", digest=DIGEST)
OTHER = IMAGE.model_copy(update={"digest": "sha256:" + "b" * 64})
RULE = {
    "image": DIGEST,
    "model": "m",
    "reason": "the bf16 reference is larger than the machine",
    "approved_by": "release board, decision 4",
    "once": True,
}
OK = CheckResult(check="a/known", outcome="passed", explanation="fine")
EXCUSED = CheckResult(
    check="golden/kl/64",
    outcome="unmeasured",
    explanation="no golden file of m",
    lacks="golden",
    excused="why; approved",
)


@pytest.fixture
def ruled(rules: Policy) -> Policy:
    return rules.model_copy(update={"bootstrap": Bootstrap.model_validate(RULE)})


@pytest.fixture(autouse=True)
def tags(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What tags of the registry name; none at first."""
    found: dict[str, str] = {}
    monkeypatch.setattr(registry, "digest_of", lambda repository, tag: found.get(tag))
    return found


def done(ruled: Policy, *results: CheckResult, **changes: Any) -> Receipt:
    return make(ruled, *results, deviations=waivers(results, ruled), **changes)


def test_it_holds_for_its_subject_alone(ruled: Policy, rules: Policy, tmp_path: Path) -> None:
    assert bootstrap.holding(ruled, IMAGE, "m", golden=False, folder=tmp_path) == ruled.bootstrap
    assert bootstrap.holding(rules, IMAGE, "m", golden=False, folder=tmp_path) is None
    assert bootstrap.holding(ruled, OTHER, "m", golden=False, folder=tmp_path) is None
    assert bootstrap.holding(ruled, IMAGE, "n", golden=False, folder=tmp_path) is None


def test_it_is_over_with_a_golden_a_note_or_the_release_tag(
    ruled: Policy, tmp_path: Path, tags: dict[str, str]
) -> None:
    assert bootstrap.holding(ruled, IMAGE, "m", golden=True, folder=tmp_path) is None
    tags["release"] = OTHER.digest
    assert bootstrap.holding(ruled, IMAGE, "m", golden=False, folder=tmp_path) is not None
    tags["release"] = IMAGE.digest
    assert bootstrap.holding(ruled, IMAGE, "m", golden=False, folder=tmp_path) is None
    tags.clear()
    bootstrap.spend(done(ruled, OK, EXCUSED), ruled, tmp_path)
    assert bootstrap.holding(ruled, IMAGE, "m", golden=False, folder=tmp_path) is None
    # A second rule for another image of this model changes nothing: the promoted one is there to record a golden from.
    assert ruled.bootstrap is not None
    second = ruled.model_copy(update={"bootstrap": ruled.bootstrap.model_copy(update={"image": OTHER.digest})})
    assert bootstrap.holding(second, OTHER, "m", golden=False, folder=tmp_path) is None


def test_it_spares_what_lacks_a_golden_and_says_so(ruled: Policy, rules: Policy) -> None:
    verdict = decide([OK, EXCUSED], ruled)
    assert (verdict.outcome, verdict.waived) == ("passed", ("golden/kl/64",))
    (deviation,) = waivers([OK, EXCUSED, EXCUSED.model_copy(update={"check": "golden/top1/64"})], ruled)
    assert (deviation.kind, deviation.subject) == ("bootstrap", DIGEST)
    assert "2 golden checks" in deviation.detail and "approved" in deviation.detail
    # Without the rule in the policy the word of a result is worth nothing, and so it is for other checks.
    assert decide([OK, EXCUSED], rules).outcome == "failed" and waivers([OK, EXCUSED], rules) == ()
    assert decide([OK, EXCUSED.model_copy(update={"check": "batch/size-3"})], ruled).outcome == "failed"


def test_it_never_spares_a_failure(ruled: Policy) -> None:
    failed = EXCUSED.model_copy(update={"outcome": "failed"})
    assert decide([OK, failed], ruled).failing == ("golden/kl/64",)
    assert decide([EXCUSED], ruled).outcome == "failed"


def test_promotion_accepts_its_own_deviation_and_no_other(ruled: Policy) -> None:
    demand_allowed(done(ruled, OK, EXCUSED), ruled)
    foreign = Deviation(kind="bootstrap", subject=OTHER.digest, detail="x")
    assert unaccepted((foreign,), ruled) == (foreign,)
    without = ruled.model_copy(update={"bootstrap": None})
    deviations = waivers([OK, EXCUSED], ruled)
    assert unaccepted(deviations, without) == deviations
    accepted = Accepted(kind="bootstrap", reason="only for this test")
    assert unaccepted(deviations, without.model_copy(update={"accepts": (accepted,)})) == ()


def test_it_is_spent_by_one_promotion(ruled: Policy, tmp_path: Path) -> None:
    first = done(ruled, OK, EXCUSED)
    bootstrap.demand_unspent(first, ruled, tmp_path)
    bootstrap.spend(first, ruled, tmp_path)
    note = bootstrap.read(tmp_path)
    assert note is not None and (note.image, note.model, note.receipt) == (IMAGE, "m", first.sha256)
    # The same receipt again is the same promotion.
    bootstrap.demand_unspent(first, ruled, tmp_path)
    with pytest.raises(Refused, match="was spent"):
        bootstrap.demand_unspent(done(ruled, OK, EXCUSED, forge_version="0.2.0"), ruled, tmp_path)


def test_a_receipt_that_did_not_need_it_neither_asks_nor_spends(ruled: Policy, tmp_path: Path) -> None:
    plain = done(ruled, OK)
    bootstrap.demand_unspent(plain, ruled, tmp_path)
    bootstrap.spend(plain, ruled, tmp_path)
    assert bootstrap.read(tmp_path) is None


def test_a_receipt_of_another_subject_is_refused(ruled: Policy, tmp_path: Path) -> None:
    receipt = done(ruled, OK, EXCUSED)
    moved = receipt.model_copy(update={"subject": receipt.subject.model_copy(update={"image": OTHER})})
    with pytest.raises(Refused, match="another image or model"):
        bootstrap.demand_unspent(moved, ruled, tmp_path)


def test_a_note_that_cannot_be_read_is_no_permission(ruled: Policy, tmp_path: Path) -> None:
    (tmp_path / bootstrap.FILE_NAME).write_text("{}")
    with pytest.raises(IntegrityError):
        bootstrap.holding(ruled, IMAGE, "m", golden=False, folder=tmp_path)


@pytest.mark.parametrize("changes", [{"once": False}, {"reason": "short"}, {"image": "latest"}, {"approved_by": ""}])
def test_a_rule_must_be_written_out(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Bootstrap.model_validate(RULE | changes)
