from __future__ import annotations

from pathlib import Path

import pytest

from forge_validate import exchange, reply
from forge_validate.exchange import Exchange, Request

from .conftest import WIRE, chat

RECORDED = sorted(p for p in WIRE.rglob("*.json") if p.name not in ("v1_models.json", "model_info.json"))


@pytest.mark.parametrize("path", RECORDED, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_every_sample_parses_as_an_exchange(path: Path) -> None:
    found = exchange.load(path)
    assert found.name == path.stem
    assert found.status in (200, 400, 404)
    assert (found.response is None) == path.stem.endswith("stream")


@pytest.mark.parametrize(
    ("sample", "content", "reasoning", "finish"),
    [
        ("sglang-0.5.23/chat_plain_default", "", "The capital of France is Paris.", "stop"),
        ("vllm-0.32.0/chat_plain_default", "", "The capital of France is Paris.", "stop"),
        ("sglang-0.5.23/chat_plain_nothink", "\nThe capital of France is Paris.", "", "stop"),
        ("sglang-0.5.23/chat_think_truncated", "", "\nThe user", "length"),
        ("sglang-0.5.23/chat_stream", "\nThe capital of France is Paris.", "", "stop"),
    ],
)
def test_content_and_reasoning_under_either_name(sample: str, content: str, reasoning: str, finish: str) -> None:
    said = reply.read(exchange.load(WIRE / f"{sample}.json"))
    assert (said.content, said.reasoning, said.finish) == (content, reasoning, finish)


@pytest.mark.parametrize("server", ["sglang-0.5.23", "vllm-0.32.0"])
def test_a_stream_adds_up_to_the_buffered_reply(server: str) -> None:
    buffered = reply.read(exchange.load(WIRE / server / "chat_think_fewshot.json"))
    streamed = reply.read(exchange.load(WIRE / server / "chat_think_fewshot_stream.json"))
    assert streamed.streamed and not buffered.streamed
    assert streamed.content == buffered.content != ""
    assert streamed.reasoning == buffered.reasoning != ""
    assert (streamed.finish, streamed.completion_tokens) == (buffered.finish, buffered.completion_tokens)


@pytest.mark.parametrize("name", ["chat_tools_required", "chat_tools_auto_think"])
def test_tool_calls_add_up_in_a_stream(name: str) -> None:
    buffered = reply.read(exchange.load(WIRE / "sglang-0.5.23" / f"{name}.json"))
    streamed = reply.read(exchange.load(WIRE / "sglang-0.5.23" / f"{name}_stream.json"))
    assert streamed.tool_calls == buffered.tool_calls
    assert [call.name for call in streamed.tool_calls] == ["get_weather"]


@pytest.mark.parametrize("server", ["sglang-0.5.23", "vllm-0.32.0"])
def test_logprobs(server: str) -> None:
    said = reply.read(exchange.load(WIRE / server / "chat_logprobs.json"))
    assert said.logprobs is not None and len(said.logprobs) == said.completion_tokens
    assert all(value is not None and value <= 0 for value in said.logprobs)


def test_a_null_logprob_stays() -> None:
    assert reply.read(chat("x", logprobs=[None, -1.0])).logprobs == (None, -1.0)


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ("sglang-0.5.23/chat_bad_temperature", "HTTP 400: temperature must be"),
        ("sglang-0.5.23/chat_too_long", "HTTP 400: The input"),
        ("vllm-0.32.0/chat_unknown_model", "HTTP 404: The model `no-such-model` does not exist"),
    ],
)
def test_errors_are_no_reply_and_say_why(sample: str, message: str) -> None:
    with pytest.raises(reply.NotAReply, match=message):
        reply.read(exchange.load(WIRE / f"{sample}.json"))


def text(body: str) -> Exchange:
    request = Request(method="POST", path="/v1/chat/completions")
    return Exchange(name="x", request=request, status=200, seconds=0, text=body)


def test_a_broken_stream_is_no_reply() -> None:
    with pytest.raises(reply.NotAReply, match="broke off"):
        reply.read(text('data: {"choices":[{"delta":{"content":"The"}}]}\n\n'))
    with pytest.raises(reply.NotAReply, match="no JSON"):
        reply.read(text("data: {nope\n\ndata: [DONE]\n\n"))
    with pytest.raises(reply.NotAReply, match="error inside"):
        reply.read(text('data: {"error": {"message": "x"}}\n\ndata: [DONE]\n\n'))


def test_a_line_separator_inside_a_stream_ends_no_event() -> None:
    body = 'data: {"choices":[{"delta":{"content":"a\u2028b"}}]}\n\ndata: [DONE]\n\n'
    assert reply.read(text(body)).content == "a\u2028b"


def test_html_is_no_reply() -> None:
    with pytest.raises(reply.NotAReply, match="no choices"):
        reply.read(text("<html>proxy</html>"))


def test_exchanges_round_trip_without_secrets(tmp_path: Path) -> None:
    before = chat("key", name="case-1", logprobs=[None, -1.0])
    path = exchange.save(before, tmp_path)
    assert exchange.load(path) == before, "evidence stays as it was"
    told = {"api_key": 'sk-"abcdef', "launch_command": "--api-key sk-abcdef --device cpu", "tokenizer_path": "/model"}
    leaking = {"response": told, "headers": {"x": "Authorization: Bearer sk-abcdef"}, "error": "no host word-of-ours"}
    exchange.save(exchange.masked(before.model_copy(update=leaking), ["word-of-ours"]), tmp_path)
    assert "abcdef" not in path.read_text() and "word-of-ours" not in path.read_text()
    assert exchange.load(path).response["tokenizer_path"] == "/model"


@pytest.mark.parametrize("path", RECORDED, ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_recorded_exchanges_survive_saving(path: Path, tmp_path: Path) -> None:
    before = exchange.load(path)
    assert exchange.load(exchange.save(before, tmp_path)) == before
