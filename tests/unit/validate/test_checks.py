from __future__ import annotations

import json
from typing import Any

import pytest

from forge_validate import exchange, reply
from forge_validate.checks import CHECKS, Evidence
from forge_validate.checks.result import CheckResult
from forge_validate.checks.tokens import complain, measure
from forge_validate.diagnose import diagnose
from forge_validate.exchange import Exchange, Request
from forge_validate.policy import Policy
from forge_validate.suite import Call, Case, Expected, Question, normalised

from .conftest import WIRE, chat

RECORDED_SMOKE = WIRE.parent / "exchanges" / "smoke"
PARIS = Question(
    messages=({"role": "user", "content": "?"},),
    content=Expected(exactly=("The capital of France is Paris.",)),
    reasoning=Expected(exactly=("The capital of France is Paris.",)),
)


def run(check: str, found: Exchange, rules: Policy, question: Question | None = PARIS, **case: Any) -> CheckResult:
    values: dict[str, Any] = {
        "name": "c", "endpoint": "chat", "question": "q", "max_tokens": 48, "timeout": 1, "checks": (check,),
    }  # fmt: skip
    others = case.pop("others", {})
    if case.get("endpoint", "chat") not in ("chat", "tokenize"):
        question, values["question"] = None, None
    evidence = Evidence(f"c/{check}", Case(**(values | case)), found, question, "smollm2", rules, others=others)
    return CHECKS[check](evidence)


GARBAGE = [
    "!!!!",
    "!!!!!!!!!!!!!!!!",
    "////",
    "????????",
    "! ! ! ! ! ! !",
    "........................",
    "should should should should",
    "The answer is!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!",
    "Par\ufffdis is the capital",
    "Paris\x00",
    "\x08\x08",
    "Pa\ue000ris",
    "<|endoftext|><|endoftext|>",
    "Paris<|im_end|>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab",
    "capital столица 首都 عاصمة hauptstadt",
    "abab" * 20,
    "the the the the the the",
    "\u200b" * 40 + "!!!!",
    "is is is is is is is is of is is is is is is",
]
TEXT = [
    "323",
    "The capital of France is Paris.",
    "No, no, no!",
    "www.example.org",
    "Wait... it is 42.",
    "東京は日本の首都です。",
    "Hello! I'm here to help with any kind of creative writing project. What can I help you with today?",
    "\n\nThe area is π·r², about 3 µm.",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13",
    "111",
    "ha ha ha",
    "Привет, the capital is Paris.",
    '```json\n{\n  "name": "Paris",\n  "population": 1\n}\n```',
    "Yes 👍 of course",
    "x" * 3,
    "    return x\n\n\n\n        return y",
    "a man, a plan, a canal, and a man again",
]


@pytest.mark.parametrize("said", GARBAGE)
@pytest.mark.parametrize("place", ["content", "reasoning"])
def test_garbage_fails_wherever_it_stands(said: str, place: str, rules: Policy) -> None:
    found = chat(said) if place == "content" else chat("The capital of France is Paris.", reasoning=said)
    result = run("text", found, rules)
    assert result.outcome == "failed", measure(said, rules.text)
    assert place in result.explanation
    assert result.answer


@pytest.mark.parametrize("said", TEXT)
def test_text_passes(said: str, rules: Policy) -> None:
    assert run("text", chat(said), rules).outcome == "passed", complain(measure(said, rules.text), rules.text)


def test_every_character_repeated_is_garbage(rules: Policy) -> None:
    for code in range(0x21, 0x7F):
        assert run("text", chat(chr(code) * 8), rules).outcome == "failed", chr(code)


@pytest.mark.parametrize("content", ["", None, "   \n"])
def test_nothing_at_all_fails(content: str | None, rules: Policy) -> None:
    result = run("text", chat(content, finish="length", tokens=48), rules)
    assert result.outcome == "failed"
    assert "48 tokens" in result.explanation


@pytest.mark.parametrize("content", ["The capital of France is Paris.", "\nThe capital  of France is Paris"])
def test_a_known_answer(content: str, rules: Policy) -> None:
    assert run("known", chat(content), rules).outcome == "passed"


