from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from forge_core.errors import UsageError
from forge_validate import exchange, serving
from forge_validate.checks import CheckResult
from forge_validate.diagnose import diagnose
from forge_validate.exchange import Exchange
from forge_validate.judge import Bench
from forge_validate.policy import Accepted, Optional, Policy
from forge_validate.suite import Answers, Suite
from forge_validate.verdict import decide, unaccepted

from .conftest import WIRE, chat, moved_base

SERVED = "smollm2"


def bench(smoke: tuple[Suite, Answers], rules: Policy, served: str = SERVED) -> Bench:
    return Bench(smoke[0], smoke[1], rules, served, serving.load("rehearsal").intended())


def recorded() -> dict[str, Exchange]:
    """The smoke suite as SGLang 0.5.23 with SmolLM2-135M answered it in a container of the rehearsal."""
    return {path.stem: exchange.load(path) for path in (WIRE.parent / "exchanges" / "smoke").glob("*.json")}


def replay(server: str) -> list[Exchange]:
    """The part of the smoke suite of which there are samples of both servers, as they answered it."""

    def sample(name: str, case: str) -> Exchange:
        return exchange.load(WIRE / server / f"{name}.json").model_copy(update={"name": case})

    sglang = server.startswith("sglang")
    return [
        sample("chat_plain_nothink" if sglang else "chat_logprobs", "known-answer"),
        sample("chat_think_fewshot", "known-answer-thinking"),
        sample("chat_logprobs", "logprobs"),
        sample("chat_stream" if sglang else "chat_logprobs", "streamed"),
    ]


def test_a_recorded_run_passes(smoke: tuple[Suite, Answers], rules: Policy) -> None:
    results = bench(smoke, rules, "SmolLM2-135M-Instruct").judge(recorded().values())
    assert {r.check: r.outcome for r in results if r.outcome != "passed"} == {"unknown-model/refused": "failed"}
    verdict = decide(results, rules)
    assert (verdict.outcome, verdict.kind, verdict.failing) == ("passed", None, ())


@pytest.mark.parametrize("server", ["sglang-0.5.23", "vllm-0.32.0"])
def test_what_real_servers_said_passes(server: str, smoke: tuple[Suite, Answers], rules: Policy) -> None:
    exchanges = {e.name: e for e in replay(server)}
    judged = bench(smoke, rules)
    results = [r for case in smoke[0].cases if case.name in exchanges for r in judged.judge_case(case, exchanges)]
    wrong = {r.check: r.explanation for r in results if r.outcome != "passed"}
    # Those samples were taken with a template of another length.
    assert {check for check in wrong} <= {"known-answer/prompt-tokens", "known-answer-thinking/prompt-tokens"}
    # vLLM's sample with logprobs stands for two other cases too; logprobs are judged wherever there are some.
    assert len(results) == (12 if server.startswith("sglang") else 14)


def test_a_case_that_was_not_asked_or_timed_out_fails_the_verdict(smoke: tuple[Suite, Answers], rules: Policy) -> None:
    judged, exchanges = bench(smoke, rules, "SmolLM2-135M-Instruct"), recorded()
    last = exchanges.pop("streamed")
    missing = judged.judge(exchanges.values())
    assert {r.check for r in missing if r.outcome == "unmeasured"} == {"streamed/text", "streamed/same"}
    assert decide(missing, rules).outcome == "failed"
    exchanges["streamed"] = last.model_copy(update={"error": "no complete response within 120 s", "status": None})
    late = decide(judged.judge(exchanges.values()), rules)
    assert (late.outcome, late.kind) == ("failed", "no-answer") and "within 120 s" in late.cause
    assert late.failing == ("streamed/text", "streamed/same")


def test_the_cause_is_what_was_said_wrongly_not_what_was_not_asked(smoke: tuple[Suite, Answers], rules: Policy) -> None:
    exchanges = recorded() | {"known-answer": chat("!!!!!!!!", name="known-answer", prompt=16)}
    del exchanges["models"]
    verdict = decide(bench(smoke, rules, "SmolLM2-135M-Instruct").judge(exchanges.values()), rules)
    assert (verdict.outcome, verdict.kind) == ("failed", "garbage")
    assert "known-answer/text: the content is garbage" in verdict.cause
    assert "!!!!" in verdict.cause
    assert "models/served-model" in verdict.failing and "known-answer/known" in verdict.failing


def changed(case: str, change: Callable[[Any], object]) -> dict[str, Exchange]:
    """The recorded run with one response changed."""
    exchanges = recorded()
    response = copy.deepcopy(exchanges[case].response)
    change(response)
    return exchanges | {case: exchanges[case].model_copy(update={"response": response})}


def message(response: Any) -> dict[str, Any]:
    found: dict[str, Any] = response["choices"][0]["message"]
    return found


CALL_AS_TEXT = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'


