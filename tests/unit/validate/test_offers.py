"""What a server offers, asked of real HTTP servers with the shapes of SGLang, vLLM and a plain one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peer import Peer, serving

from forge_validate import exchange, suite
from forge_validate.judge import Bench
from forge_validate.offers import UNSEEN, Offers, Seen
from forge_validate.offers.ask import ask
from forge_validate.offers.see import see
from forge_validate.policy import Policy
from forge_validate.probe import compose, probe
from forge_validate.server import Server

from .conftest import WIRE


def asked(peer: Peer, folder: Path) -> Offers:
    with serving(peer):
        return see(ask(Server(url=peer.url, served=peer.models[0], api_key=peer.key), folder))


def state(found: Offers, name: str) -> str:
    return next(one.state for one in found.seen if one.name == name)


def test_sglang_tells_most_of_it_itself(tmp_path: Path) -> None:
    peer = Peer("sglang", cache_report=True)
    found = asked(peer, tmp_path)
    assert found.software == "sglang 0.5.23"
    assert {one.name for one in found.seen if one.state != "offered"} == set()
    assert (found.tokenize_path, found.metrics) == ("/v1/tokenize", "sglang")
    # Not asked for what it tells: one token each for /generate, logprobs and nothing else.
    assert peer.asked.count("/v1/chat/completions") == 1
    assert "/version" not in peer.asked and "/tokenize" not in peer.asked
    # Looked at, and not done: others may be using its cache.
    assert [method for method, path, _ in peer.log if path == "/flush_cache"] == ["OPTIONS"]


def test_vllm(tmp_path: Path) -> None:
    found = asked(Peer("vllm"), tmp_path)
    assert found.software == "vllm 0.32.0"
    assert {one.name: one.state for one in found.seen} == {
        "native": "absent",
        "metrics": "offered",
        "completions": "offered",
        "tokenize": "offered",
        "logprobs": "offered",
        "tools": "offered",
        "reasoning": "offered",
        "thinking-switch": "offered",
        "cache-report": "absent",
    }
    assert (found.tokenize_path, found.metrics) == ("/tokenize", "vllm")
    assert "GET /server_info: HTTP 404" in found.refusal("native")


def test_a_server_that_knows_chats_alone(tmp_path: Path) -> None:
    found = asked(Peer("plain"), tmp_path)
    assert found.software is None and found.tokenize_path is None and found.metrics is None
    states = {one.name: one.state for one in found.seen}
    # Only one reply came without what it refuses, so nothing is known about what a second one would report.
    assert states.pop("cache-report") == "unknown"
    assert set(states.values()) == {"absent"}


@pytest.mark.parametrize(
    ("peer", "name", "expected"),
    [
        (Peer("vllm", tool_parser=False), "tools", "absent"),
        (Peer("sglang", tool_parser=False), "tools", "absent"),
        (Peer("vllm", reasoning_parser=False), "reasoning", "absent"),
        (Peer("sglang", reasoning_parser=False), "reasoning", "absent"),
        (Peer("vllm", says="", reasoning_parser=False), "reasoning", "unknown"),
        (Peer("vllm", cache_report=True), "cache-report", "offered"),
        (Peer("sglang", cache_report=False), "cache-report", "absent"),
        (Peer("vllm", metrics=False), "metrics", "absent"),
        (Peer("vllm", logprob="none"), "logprobs", "absent"),
        (Peer("vllm", logprob="refused"), "logprobs", "absent"),
        # Findings of the check, not reasons to skip it.
        (Peer("vllm", logprob="broken"), "logprobs", "offered"),
        (Peer("vllm", logprob=None), "logprobs", "offered"),
        (Peer("sglang", statuses={"/flush_cache": 404}), "native", "absent"),
        (Peer("sglang", statuses={"/generate": 404}), "native", "absent"),
        (Peer("sglang", statuses={"/generate": 500}), "native", "unknown"),
        # An admin key of its own hides it.
        (Peer("sglang", statuses={"/server_info": 401}), "native", "unknown"),
        (Peer("vllm", statuses={"/tokenize": 503}), "tokenize", "unknown"),
        (Peer("vllm", statuses={"/v1/completions": 404}), "completions", "absent"),
        (Peer("vllm", statuses={"/v1/completions": 500}), "completions", "offered"),
        (Peer("vllm", statuses={"/v1/completions": 503}), "completions", "unknown"),
        (Peer("vllm", statuses={"/metrics": 503}), "metrics", "unknown"),
        (Peer("vllm", statuses={"/v1/chat/completions": 429}), "logprobs", "unknown"),
    ],
)
def test_each_offer(peer: Peer, name: str, expected: str, tmp_path: Path) -> None:
    assert state(asked(peer, tmp_path), name) == expected


def test_a_required_call_that_comes_as_text_shows_that_nobody_parses_calls(tmp_path: Path) -> None:
    """A server without a parser that tells nothing of itself, as SGLang would answer."""
    peer = Peer("sglang", tool_parser=False, statuses={"/server_info": 404})
    found = asked(peer, tmp_path)
    assert state(found, "tools") == "absent" and "came as text" in found.refusal("tools")


def test_a_silent_server_is_not_asked_to_the_end(tmp_path: Path) -> None:
    peer = Peer("vllm", silent=("/v1/tokenize",))
    found = asked(peer, tmp_path)
    assert "/v1/chat/completions" not in peer.asked
    assert state(found, "logprobs") == "unknown" and state(found, "metrics") == "offered"
    assert found.lacking(("logprobs", "tools")) is None


def test_a_dead_server_is_asked_nothing(tmp_path: Path) -> None:
    found = ask(Server(url="http://127.0.0.1:1", served="m", died=lambda: "it died"), tmp_path)
    assert found == {} and see(found) is UNSEEN


def test_recorded_answers_show_the_same(tmp_path: Path) -> None:
    found = asked(Peer("vllm", key="sk-secret-of-this-test"), tmp_path)
    files = sorted(tmp_path.iterdir())
    assert all(path.name.startswith("offers__") for path in files)
    assert "sk-secret-of-this-test" not in "".join(path.read_text() for path in files)
    again = [exchange.load(path) for path in files]
    assert see({one.name: one for one in again}) == found


def test_later_ones_count() -> None:
    ours = Offers.certain(("container", "log"), "we started it")
    theirs = Offers(software="x 1", seen=(Seen(name="log", state="absent", evidence="gone"),), tokenize_path="/t")
    both = ours.joined(theirs)
    assert "container" in both and "log" not in both and "tools" not in both
    assert (both.software, both.tokenize_path, both.lacking(("container", "log"))) == ("x 1", "/t", "log")


def test_a_case_that_needs_what_is_absent_is_not_asked_and_unmeasured(rules: Policy, tmp_path: Path) -> None:
    questions, answers = suite.load("smoke", "SmolLM2-135M-Instruct")
    with serving(Peer("vllm", models=("m",), tool_parser=False)) as peer:
        server = Server(url=peer.url, served="m")
        server = Server(url=peer.url, served="m", offers=see(ask(server, tmp_path)))
        before = len(peer.log)
        exchanges = {case.name: found for case, found in probe(server, questions, answers, tmp_path)}
        later = [body for _, _, body in peer.log[before:]]
    assert not any("tools" in (body or {}) for body in later)
    assert "/tokenize" in {found.request.path for found in exchanges.values()}
    results = {r.check: r for r in Bench(questions, answers, rules, "m", {}, server.offers).judge(exchanges.values())}
    for check, lacks in (("server-info/flags", "native"), ("tool-call/text", "tools")):
        assert (results[check].outcome, results[check].lacks) == ("unmeasured", lacks)
    assert results["tokenize/token-ids"].outcome == "passed"
    # Offline, from the files alone.
    files = [exchange.load(path) for path in tmp_path.glob("*.json")]
    assert {r.check: r for r in Bench(questions, answers, rules, "m").judge(files)} == results


def test_a_refused_switch_is_not_sent() -> None:
    questions, answers = suite.load("any", "any")
    (case,) = (c for c in questions.cases if c.name == "known-answer")
    refuses = Offers(seen=(Seen(name="thinking-switch", state="absent", evidence="HTTP 400"),))
    assert "chat_template_kwargs" not in compose(case, answers, "m", 1, refuses).body
    assert compose(case, answers, "m", 1).body["chat_template_kwargs"] == {"enable_thinking": False}


def test_the_peer_has_the_shapes_of_the_recorded_servers(tmp_path: Path) -> None:
    """What the stand-in leaves out may be missing; what it says has the recorded names and nulls."""

    def shape(value: Any) -> Any:
        return {name: shape(item) for name, item in value.items()} if isinstance(value, dict) else type(value)

    for flavour, version in (("vllm", "vllm-0.32.0"), ("sglang", "sglang-0.5.23")):
        recorded = json.loads((WIRE / version / "chat_plain_default.json").read_text())
        with serving(Peer(flavour)) as peer:  # type: ignore[arg-type]
            server = Server(url=peer.url, served="smollm2")
            from forge_validate.talk import send

            request = exchange.Request(method="POST", path="/v1/chat/completions", body=recorded["request"]["body"])
            ours = send(server, "x", request, 5).response
        theirs = recorded["response"]
        assert ours.keys() <= theirs.keys()
        mine, real = ours["choices"][0], theirs["choices"][0]
        assert mine.keys() == real.keys()
        assert shape(mine["message"]) == shape(real["message"])