@pytest.mark.parametrize(
    "content",
    [
        "The capital of France is Paris!!!!",
        "I said: The capital of France is Paris.",
        "Paris",
        "the capital of france is paris",
    ],
)
def test_an_answer_that_only_contains_the_known_one_fails(content: str, rules: Policy) -> None:
    result = run("known", chat(content), rules)
    assert result.outcome == "failed"
    assert result.answer == content


@pytest.mark.parametrize(
    ("content", "met"), [("323", True), ("323.", True), ("1323", False), ("323 or 324", False), ("3 2 3", False)]
)
def test_numbers_are_taken_whole(content: str, met: bool) -> None:
    assert Expected(pattern="323").met_by(content) is met


@pytest.mark.parametrize(("content", "field"), [("", "reasoning_content"), (None, "reasoning")])
def test_the_answer_may_lie_in_the_reasoning_where_the_answers_say_so(
    content: str | None, field: str, rules: Policy
) -> None:
    found = chat(content, reasoning="The capital of France is Paris.", field=field)
    assert run("known", found, rules).outcome == "passed"
    strict = PARIS.model_copy(update={"reasoning": None})
    result = run("known", found, rules, strict)
    assert result.outcome == "failed" and "parser" in result.explanation


def test_an_exhausted_budget_is_told_apart_from_a_wrong_parser(rules: Policy) -> None:
    result = run("known", exchange.load(WIRE / "sglang-0.5.23/chat_think_truncated.json"), rules, max_tokens=6)
    assert result.outcome == "failed" and "budget of 6 ran out" in result.explanation


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (chat("The capital of", finish="length"), "in the middle of the answer"),
        (chat("", reasoning="The user asks", finish="length"), "before there was any content"),
        (chat(None, reasoning="The user asks", finish="length", field="reasoning"), "before there was any content"),
    ],
)
def test_a_truncated_answer_is_a_class_of_its_own(found: Exchange, why: str, rules: Policy) -> None:
    result = run("known", found, rules)
    assert (result.outcome, result.value) == ("failed", "length") and why in result.explanation
    assert diagnose([result]) is not None and diagnose([result]).kind == "budget"  # type: ignore[union-attr]


def test_a_known_answer_that_fills_its_budget_is_known(rules: Policy) -> None:
    assert run("known", chat("The capital of France is Paris.", finish="length"), rules).outcome == "passed"


def test_no_reply_is_no_answer_and_no_garbage(rules: Policy) -> None:
    for check in ("text", "known", "thinking"):
        result = run(check, chat("x", status=503), rules)
        assert result.outcome == "failed" and "HTTP 503" in result.explanation
        assert diagnose([result]).kind == "no-answer"  # type: ignore[union-attr]


def test_a_leaking_token_is_the_parsers(rules: Policy) -> None:
    assert diagnose([run("text", chat("It rains.<|im_end|>"), rules)]).kind == "parser"  # type: ignore[union-attr]
    assert diagnose([run("text", chat("<|im_end|>" * 40), rules)]).kind == "garbage"  # type: ignore[union-attr]


def test_repetition_that_the_question_asks_for(rules: Policy) -> None:
    said = chat("knock " * 40)
    assert run("text", said, rules).outcome == "failed"
    assert run("text", said, rules, PARIS.model_copy(update={"repeats": True})).outcome == "passed"
    known = PARIS.model_copy(update={"content": Expected(exactly=("knock " * 40,))})
    assert run("text", said, rules, known).outcome == "passed"
    # a pattern leaves its end open
    assert (
        run("text", said, rules, PARIS.model_copy(update={"content": Expected(pattern="knock.*")})).outcome == "failed"
    )
    # the known content says nothing for the reasoning
    assert run("text", chat("knock " * 40, reasoning="!" * 40), rules, known).outcome == "failed"


def test_no_known_answer_is_unmeasured(rules: Policy) -> None:
    question = PARIS.model_copy(update={"content": None})
    assert run("known", chat("x"), rules, question).outcome == "unmeasured"


@pytest.mark.parametrize(
    ("found", "thinking", "outcome"),
    [
        (chat("x", reasoning="hm"), True, "passed"),
        (chat("x", reasoning=None), True, "failed"),
        (chat("x", reasoning="hm"), False, "failed"),
        (chat("x"), False, "passed"),
        (chat("<think>hm</think>x"), False, "failed"),
        (chat("hm</think>x", reasoning="y"), True, "failed"),
    ],
)
def test_thinking_is_where_it_belongs(found: Exchange, thinking: bool, outcome: str, rules: Policy) -> None:
    assert run("thinking", found, rules, thinking=thinking).outcome == outcome


