"""The wire samples of both servers under the rules of parsers and stream: none is wrong, whatever the names of its fields."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forge_validate import exchange, reply
from forge_validate.exchange import Exchange
from forge_validate.families import pieces
from forge_validate.families.lacking import refused_for_parser, without
from forge_validate.families.parsers import probes
from forge_validate.families.rules import RULES, Judgement, Rule, Told

from .conftest import WIRE

SERVERS = ("sglang-0.5.23", "vllm-0.32.0")
ANSWERED = [
    path
    for path in sorted(WIRE.glob("*/chat_*.json"))
    if path.stem not in ("chat_bad_temperature", "chat_too_long", "chat_unknown_model")
]


def judged(path: Path, rule: Rule) -> Judgement:
    one = exchange.load(path)
    body = one.request.body
    tools, choice, wanted = body.get("tools") or (), body.get("tool_choice"), body.get("response_format")
    return RULES[rule](Told(tools, choice, wanted, probes().tags, pieces.read(one).first))


@pytest.mark.parametrize("path", ANSWERED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_read_as_the_cases_read_it(path: Path) -> None:
    one = exchange.load(path)
    said, whole = reply.read(one), pieces.read(one)
    first = whole.first
    assert (first.content, first.reasoning, first.finish) == (said.content, said.reasoning, said.finish)
    assert [(call.name, call.arguments) for call in first.calls] == [(c.name, c.arguments) for c in said.tool_calls]
    assert whole.usage["prompt_tokens"] + whole.usage["completion_tokens"] == whole.usage["total_tokens"]
    if one.text:
        assert pieces.disorder(one) is None


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("chat_think_fewshot", "thought"),
        ("chat_think_fewshot_stream", "thought"),
        ("chat_plain_default", "thought"),
        ("chat_tools_required", "forced"),
        ("chat_tools_auto_think", "call"),
        ("chat_tools_auto_think", "sound"),
    ],
)
@pytest.mark.parametrize("server", SERVERS)
def test_both_servers_are_right(server: str, name: str, rule: Rule) -> None:
    outcome, explanation, _ = judged(WIRE / server / f"{name}.json", rule)
    assert (outcome, explanation) == ("passed", explanation)


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("chat_think_truncated", "cut"),
        ("chat_plain_nothink", "plain"),
        ("chat_stream", "plain"),
        ("chat_tools_required_stream", "forced"),
        ("chat_tools_auto_think_stream", "call"),
    ],
)
def test_sglang_is_right(name: str, rule: Rule) -> None:
    outcome, explanation, _ = judged(WIRE / "sglang-0.5.23" / f"{name}.json", rule)
    assert (outcome, explanation) == ("passed", explanation)


def test_a_schema_behind_a_thought_that_never_ends_is_a_matter_of_the_budget() -> None:
    outcome, _, value = judged(WIRE / "sglang-0.5.23" / "chat_json_schema_thinkdefault.json", "json")
    assert (outcome, value) == ("failed", "length")


# --- streams out of order ---------------------------------------------------------------------------------------------


def sample() -> Exchange:
    return exchange.load(WIRE / "sglang-0.5.23" / "chat_stream.json")


def events() -> list[str]:
    return [line for line in (sample().text or "").split("\n\n") if line]


def changed(lines: list[str]) -> str | None:
    return pieces.disorder(sample().model_copy(update={"text": "\n\n".join(lines) + "\n\n"}))


def test_streams_out_of_order() -> None:
    whole = events()
    *said, finish, usage, done = whole
    assert changed(whole) is None
    assert "no `[DONE]`" in str(changed(whole[:-1]))
    assert "once and last" in str(changed([*said, finish, done, usage]))
    assert "once and last" in str(changed([*whole, done]))
    assert "begin with the role" in str(changed([*said[1:], finish, usage, done]))
    assert "no finish reason" in str(changed([*said, usage, done]))
    assert "goes on" in str(changed([*said, finish, said[-1], usage, done]))
    assert "goes on" in str(changed([*said, finish, finish, usage, done]))
    assert "no usage" in str(changed([*said, finish, done]))
    assert "of its own at the end" in str(changed([*said, usage, finish, done]))
    assert "2 pieces tell the usage" in str(changed([*said, finish, usage, usage, done]))
    assert "`id` changes" in str(changed([*said[:3], said[3].replace('"id":"0660', '"id":"x'), finish, usage, done]))
    assert "no piece has a choice" in str(changed([usage, done]))
    plain = sample().model_copy(update={"headers": {"content-type": "application/json"}})
    assert "content type" in str(pieces.disorder(plain))


# --- what a server lacks ----------------------------------------------------------------------------------------------


def info(**settings: Any) -> Exchange:
    return sample().model_copy(update={"response": settings, "text": None})


def test_a_parser_that_was_not_asked_for() -> None:
    assert without(info(tool_call_parser=None), "tool_call_parser")
    assert not without(info(tool_call_parser="hermes"), "tool_call_parser")
    assert not without(info(version="0"), "tool_call_parser")
    assert not without(None, "tool_call_parser")


def test_a_refusal_that_names_the_parser() -> None:
    said = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
    refused = sample().model_copy(update={"status": 400, "response": {"error": {"message": said}}, "text": None})
    assert refused_for_parser(refused)
    other = json.loads((WIRE / "vllm-0.32.0" / "chat_unknown_model.json").read_text())
    assert not refused_for_parser(Exchange.model_validate(other))
    assert not refused_for_parser(refused.model_copy(update={"status": 500}))