@pytest.mark.parametrize(
    ("case", "change", "kind", "check"),
    [
        ("models", lambda r: r["data"][0].update(id="other"), "wrong-server", "models/served-model"),
        (
            "server-info",
            lambda r: r["internal_states"][0].update(attention_backend="triton"),
            "wrong-server",
            "server-info/flags",
        ),
        ("server-info", lambda r: r["internal_states"][0].update(device="cuda"), "wrong-server", "server-info/flags"),
        (
            "server-info",
            lambda r: (r.pop("reasoning_parser"), r["internal_states"][0].pop("reasoning_parser")),
            "wrong-server",
            "server-info/flags",
        ),
        ("tokenize", lambda r: r["tokens"].reverse(), "tokenizer", "tokenize/token-ids"),
        ("known-answer", lambda r: r["usage"].update(prompt_tokens=20), "template", "known-answer/prompt-tokens"),
        (
            "logprobs",
            lambda r: r["choices"][0]["logprobs"]["content"][0].update(logprob=None),
            "numbers",
            "logprobs/finite",
        ),
        ("known-answer", lambda r: message(r).update(content="Berlin."), "parser", "streamed/same"),
        ("completion", lambda r: r["choices"][0].update(text=" Berlin"), "answers", "completion/known"),
        (
            "known-answer-thinking",
            lambda r: (message(r).update(content=""), r["choices"][0].update(finish_reason="length")),
            "budget",
            "known-answer-thinking/known",
        ),
        (
            "tool-call",
            lambda r: message(r).update(tool_calls=None, content=CALL_AS_TEXT),
            "parser",
            "tool-call/tool-call",
        ),
        ("tool-call", lambda r: message(r).update(tool_calls=None), "garbage", "tool-call/text"),
        (
            "tool-call",
            lambda r: message(r)["tool_calls"][0]["function"].update(arguments='{"city": "Rome"}'),
            "parser",
            "tool-call/tool-call",
        ),
    ],
)
def test_each_kind_of_wrong_is_named(
    case: str,
    change: Callable[[Any], object],
    kind: str,
    check: str,
    smoke: tuple[Suite, Answers],
    rules: Policy,
) -> None:
    results = bench(smoke, rules, "SmolLM2-135M-Instruct").judge(changed(case, change).values())
    verdict = decide(results, rules)
    assert verdict.kind == kind
    assert check in verdict.failing and f": {check}: " in verdict.cause


def test_logprobs_are_judged_wherever_there_are_some(smoke: tuple[Suite, Answers], rules: Policy) -> None:
    judged, exchanges = bench(smoke, rules, "SmolLM2-135M-Instruct"), recorded()
    case = next(case for case in smoke[0].cases if case.name == "known-answer")
    broken = chat("The capital of France is Paris.", logprobs=[-0.1, None])
    results = judged.judge_case(case, exchanges | {"known-answer": broken})
    assert {r.check: r.outcome for r in results}["known-answer/finite"] == "failed"
    assert decide(results, rules).kind == "numbers"
    # an error that speaks of NaN is one too, whatever was asked
    told = {"message": "Out of range float values are not JSON compliant: nan"}
    failed = broken.model_copy(update={"status": 500, "response": told})
    assert decide(judged.judge_case(case, exchanges | {"known-answer": failed}), rules).kind == "numbers"
    other = failed.model_copy(update={"response": {"message": "out of memory"}})
    assert decide(judged.judge_case(case, exchanges | {"known-answer": other}), rules).kind == "no-answer"


def test_numbers_explain_more_than_a_template(rules: Policy) -> None:
    def failed(check: str) -> CheckResult:
        return CheckResult(check=check, outcome="failed", explanation="x")

    found = diagnose([failed("a/known"), failed("b/prompt-tokens"), failed("c/finite")])
    assert found is not None and (found.kind, found.check) == ("numbers", "c/finite")
    assert diagnose([]) is None


def test_an_optional_check_does_not_decide(smoke: tuple[Suite, Answers], rules: Policy) -> None:
    exchanges = recorded()
    del exchanges["streamed"]
    some = (*rules.optional, Optional(check="streamed/*", reason="only for this test"))
    lenient = rules.model_copy(update={"optional": some})
    results = bench(smoke, lenient, "SmolLM2-135M-Instruct").judge(exchanges.values())
    assert decide(results, lenient).outcome == "passed"
    # with everything optional nothing was judged
    nothing = rules.model_copy(update={"optional": (Optional(check="*", reason="only for this test"),)})
    assert decide(results, nothing).outcome == "failed"


def test_no_results_are_no_pass(rules: Policy) -> None:
    assert decide((), rules).outcome == "failed"


def test_an_unknown_check_is_refused(smoke: tuple[Suite, Answers], rules: Policy) -> None:
    case = smoke[0].cases[0].model_copy(update={"checks": ("guess",)})
    with pytest.raises(UsageError) as caught:
        bench((smoke[0].model_copy(update={"cases": (case,)}), smoke[1]), rules)
    assert caught.value.details == ("models: guess",)


def test_deviations_must_be_named_by_the_policy(rules: Policy) -> None:
    assert unaccepted((moved_base(),), rules) == ()
    other = moved_base().model_copy(update={"kind": "model-differs"})
    assert unaccepted((moved_base(), other), rules) == (other,)
    narrow = rules.model_copy(update={"accepts": (Accepted(kind="base-moved", subject="libc*", reason="x" * 15),)})
    assert unaccepted((moved_base("openssl"),), narrow) == (moved_base("openssl"),)