@pytest.mark.parametrize(
    ("logprobs", "outcome"),
    [
        ([-0.5, -2.0], "passed"),
        ([-0.5, -9999.0], "failed"),
        ([-0.5, None], "failed"),
        ([float("nan")], "failed"),
        ([float("-inf")], "failed"),
        ([0.5], "failed"),
        ([], "failed"),
        (None, "failed"),
    ],
)
def test_logprobs_are_finite(logprobs: list[float | None] | None, outcome: str, rules: Policy) -> None:
    assert run("finite", chat("x", logprobs=logprobs), rules).outcome == outcome


def test_nan_that_arrives_as_an_http_error_fails(rules: Policy) -> None:
    body = {"object": "error", "message": "Out of range float values are not JSON compliant: nan", "code": 500}
    found = chat("x", status=500).model_copy(update={"response": body})
    result = run("finite", found, rules)
    assert result.outcome == "failed" and "nan" in result.explanation


def test_same(rules: Policy) -> None:
    first, second = chat("a"), chat("b")

    def compare(others: dict[str, Exchange]) -> CheckResult:
        return run("same", first, rules, same_as="other", others=others)

    assert compare({"other": first}).outcome == "passed"
    assert compare({"other": second}).outcome == "failed"
    assert compare({}).outcome == "unmeasured"
    assert compare({"other": second.model_copy(update={"error": "timed out"})}).outcome == "unmeasured"


def test_white_space_around_a_call_is_nobodys_text(rules: Policy) -> None:
    buffered = exchange.load(RECORDED_SMOKE / "tool-call.json")
    streamed = exchange.load(RECORDED_SMOKE / "tool-call-streamed.json")
    assert reply.read(streamed).content != reply.read(buffered).content
    assert run("same", streamed, rules, same_as="o", others={"o": buffered}).outcome == "passed"
    # without a call the same white space is a difference
    assert run("same", chat(" a"), rules, same_as="o", others={"o": chat("a")}).outcome == "failed"


def described(body: Any, status: int = 200) -> Exchange:
    return Exchange(name="x", request=Request(method="GET", path="/v1/models"), status=status, seconds=0, response=body)


def test_models_lists_ours_and_no_other(rules: Policy) -> None:
    real = json.loads((WIRE / "sglang-0.5.23/v1_models.json").read_text())
    about: dict[str, Any] = {"endpoint": "models"}
    assert run("served-model", described(real), rules, **about).outcome == "passed"
    other = {"data": [{"id": "qwen"}]}
    assert run("served-model", described(other), rules, **about).outcome == "failed"
    both = {"data": [{"id": "smollm2"}, {"id": "qwen"}]}
    assert run("served-model", described(both), rules, **about).outcome == "failed"
    assert run("served-model", described({}), rules, **about).outcome == "failed"
    assert run("served-model", described(real, 503), rules, **about).outcome == "failed"


def test_model_info(rules: Policy) -> None:
    real = json.loads((WIRE / "sglang-0.5.23/model_info.json").read_text())
    about: dict[str, Any] = {"endpoint": "model-info"}
    assert run("model-info", described(real), rules, **about).outcome == "passed"
    assert run("model-info", described(real | {"is_generation": False}), rules, **about).outcome == "failed"
    assert run("model-info", described(real | {"served_model_name": "qwen"}), rules, **about).outcome == "failed"
    assert run("model-info", described(None), rules, **about).outcome == "failed"


def test_an_unknown_model(rules: Policy) -> None:
    # SGLang answers 200 and echoes the name, vLLM refuses.
    sglang = exchange.load(WIRE / "sglang-0.5.23/chat_unknown_model.json")
    vllm = exchange.load(WIRE / "vllm-0.32.0/chat_unknown_model.json")
    assert run("refused", sglang, rules).outcome == "failed"
    assert run("refused", vllm, rules).outcome == "passed"


