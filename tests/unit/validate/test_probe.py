"""Probing against a real HTTP server on loopback."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from pytest_httpserver import HTTPServer
from werkzeug import Request as WebRequest
from werkzeug import Response

from forge_validate import exchange, reply
from forge_validate.probe import ask, compose, probe
from forge_validate.server import Server
from forge_validate.suite import Answers, Case, Suite

from .conftest import WIRE


def case(smoke: tuple[Suite, Answers], name: str, **changes: Any) -> Case:
    return next(c for c in smoke[0].cases if c.name == name).model_copy(update=changes)


@pytest.fixture
def server(httpserver: HTTPServer) -> Server:
    return Server(url=httpserver.url_for("").rstrip("/"), served="smollm2", api_key="sk-secret")


def test_what_is_sent(smoke: tuple[Suite, Answers]) -> None:
    suite, answers = smoke
    thinking = compose(case(smoke, "known-answer-thinking"), answers, "m", suite.seed).body
    assert (thinking["model"], thinking["temperature"], thinking["seed"]) == ("m", 0, suite.seed)
    assert thinking["max_tokens"] == 128
    assert thinking["chat_template_kwargs"] == {"enable_thinking": True}
    assert compose(case(smoke, "known-answer"), answers, "m", 1).body["chat_template_kwargs"] == {
        "enable_thinking": False
    }
    completion = compose(case(smoke, "completion"), answers, "m", 1)
    assert completion.path == "/v1/completions" and "messages" not in completion.body
    assert "chat_template_kwargs" not in completion.body
    models = compose(case(smoke, "models"), answers, "m", 1)
    assert (models.method, models.path, models.body) == ("GET", "/v1/models", None)


@pytest.mark.parametrize(
    ("name", "sample"),
    [
        ("known-answer", "chat_plain_nothink"),
        ("known-answer-thinking", "chat_think_fewshot"),
        ("logprobs", "chat_logprobs"),
        ("streamed", "chat_stream"),
    ],
)
def test_what_arrives_is_what_is_recorded(
    name: str, sample: str, httpserver: HTTPServer, server: Server, smoke: tuple[Suite, Answers]
) -> None:
    recorded = exchange.load(WIRE / "sglang-0.5.23" / f"{sample}.json")
    got: list[dict[str, Any]] = []

    def answer(request: WebRequest) -> Response:
        got.append(json.loads(request.data))
        body = recorded.text if recorded.text is not None else json.dumps(recorded.response)
        return Response(body, content_type=recorded.headers["content-type"])

    httpserver.expect_request("/v1/chat/completions", method="POST").respond_with_handler(answer)
    asked = compose(case(smoke, name), smoke[1], "smollm2", 20)
    found = ask(server, case(smoke, name), asked)
    assert found.error is None and found.status == 200
    assert (found.response, found.text) == (recorded.response, recorded.text)
    assert got == [asked.body], "the recorded request is what was really sent"
    assert reply.read(found) == reply.read(recorded)
    assert httpserver.log[0][0].headers["Authorization"] == "Bearer sk-secret"


def test_an_http_error_is_recorded_not_retried(
    httpserver: HTTPServer, server: Server, smoke: tuple[Suite, Answers]
) -> None:
    body = {"object": "error", "message": "nan", "code": 500}
    httpserver.expect_request("/v1/chat/completions").respond_with_json(body, status=500)
    question = case(smoke, "logprobs")
    found = ask(server, question, compose(question, smoke[1], "m", 1))
    assert (found.status, found.response, found.error) == (500, body, None)
    assert len(httpserver.log) == 1


def test_a_time_out_is_an_exchange_with_an_error(
    httpserver: HTTPServer, server: Server, smoke: tuple[Suite, Answers]
) -> None:
    import time

    def slow(request: WebRequest) -> Response:
        time.sleep(1)
        return Response("{}")

    httpserver.expect_request("/v1/chat/completions").respond_with_handler(slow)
    httpserver.expect_request("/v1/models").respond_with_handler(slow)
    for name in ("known-answer", "models"):
        question = case(smoke, name, timeout=0.2)
        found = ask(server, question, compose(question, smoke[1], "m", 1))
        assert found.status is None and found.error is not None and "within 0 s" in found.error


def test_a_stream_that_never_ends_is_a_time_out(smoke: tuple[Suite, Answers], httpserver: HTTPServer) -> None:
    import time
    from collections.abc import Iterator

    def drip() -> Iterator[bytes]:
        for _ in range(40):
            time.sleep(0.1)
            yield b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'

    httpserver.expect_request("/v1/chat/completions").respond_with_handler(
        lambda request: Response(drip(), content_type="text/event-stream")
    )
    question = case(smoke, "streamed", timeout=0.5)
    server = Server(url=httpserver.url_for("").rstrip("/"), served="m")
    found = ask(server, question, compose(question, smoke[1], "m", 1))
    assert found.error is not None and found.seconds < 2


def test_nothing_listens(smoke: tuple[Suite, Answers]) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        server = Server(url=f"http://127.0.0.1:{reserved.getsockname()[1]}", served="m")
        for name in ("known-answer", "models"):
            question = case(smoke, name)
            found = ask(server, question, compose(question, smoke[1], "m", 1))
            assert found.status is None and found.error is not None and "refused" in found.error.lower()


def test_a_proxy_of_the_environment_is_not_asked(
    httpserver: HTTPServer, server: Server, smoke: tuple[Suite, Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    httpserver.expect_request("/v1/models").respond_with_json({"data": []})
    httpserver.expect_request("/v1/chat/completions").respond_with_json({"choices": []})
    for name in ("known-answer", "models"):
        question = case(smoke, name)
        assert ask(server, question, compose(question, smoke[1], "m", 1)).status == 200


def test_after_its_death_a_server_is_asked_nothing(smoke: tuple[Suite, Answers], tmp_path: Path) -> None:
    server = Server(url="http://127.0.0.1:1", served="m", died=lambda: "the server died (exit code 1)")
    taken = list(probe(server, *smoke, tmp_path))
    assert {e.error for _, e in taken} == {"not asked: the server died (exit code 1)"}
    assert {p.stem for p in tmp_path.iterdir()} == {c.name for c in smoke[0].cases}
