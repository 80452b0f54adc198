"""Exchanges judged one by one, without a suite: what both servers said, and what broken ones say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_core.errors import UsageError
from forge_validate import exchange, offline, policy, single
from forge_validate.__main__ import main
from forge_validate.exchange import Exchange, Request

from .conftest import WIRE, chat

LIMITS = policy.load("rehearsal").text
SMOKE = WIRE.parent / "exchanges" / "smoke"

# A reply without <think> goes whole into the reasoning while thinking is on, a schema is not
# enforced until thinking has ended, an unknown model is answered by SGLang and refused by vLLM.
SAMPLES = {
    "sglang-0.5.23/chat_bad_temperature": "refused",
    "sglang-0.5.23/chat_json_schema_thinkdefault": "budget",
    "sglang-0.5.23/chat_logprobs": "ok",
    "sglang-0.5.23/chat_plain_default": "parser",
    "sglang-0.5.23/chat_plain_nothink": "ok",
    "sglang-0.5.23/chat_stream": "ok",
    "sglang-0.5.23/chat_think_fewshot": "ok",
    "sglang-0.5.23/chat_think_fewshot_stream": "ok",
    "sglang-0.5.23/chat_think_truncated": "budget",
    "sglang-0.5.23/chat_too_long": "refused",
    "sglang-0.5.23/chat_tools_auto_think": "ok",
    "sglang-0.5.23/chat_tools_auto_think_stream": "ok",
    "sglang-0.5.23/chat_tools_required": "ok",
    "sglang-0.5.23/chat_tools_required_stream": "ok",
    "sglang-0.5.23/chat_unknown_model": "wrong-server",
    "sglang-0.5.23/generate_logprob": "ok",
    "sglang-0.5.23/model_info": "ok",
    "sglang-0.5.23/v1_models": "ok",
    "vllm-0.32.0/chat_logprobs": "ok",
    "vllm-0.32.0/chat_plain_default": "parser",
    "vllm-0.32.0/chat_think_fewshot": "ok",
    "vllm-0.32.0/chat_think_fewshot_stream": "ok",
    "vllm-0.32.0/chat_tools_auto_think": "ok",
    "vllm-0.32.0/chat_tools_required": "ok",
    "vllm-0.32.0/chat_unknown_model": "refused",
}


def kind(found: Exchange, **body: Any) -> str:
    request = found.request.model_copy(update={"body": body})
    return single.judge(found.model_copy(update={"request": request}), LIMITS)[0]


def test_the_samples_of_both_servers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", "--json", str(WIRE)]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    told = {str(Path(one["file"]).relative_to(WIRE).with_suffix("")): one["class"] for one in found["files"]}
    assert told == SAMPLES
    assert found["outcome"] == "failed" and "25 files, 8 not ok" in err
    assert all(one["reason"] for one in found["files"])


def test_an_unknown_model_shows_only_beside_the_list() -> None:
    alone = single.judge(exchange.load(WIRE / "sglang-0.5.23/chat_unknown_model.json"), LIMITS)
    assert alone[0] == "ok"


def test_a_clean_run_is_ok(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(path) for path in SMOKE.glob("*.json") if path.stem != "unknown-model"]
    assert main(["judge", *files]) == 0
    assert "11 files, all ok" in capsys.readouterr().err
    assert main(["judge", str(SMOKE)]) == 1


def test_a_suite_is_judged_where_a_profile_names_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", "--profile", "rehearsal", "--json", str(SMOKE)]) == 0
    assert "verdict" in json.loads(capsys.readouterr().out)


NAN = "Out of range float values are not JSON compliant: nan"


@pytest.mark.parametrize(
    ("found", "body", "expected"),
    [
        (chat("It rains.", logprobs=[-0.1, None]), {"logprobs": True}, "numbers"),
        (chat("It rains.", logprobs=[-0.1, float("nan")]), {}, "numbers"),
        (chat("It rains.", logprobs=[-0.1, -0.2]), {}, "ok"),
        (chat("", finish="length", logprobs=[None] * 48, tokens=48), {}, "numbers"),
        (chat("!!!!!!!!!!!!!!!!"), {}, "garbage"),
        (chat(None, reasoning="!!!!!!!!!!!!!!!!", field="reasoning"), {}, "garbage"),
        (chat("It rains.", reasoning="should " * 20), {}, "garbage"),
        (chat("", finish="length", tokens=48), {}, "garbage"),
        (chat(None, finish="stop", tokens=1), {}, "garbage"),
        (chat(None, finish="stop", tokens=0), {}, "no-answer"),
        (chat("", reasoning="Let me think of the ", finish="length"), {}, "budget"),
        (chat("The answer is", finish="length"), {"max_tokens": 3}, "budget"),
        (chat("", reasoning="It is Paris."), {}, "parser"),
        (chat("<think>\nThe user"), {}, "parser"),
        (chat("<think>\nThe user", finish="length"), {}, "parser"),
        (chat("hm</think>It rains."), {}, "parser"),
        (chat("It rains.<|im_end|>"), {}, "parser"),
        (chat("<|im_start|>assistant\nIt rains."), {}, "parser"),
        (chat('<tool_call>\n{"name": "f"}\n</tool_call>'), {}, "parser"),
        (chat("", reasoning='<tool_call>{"name": "f"}</tool_call>'), {}, "parser"),
        (chat("Write `<think>` to open the block."), {}, "ok"),
        (chat("x", reasoning="I should open <think> first."), {}, "ok"),
        (chat("It rains.", reasoning="hm"), {"chat_template_kwargs": {"enable_thinking": False}}, "parser"),
        (chat("It is sunny."), {"tool_choice": "required"}, "parser"),
        (chat("It is", finish="length"), {"tool_choice": "required"}, "budget"),
        (chat("It is sunny.", finish="tool_calls"), {}, "parser"),
        (chat("not JSON"), {"response_format": {"type": "json_object"}}, "parser"),
        (chat('{"a": 1}'), {"response_format": {"type": "json_schema"}}, "ok"),
        (chat("It rains.", status=500), {}, "no-answer"),
        (chat("It rains.", status=503), {"logprobs": True}, "no-answer"),
        (chat("It rains.", status=500), {"logprobs": True}, "numbers"),
        (chat("It rains.", status=500), {"logprobs": 0}, "numbers"),
        (chat("It rains.", status=429), {}, "refused"),
        (chat("x").model_copy(update={"status": 500, "response": {"message": NAN}}), {}, "numbers"),
        (chat("x").model_copy(update={"status": None, "response": None, "error": "timed out"}), {}, "no-answer"),
        (chat("x").model_copy(update={"response": None, "text": "<html>proxy</html>"}), {}, "no-answer"),
        (chat("x").model_copy(update={"response": {"choices": []}}), {}, "no-answer"),
    ],
)  # fmt: skip
def test_each_class(found: Exchange, body: dict[str, Any], expected: str) -> None:
    assert kind(found, **body) == expected


def calling(name: str, arguments: str, finish: str = "tool_calls", content: str | None = None) -> Exchange:
    found = chat(content, finish=finish)
    found.response["choices"][0]["message"]["tool_calls"] = [{"function": {"name": name, "arguments": arguments}}]
    return found


TOOLS = [{"type": "function", "function": {"name": "get_weather"}}]


@pytest.mark.parametrize(
    ("found", "choice", "expected"),
    [
        (calling("get_weather", '{"city": "Paris"}'), None, "ok"),
        (calling("get_weather", '{"city": "Paris"}'), "required", "ok"),
        # of a named choice both finish reasons are common
        (calling("get_weather", '{"city": "Paris"}', "stop"), {"type": "function"}, "ok"),
        (calling("get_weather", '{"city": "Paris"}', "stop"), "auto", "parser"),
        (calling("get_weather", '{"city": "Paris"}'), "none", "parser"),
        (calling("get_time", "{}"), None, "parser"),
        (calling("get_weather", '{"city": "Par'), None, "parser"),
        (calling("get_weather", '{"city": "Par', "length"), None, "budget"),
        (calling("get_weather", '["Paris"]'), None, "parser"),
        (calling("get_weather", '{"city": "<tool_call>"}'), None, "parser"),
        (calling("get_weather", '{"city": "<|im_start|>Paris"}'), None, "parser"),
        (calling("get_weather", '{"city": "!!!!!!!!!!!!!!!!"}'), None, "garbage"),
        (calling("get_weather", '{"city": "Par\\ufffdis"}'), None, "garbage"),
        (calling("get_weather", '{"city": "Paris' + " " * 400, "length"), None, "garbage"),
    ],
)
def test_tool_calls(found: Exchange, choice: Any, expected: str) -> None:
    assert kind(found, tools=TOOLS, **({} if choice is None else {"tool_choice": choice})) == expected


def stream(*pieces: dict[str, Any], done: bool = True) -> Exchange:
    text = "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces) + ("data: [DONE]\n\n" if done else "")
    request = Request(method="POST", path="/v1/chat/completions", body={"stream": True})
    return Exchange(name="x", request=request, status=200, seconds=0, text=text)


def delta(content: str, finish: str | None = None, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": {"content": content}, "finish_reason": finish, **more}]}


def test_streams() -> None:
    def judged(found: Exchange) -> str:
        return single.judge(found, LIMITS)[0]

    assert judged(stream(delta("It "), delta("rains.", "stop"))) == "ok"
    assert judged(stream(delta("It "), delta("rains.", "stop"), done=False)) == "broken-stream"
    assert judged(stream(delta("It "), delta("rains."))) == "broken-stream"
    assert judged(stream(delta("It "), {"error": {"message": "x"}})) == "broken-stream"
    assert judged(stream()) == "broken-stream"
    assert judged(stream(delta("!" * 40, "stop"))) == "garbage"
    bad = {"content": [{"token": "x", "logprob": None}]}
    assert judged(stream(delta("It "), delta("rains.", "stop", logprobs=bad))) == "numbers"
    # two choices side by side, the second of them garbage
    assert judged(stream(delta("It "), delta("rains.", "stop"), delta("ok.", "stop", 1))) == "ok"
    assert (
        judged(stream(delta("It "), delta("!" * 20, None, 1), delta("rains.", "stop"), delta("", "stop", 1)))
        == "garbage"
    )
    # SGLang's own endpoint tells all the text so far in every event
    native = {"meta_info": {"finish_reason": {"type": "stop"}, "completion_tokens": 2}}
    assert judged(stream({"text": "It "} | native, {"text": "It rains."} | native)) == "ok"


def test_a_null_alternative_is_excused_where_a_grammar_forbids_tokens() -> None:
    found = chat("It rains.", logprobs=[-0.1])
    found.response["choices"][0]["logprobs"]["content"][0]["top_logprobs"] = [{"logprob": -0.1}, {"logprob": None}]
    assert kind(found) == "numbers"
    assert kind(found, response_format={"type": "text"}) == "numbers"
    assert kind(found, tool_choice="auto") == "numbers"
    assert kind(found, regex="[a-z]+") == "ok"
    assert kind(found, sampling_params={"json_schema": "{}"}) == "ok"


def test_the_prompts_first_token_has_no_logprob() -> None:
    found = chat("x")
    choice = {
        "text": "It rains.",
        "finish_reason": "length",
        "logprobs": {"token_logprobs": [None, -0.1], "tokens": ["It", " r"]},
    }
    found = found.model_copy(
        update={"response": {"choices": [choice]}, "request": Request(method="POST", path="/v1/completions")}
    )
    assert kind(found) == "numbers"
    assert kind(found, echo=True) == "ok"


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", '"NaN"', '"-inf"', "null", '"x"', "true"])
def test_numbers_that_are_no_json(word: str, tmp_path: Path) -> None:
    """As a recorder leaves them: parsed by Python, or as the text that no other parser takes."""
    body = (
        '{"choices": [{"message": {"content": "It rains."}, "finish_reason": "stop", '
        f'"logprobs": {{"content": [{{"token": "It", "logprob": {word}}}]}}}}]}}'
    )
    (tmp_path / "parsed.json").write_text(f'{{"request": {{"messages": []}}, "response": {body}}}')
    (tmp_path / "text.json").write_text(json.dumps({"request": {"messages": []}, "text": body}))
    (tmp_path / "string.json").write_text(json.dumps({"request": {"messages": []}, "response": body}))
    (tmp_path / "bare.json").write_text(body)
    for path in tmp_path.glob("*.json"):
        assert single.judge(offline.load(path), LIMITS)[0] == "numbers", path.name
        assert main(["judge", str(path)]) == 1


def test_whoever_recorded_it(tmp_path: Path) -> None:
    def load(data: Any) -> Exchange:
        path = tmp_path / "some-case.json"
        path.write_text(json.dumps(data))
        return offline.load(path)

    response = {"choices": [{"message": {"content": "It rains."}, "finish_reason": "stop"}]}
    found = load({"request": {"messages": [], "max_tokens": 3}, "response": response, "by": "a recorder"})
    assert (found.name, found.status, found.request.path) == ("some-case", 200, "/v1/chat/completions")
    assert found.request.body == {"messages": [], "max_tokens": 3}
    assert load({"request": {"prompt": "It"}, "response": response}).request.path == "/v1/completions"
    assert load({"request": {"text": "It", "sampling_params": {}}, "response": response}).request.path == "/generate"
    assert load({"request": {"method": "GET", "path": "/health"}, "status": 200}).request.path == "/health"
    assert load({"request": {}, "error": "refused"}).status is None
    assert load({"request": {}, "response": "data: [DONE]\n"}).text == "data: [DONE]\n"
    assert load(response).response == response
    for wrong in ({}, [], "x", {"request": {}}, {"request": {}, "status": "two hundred"}):
        with pytest.raises(UsageError):
            load(wrong)


def test_what_is_no_exchange_ends_with_2(tmp_path: Path) -> None:
    assert main(["judge", str(tmp_path)]) == 2
    assert main(["judge", str(tmp_path / "absent.json")]) == 2
    (tmp_path / "x.json").write_text("{")
    assert main(["judge", str(tmp_path / "x.json")]) == 2


def test_endpoints_at_which_no_model_speaks() -> None:
    def get(path: str, status: int | None, response: Any = None, **more: Any) -> str:
        request = Request(method="GET", path=path)
        found = Exchange(name="x", request=request, status=status, seconds=0, response=response, **more)
        return single.judge(found, LIMITS)[0]

    assert get("/health", 200) == "ok"
    assert get("/health", 503) == "no-answer"
    assert get("/v1/models", 401, {"error": {"message": "no key"}}) == "refused"
    assert get("/server_info", 200, {"error": {"message": "broken"}}) == "refused"
    assert get("/v1/models", None, error="connection refused") == "no-answer"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["choices", "message", "content", "delta", "logprobs", "token_logprobs", "top_logprobs", "tool_calls", "function",
         "arguments", "name", "finish_reason", "usage", "completion_tokens", "meta_info", "text", "error", "index", "data",
         "output_token_logprobs", "output_ids", "token_ids", "reasoning_content", "model", "object", "id", "logprob"]
    ), inner, max_size=5),
    max_leaves=20,
)  # fmt: skip


@given(JSON, JSON, st.sampled_from([200, 400, 500, None]), st.booleans())
def test_no_response_is_too_strange_to_judge(body: Any, sent: Any, status: int | None, streamed: bool) -> None:
    text = f"data: {json.dumps(body)}\n\ndata: [DONE]\n" if streamed else None
    request = Request(method="POST", path="/v1/chat/completions", body=sent)
    found = Exchange(
        name="x", request=request, status=status, seconds=0, response=None if streamed else body, text=text
    )
    kind, reason = single.judge(found, LIMITS, single.listed_models(found))
    assert kind and reason