def test_normalised_keeps_what_could_be_garbage() -> None:
    assert normalised(" 323.\n") == "323"
    assert normalised("323!") == "323!"
    assert normalised("323...") == "323.."
    assert normalised("e\u0301") == "é"


WEATHER = Question(
    messages=({"role": "user", "content": "?"},), call=Call(name="get_weather", arguments={"city": "Paris"})
)


@pytest.mark.parametrize(
    "sample", ["sglang-0.5.23/chat_tools_auto_think", "sglang-0.5.23/chat_tools_auto_think_stream"]
)
def test_a_call_of_a_real_server(sample: str, rules: Policy) -> None:
    found = run("tool-call", exchange.load(WIRE / f"{sample}.json"), rules, WEATHER)
    assert (found.outcome, found.answer) == ("passed", 'get_weather({"city": "Paris"})')


def calling(*calls: tuple[str, str], content: str = "", finish: str = "tool_calls") -> Exchange:
    made = chat(content, finish=finish)
    message = made.response["choices"][0]["message"]
    message["tool_calls"] = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    return made


GOOD = ("get_weather", '{"city":"Paris"}')


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (calling(("get_time", '{"city": "Paris"}')), "a call of 'get_time'"),
        (calling(("get_weather", '{"city": "Oslo"}')), "the arguments are not"),
        (calling(("get_weather", '{"city": "Paris"')), "no JSON object"),
        (calling(("get_weather", '["Paris"]')), "no JSON object"),
        (calling(("get_weather", '{"city": "Paris", "unit": "c"}')), "the arguments are not"),
        (calling(GOOD, GOOD), "2 calls"),
        (calling(GOOD, finish="stop"), "finish reason is 'stop'"),
        (calling(GOOD, content="<tool_call>"), "is in the content"),
        (chat('<tool_call>\n{"name": "get_weather"}\n</tool_call>'), "is in the content"),
        (chat("", reasoning="<tool_call> x"), "is in the reasoning"),
        (chat("It is sunny."), "no call"),
        (chat("", finish="length"), "ran out before there was a call"),
        (calling(("get_weather", '{"city": "Par'), finish="length"), "ran out in the middle of a call"),
        (calling(("get_weather", '{"city": "<tool_call>"}')), "is in the arguments"),
        (chat("", status=500), "HTTP 500"),
    ],
)
def test_a_call_that_is_not_the_known_one(found: Exchange, why: str, rules: Policy) -> None:
    result = run("tool-call", found, rules, WEATHER)
    assert result.outcome == "failed" and why in result.explanation


def test_a_call_by_value_not_by_letter(rules: Policy) -> None:
    assert run("tool-call", calling(GOOD), rules, WEATHER).outcome == "passed"
    assert run("tool-call", calling(GOOD), rules, PARIS).outcome == "unmeasured"


def test_prompt_length(rules: Policy) -> None:
    known = PARIS.model_copy(update={"prompt_tokens": 16})
    assert run("prompt-tokens", chat("x"), rules, known).outcome == "passed"
    assert run("prompt-tokens", chat("x", prompt=17), rules, known).value == 17
    assert run("prompt-tokens", chat("x"), rules, PARIS).outcome == "unmeasured"
    silent = chat("x").model_copy(update={"response": {"choices": [{"message": {"content": "x"}}]}})
    assert run("prompt-tokens", silent, rules, known).outcome == "failed"
    streamed = exchange.load(RECORDED_SMOKE / "tool-call-streamed.json")
    tools = PARIS.model_copy(update={"prompt_tokens": 248})
    assert run("prompt-tokens", streamed, rules, tools).outcome == "passed"


def test_token_ids(rules: Policy) -> None:
    known = Question(prompt="The capital of France is", tokens=(504, 3575, 282, 4649, 314))
    about: dict[str, Any] = {"endpoint": "tokenize"}
    real = exchange.load(RECORDED_SMOKE / "tokenize.json")
    assert run("token-ids", real, rules, known, **about).outcome == "passed"
    assert run("token-ids", described({"tokens": [1, 2]}), rules, known, **about).value == "1 2"
    assert run("token-ids", described({"message": "Not Found"}, 404), rules, known, **about).outcome == "failed"
    assert run("token-ids", real, rules, Question(prompt="x"), **about).outcome == "unmeasured"
