"""Waivers: an unmeasured check may be spared, a failed one never; the verdict says so, and promotion knows."""

from __future__ import annotations

import pytest

from forge_core.errors import Refused
from forge_validate.checks import CheckResult
from forge_validate.diagnose import diagnose
from forge_validate.policy import Accepted, Policy, WaivedCheck
from forge_validate.promote import demand_allowed
from forge_validate.report import counts, lines, mark
from forge_validate.verdict import decide, waivers

from .test_receipt import make

OK = CheckResult(check="a/known", outcome="passed", explanation="fine")
NONE = CheckResult(check="logprobs/finite", outcome="unmeasured", explanation="none offered", lacks="logprobs")
LATE = CheckResult(check="tool-call/text", outcome="unmeasured", explanation="no complete response within 2 s")
BAD = CheckResult(check="logprobs/finite", outcome="failed", explanation="null")


@pytest.fixture
def waiving(rules: Policy) -> Policy:
    spared = WaivedCheck(check="logprobs/*", reason="this server has none")
    return rules.model_copy(update={"waived": (spared,)})


def test_without_a_waiver_unmeasured_fails_and_says_what_is_lacking(rules: Policy) -> None:
    verdict = decide([OK, NONE], rules)
    assert (verdict.outcome, verdict.kind, verdict.failing) == ("failed", "not-offered", ("logprobs/finite",))
    assert verdict.waived == () and "`waived`" in verdict.next_step


def test_silence_is_worse_than_what_is_not_offered() -> None:
    found = diagnose([NONE, LATE])
    assert found is not None and (found.kind, found.check) == ("no-answer", LATE.check)


def test_a_waived_check_does_not_fail_the_verdict_which_says_so(waiving: Policy) -> None:
    verdict = decide([OK, NONE], waiving)
    assert (verdict.outcome, verdict.failing, verdict.waived) == ("passed", (), ("logprobs/finite",))
    assert verdict.cause == "1 required checks passed, 1 not measured and waived"
    (deviation,) = waivers([OK, NONE], waiving)
    assert (deviation.kind, deviation.subject) == ("waived-check", "logprobs/finite")
    assert "none offered" in deviation.detail and "this server has none" in deviation.detail
    assert counts([OK, NONE], waiving) == "1 passed, 1 waived"
    assert mark(NONE, waiving) == ("skip", "yellow") and mark(BAD, waiving)[0] == "FAIL"


def test_a_failed_check_is_never_waived(waiving: Policy) -> None:
    verdict = decide([OK, BAD], waiving)
    assert (verdict.outcome, verdict.failing, verdict.waived) == ("failed", ("logprobs/finite",), ())
    assert waivers([OK, BAD], waiving) == ()


def test_other_checks_are_not_waived(waiving: Policy) -> None:
    verdict = decide([OK, NONE, LATE], waiving)
    assert (verdict.outcome, verdict.failing) == ("failed", ("tool-call/text",))
    assert verdict.waived == ("logprobs/finite",)


def test_waivers_alone_are_no_pass(waiving: Policy) -> None:
    assert decide([NONE], waiving).outcome == "failed"


def test_what_passed_or_is_optional_needs_no_waiver(waiving: Policy) -> None:
    passed = NONE.model_copy(update={"outcome": "passed"})
    assert decide([OK, passed], waiving).waived == () == waivers([OK, passed], waiving)
    optional = CheckResult(check="unknown-model/refused", outcome="unmeasured", explanation="x")
    both = waiving.model_copy(update={"waived": (WaivedCheck(check="*", reason="only for this test"),)})
    assert decide([OK, optional], both).waived == ()


def test_a_waived_verdict_is_promoted_only_where_the_policy_accepts_it(waiving: Policy) -> None:
    def done(policy: Policy, *results: CheckResult) -> None:
        demand_allowed(make(policy, *results, deviations=waivers(results, policy)), policy)

    done(waiving, OK)
    with pytest.raises(Refused) as caught:
        done(waiving, OK, NONE)
    assert "waived-check: logprobs/finite" in caught.value.details[0]
    accepted = Accepted(kind="waived-check", subject="logprobs/*", reason="the owner said so")
    willing = waiving.model_copy(update={"accepts": (*waiving.accepts, accepted)})
    done(willing, OK, NONE)
    other = willing.model_copy(update={"accepts": (accepted.model_copy(update={"subject": "tool-call/*"}),)})
    with pytest.raises(Refused):
        done(other, OK, NONE)


def test_without_tags_nothing_is_promoted(rules: Policy) -> None:
    tagless = rules.model_copy(update={"promotion": None})
    with pytest.raises(Refused, match="names no tags"):
        demand_allowed(make(tagless, OK), tagless)
    assert "nothing is promoted" in decide([OK], tagless).next_step


def test_what_has_no_record_is_not_promoted(rules: Policy) -> None:
    with pytest.raises(Refused, match="no build record"):
        demand_allowed(make(rules, OK, target="image", record=None, kind=None), rules)


def test_the_summary_names_the_waived_ones(waiving: Policy) -> None:
    done = make(waiving, OK, NONE, deviations=waivers([OK, NONE], waiving))
    text = "\n".join(lines(done, waiving, None, "--no-promote"))
    assert "1 passed, 1 waived" in text and "deviation  waived-check: logprobs/finite" in text
