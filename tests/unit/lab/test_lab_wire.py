"""The faulty proxy: each fault on one answer, and a real proxy before a real local server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine

from forge_core.errors import UsageError
from forge_lab.faults import wire
from forge_lab.faults.proxy import proxy
from forge_lab.faults.wire import CUT, HANG, Spoiler

CHAT = "/v1/chat/completions"


def event(text: str | None = None, *, finish: str | None = None, role: str | None = None, **more: Any) -> str:
    delta = {name: value for name, value in (("role", role), ("content", text)) if value is not None}
    return json.dumps({"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more})


STREAM = [
    event(role="assistant"),
    *(event(text) for text in ("a", "b", "c", "d", "e")),
    event(finish="length"),
    json.dumps({"id": "x", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}}),
    "[DONE]",
]


def through(fault: wire.Kind, **parameters: Any) -> tuple[list[str], Spoiler]:
    spoiler = Spoiler(fault, CHAT, {}, 0, parameters)
    return [sent for one in STREAM for sent in spoiler.event(one)], spoiler


def text(events: list[str]) -> str:
    told = [json.loads(one) for one in events if one.startswith("{")]
    return "".join(choice["delta"].get("content", "") for one in told for choice in one["choices"])


@pytest.mark.parametrize(
    ("fault", "said"),
    [("drop", "abde"), ("double", "abccde"), ("swap", "abdce"), ("ids", "abcde"), ("usage", "abcde"), ("empty", "")],
)
def test_what_arrives_of_a_stream(fault: wire.Kind, said: str) -> None:
    events, spoiler = through(fault)
    assert text(events) == said and spoiler.fired and events[-1] == "[DONE]"


def test_streams_that_end_early() -> None:
    assert through("hang")[0][-1] == HANG or HANG in through("hang")[0]
    assert CUT in through("cut")[0]
    events, spoiler = through("no-done")
    assert "[DONE]" not in events and spoiler.fired
    later = Spoiler("cut", CHAT, {}, 1, {"every": 2})
    assert [sent for one in STREAM for sent in later.event(one)] == STREAM and not later.fired


def test_what_is_changed_in_events() -> None:
    usage = json.loads(through("usage")[0][-2])["usage"]
    assert usage == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    assert json.loads(through("usage-prompt")[0][-2])["usage"]["prompt_tokens"] == 4
    assert json.loads(through("no-usage")[0][-2])["usage"] is None
    assert all('"role"' not in one for one in through("no-role")[0])
    assert '"stop"' in through("finish")[0][-3]
    assert '"length"' not in "".join(through("no-finish")[0])
    assert len({json.loads(one)["id"] for one in through("ids")[0][:-1]}) > 1


@pytest.mark.parametrize(
    ("fault", "path", "status", "body", "expected"),
    [
        ("models", "/v1/models", 200, {"data": [{"id": "m"}]}, (200, {"data": [{"id": "another-model", "root": "another-model"}]})),
        ("ok-for-error", CHAT, 400, {"code": 400}, (200, {"code": 400})),
        ("usage", "/v1/models", 200, {"usage": {"completion_tokens": 1}}, (200, {"usage": {"completion_tokens": 1}})),
        (
            "replacement",
            CHAT,
            200,
            {"choices": [{"index": 0, "message": {"content": "Zürich"}}]},
            (200, {"choices": [{"index": 0, "message": {"content": "Z\ufffdrich"}}]}),
        ),
        (
            "one-choice",
            CHAT,
            200,
            {"choices": [{"index": 0}, {"index": 1}]},
            (200, {"choices": [{"index": 0}]}),
        ),
        (
            "null-logprobs",
            "/v1/completions",
            200,
            {"choices": [{"index": 0, "logprobs": {"token_logprobs": [-0.1, -0.2]}}]},
            (200, {"choices": [{"index": 0, "logprobs": {"token_logprobs": [None, None]}}]}),
        ),
    ],
)  # fmt: skip
def test_whole_answers(fault: wire.Kind, path: str, status: int, body: Any, expected: tuple[int, Any]) -> None:
    spoiler = Spoiler(fault, path, {}, 0)
    found = spoiler.status(status), json.loads(spoiler.whole(json.dumps(body).encode()))
    assert found == expected
    assert spoiler.fired == (found != (status, body))
    assert spoiler.whole(b"plain text") == b"plain text"


def test_answers_that_the_server_is_not_asked_for() -> None:
    assert Spoiler("logprobs-500", CHAT, {"logprobs": True}, 0).instead() is not None
    assert Spoiler("logprobs-500", CHAT, {}, 0).instead() is None
    busy = [Spoiler("busy", CHAT, {}, number, {"every": 4}).instead() for number in range(8)]
    assert [one is not None for one in busy] == [False, False, False, True] * 2


def test_a_fault_that_is_not_known() -> None:
    with pytest.raises(UsageError, match="knows no fault 'none'"):
        wire.known("none")


BODY = {"model": "m", "prompt": "One, two", "max_tokens": 8, "stream": True}


def test_a_proxy_passes_a_stream_on(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        direct = httpx.post(f"{engine.url}/v1/completions", json=BODY, trust_env=False).text
        with proxy(engine.url, "usage", {}) as between:
            told = httpx.get(f"{between.url}/server_info", trust_env=False)
            assert told.status_code == 200 and told.json()["page_size"] == 1 and not between.fired
            assert httpx.get(f"{between.url}/nothing", trust_env=False).status_code == 404
            body = {**BODY, "stream": False}
            whole = httpx.post(f"{between.url}/v1/completions", json=body, trust_env=False).json()
            assert whole["usage"]["completion_tokens"] == 9 and between.fired
        with proxy(engine.url, "drop", {}) as between:
            shorter = httpx.post(f"{between.url}/v1/completions", json=BODY, trust_env=False).text
        assert shorter.count("data:") == direct.count("data:") - 1


def test_a_stream_that_stands_still_ends_with_the_proxy() -> None:
    with FakeEngine() as engine, proxy(engine.url, "hang", {}) as between:
        with httpx.stream("POST", f"{between.url}/v1/completions", json=BODY, trust_env=False, timeout=0.5) as told:
            with pytest.raises(httpx.ReadTimeout):
                told.read()
        assert between.fired


def test_a_server_that_is_gone_is_gone_through_the_proxy() -> None:
    with FakeEngine() as engine:
        gone = engine.url
    with proxy(gone, "usage", {}) as between, pytest.raises(httpx.HTTPError):
        httpx.get(f"{between.url}/server_info", trust_env=False, timeout=5)
