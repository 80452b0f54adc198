from __future__ import annotations

import pytest

from forge_core.errors import UsageError
from forge_validate import exchange
from forge_validate.exchange import Exchange, Request
from forge_validate.judge import demand_known_checks, judge
from forge_validate.policy import Policy, Waived
from forge_validate.suite import Answers, Suite
from forge_validate.verdict import decide, unaccepted

from .conftest import WIRE, chat, moved_base

SERVED = "smollm2"


def replay(server: str, smoke: tuple[Suite, Answers]) -> list[Exchange]:
    """The smoke suite as the recorded server answered it."""
    import json

    def chat_sample(name: str, case: str) -> Exchange:
        found = exchange.load(WIRE / server / f"{name}.json")
        return found.model_copy(update={"name": case})

    def body(name: str, case: str) -> Exchange:
        value = json.loads((WIRE / "sglang-0.5.23" / f"{name}.json").read_text())
        request = Request(method="GET", path="/")
        return Exchange(name=case, request=request, status=200, seconds=0, response=value)

    completion = chat("x", name="completion").model_copy(
        update={"response": {"choices": [{"text": " Paris.\n\nThe city", "finish_reason": "length"}]}}
    )
    nothink = "chat_plain_nothink" if server.startswith("sglang") else "chat_logprobs"
    return [
        body("v1_models", "models"),
        body("model_info", "model-info"),
        completion,
        chat_sample(nothink, "known-answer"),
        chat_sample("chat_think_fewshot", "known-answer-thinking"),
        chat_sample("chat_logprobs", "logprobs"),
        chat_sample("chat_stream" if server.startswith("sglang") else nothink, "streamed"),
    ]


@pytest.mark.parametrize("server", ["sglang-0.5.23", "vllm-0.32.0"])
def test_what_real_servers_said_passes(server: str, smoke: tuple[Suite, Answers], rules: Policy) -> None:
    results = judge(smoke[0], replay(server, smoke), smoke[1], rules, SERVED)
    assert {r.check: r.outcome for r in results if r.outcome != "passed"} == {}
    assert decide(results, rules).outcome == "passed"


def test_a_case_that_was_not_asked_or_timed_out_fails_the_verdict(smoke: tuple[Suite, Answers], rules: Policy) -> None:
    exchanges = replay("sglang-0.5.23", smoke)
    missing = judge(smoke[0], exchanges[:-1], smoke[1], rules, SERVED)
    assert {r.check for r in missing if r.outcome == "unmeasured"} == {"streamed/text", "streamed/same"}
    assert decide(missing, rules).outcome == "failed"
    exchanges[-1] = exchanges[-1].model_copy(update={"error": "no complete response within 120 s", "status": None})
    late = decide(judge(smoke[0], exchanges, smoke[1], rules, SERVED), rules)
    assert late.outcome == "failed" and "within 120 s" in late.cause
    assert late.failing == ("streamed/text", "streamed/same")


def test_the_cause_is_what_was_said_wrongly_not_what_was_not_asked(smoke: tuple[Suite, Answers], rules: Policy) -> None:
    exchanges = replay("sglang-0.5.23", smoke)[1:]
    exchanges[2] = chat("!!!!!!!!", name="known-answer")
    verdict = decide(judge(smoke[0], exchanges, smoke[1], rules, SERVED), rules)
    assert verdict.outcome == "failed"
    assert verdict.cause.startswith("known-answer/text: the content is garbage")
    assert "!!!!" in verdict.cause
    assert "models/served-model" in verdict.failing and "known-answer/known" in verdict.failing


def test_an_optional_check_does_not_decide(smoke: tuple[Suite, Answers], rules: Policy) -> None:
    exchanges = replay("sglang-0.5.23", smoke)[:-1]
    lenient = rules.model_copy(update={"optional": ("streamed/*",)})
    assert decide(judge(smoke[0], exchanges, smoke[1], lenient, SERVED), lenient).outcome == "passed"


def test_no_results_are_no_pass(rules: Policy) -> None:
    assert decide((), rules).outcome == "failed"


def test_an_unknown_check_is_refused(smoke: tuple[Suite, Answers]) -> None:
    case = smoke[0].cases[0].model_copy(update={"checks": ("guess",)})
    with pytest.raises(UsageError) as caught:
        demand_known_checks(smoke[0].model_copy(update={"cases": (case,)}))
    assert caught.value.details == ("models: guess",)


def test_deviations_must_be_named_by_the_policy(rules: Policy) -> None:
    assert unaccepted((moved_base(),), rules) == ()
    other = moved_base().model_copy(update={"kind": "model-differs"})
    assert unaccepted((moved_base(), other), rules) == (other,)
    narrow = rules.model_copy(update={"accepts": (Waived(kind="base-moved", subject="libc*", reason="x" * 15),)})
    assert unaccepted((moved_base("openssl"),), narrow) == (moved_base("openssl"),)
