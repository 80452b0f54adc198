"""The suites of the package: what they ask, what they cost, what they are called when they fail."""

from __future__ import annotations

import json

import pytest

from forge_validate import catalogue, policy, suite
from forge_validate.__main__ import main
from forge_validate.checks import CheckResult
from forge_validate.diagnose import diagnose
from forge_validate.judge import Bench
from forge_validate.verdict import decide


def test_every_suite_is_whole_and_within_its_budget(capsys: pytest.CaptureFixture[str]) -> None:
    found = {one.suite: one for one in catalogue.listed()}
    assert found.keys() >= {"smoke", "quick", "standard", "soak", "cpu-standard"}
    # Ten minutes at 1,500 tokens a second; the quick one has a minute, and most of its tokens are prompts of one-token answers.
    assert found["standard"].tokens <= 900_000
    assert found["quick"].tokens <= 130_000
    for name in found:
        cases, answers = suite.load(name, "SmolLM2-135M-Instruct")
        Bench(cases, answers, policy.load("rehearsal"), "m")
    assert main(["suites", "--json"]) == 0
    assert {one["suite"] for one in json.loads(capsys.readouterr().out)} == found.keys()


@pytest.mark.parametrize(
    ("results", "kind"),
    [
        ({"cache/branch-64": "failed", "batch/size-3": "failed"}, "cache"),
        ({"batch/size-3": "failed", "known-answer/known": "failed"}, "batch"),
        ({"context/chunk+1": "failed", "poison/after-load": "failed"}, "context"),
        ({"poison/after-load": "failed", "hang/burst": "failed"}, "poison"),
        ({"hang/drain": "failed", "leak/kv-pool": "failed"}, "hang"),
        ({"leak/memory": "failed"}, "leak"),
        ({"golden/kl/64": "failed", "cache/warm": "failed"}, "golden"),
        ({"golden/subject": "failed", "golden/kl/64": "unmeasured"}, "wrong-golden"),
        ({"cache/warm": "unmeasured"}, "not-exercised"),
        ({"cache/warm": "unmeasured", "logprobs/finite": "unmeasured"}, "no-answer"),
        ({"logprobs/finite": "failed", "batch/size-3": "failed"}, "numbers"),
    ],
)
def test_the_kind_of_wrong_of_families(results: dict[str, str], kind: str) -> None:
    made = [CheckResult.model_validate({"check": c, "outcome": o, "explanation": "why"}) for c, o in results.items()]
    found = diagnose(made)
    assert found is not None and found.kind == kind
    verdict = decide(made, policy.load("rehearsal"))
    if kind in ("cache", "batch"):
        assert f"exchanges/{kind}__*.json" in verdict.next_step
