"""Probing: asks the cases of a suite and records what came back. It never judges.

`openai` for what a server's users use, `talk` for the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai

from forge_validate import exchange
from forge_validate.exchange import Exchange, Request
from forge_validate.offers import UNSEEN, Offers
from forge_validate.server import Server
from forge_validate.suite import Answers, Case, Suite
from forge_validate.talk import arrived, lost, out_of_time, send, trust

_PATHS = {
    "models": "/v1/models",
    "model-info": "/model_info",
    "server-info": "/server_info",
    "tokenize": "/v1/tokenize",
    "completion": "/v1/completions",
    "chat": "/v1/chat/completions",
}
_OPENAI = (_PATHS["completion"], _PATHS["chat"])


def probe(server: Server, suite: Suite, answers: Answers, folder: Path) -> Iterator[tuple[Case, Exchange]]:
    """Ask every case in order, one at a time; writes `folder/<case>.json` and gives each exchange as it came.

    A time-out, a broken connection, a dead server, or one that does not offer what the case needs, is an exchange with
    an `error`, not an exception.
    """
    folder.mkdir(parents=True, exist_ok=True)
    secrets = (server.api_key,) if server.api_key else ()
    for case in suite.cases:
        request = compose(case, answers, server.served, suite.seed, server.offers)
        lacks, why = server.offers.lacking(case.needs), server.died()
        if why is None and lacks is not None:
            found = lost(case.name, request, 0.0, f"not asked: {server.offers.refusal(lacks)}")
        else:
            found = lost(case.name, request, 0.0, f"not asked: {why}") if why else ask(server, case, request)
        if found.error is not None and why is None and (why := server.died()) is not None:
            found = found.model_copy(update={"error": f"{found.error}; {why}"})
        found = exchange.masked(found, secrets)
        exchange.save(found, folder)
        yield case, found


def compose(case: Case, answers: Answers, served: str, seed: int, offers: Offers = UNSEEN) -> Request:
    """What a case sends: temperature 0, the suite's seed, the case's token budget."""
    path = _PATHS[case.endpoint]
    if case.endpoint == "tokenize" and offers.tokenize_path is not None:
        path = offers.tokenize_path
    if case.question is None:
        return Request(method="GET", path=path)
    question = answers.questions[case.question]
    if case.endpoint == "tokenize":
        return Request(method="POST", path=path, body={"model": case.model or served, "prompt": question.prompt})
    body: dict[str, Any] = {
        "model": case.model or served,
        "temperature": 0,
        "seed": seed,
        "max_tokens": question.max_tokens or case.max_tokens,
    }
    if case.endpoint == "completion":
        body["prompt"] = question.prompt
        if case.logprobs:
            body["logprobs"] = case.logprobs
    else:
        body["messages"] = list(question.messages)
        if question.tools:
            body["tools"] = list(question.tools)
        if question.tool_choice is not None:
            body["tool_choice"] = question.tool_choice
        if case.logprobs:
            body |= {"logprobs": True, "top_logprobs": case.logprobs}
        if case.thinking is not None and offers.lacking(("thinking-switch",)) is None:
            body["chat_template_kwargs"] = {"enable_thinking": case.thinking}
    if case.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return Request(method="POST", path=path, body=body)


def ask(server: Server, case: Case, request: Request) -> Exchange:
    """Send one request and record what came back."""
    if request.path not in _OPENAI:
        return send(server, case.name, request, case.timeout)
    began = time.monotonic()
    try:
        status, headers, text = _through_openai(server, request, case.timeout)
    except _OutOfTime:
        return lost(case.name, request, time.monotonic() - began, out_of_time(case.timeout))
    except (httpx.HTTPError, openai.APIConnectionError) as error:
        # openai's own message is "Connection error."; what happened is its cause.
        reason = error.__cause__ or error
        return lost(case.name, request, time.monotonic() - began, f"{type(reason).__name__}: {reason}")
    return arrived(case.name, request, time.monotonic() - began, status, headers, text)


class _OutOfTime(Exception):
    """The whole exchange took longer than the case allows."""


def _through_openai(server: Server, request: Request, timeout: float) -> tuple[int, dict[str, str], str]:
    """Through the openai client; its own retries are off, because a second answer would hide a first failure."""
    deadline = time.monotonic() + timeout
    with openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key=server.api_key or "none",
        max_retries=0,
        timeout=timeout,
        http_client=openai.DefaultHttpxClient(trust_env=not server.local, verify=trust()),
    ) as client:
        api: Any = client.completions if request.path == "/v1/completions" else client.chat.completions
        known = {"model", "temperature", "seed", "max_tokens", "prompt", "messages", "logprobs", "top_logprobs"}
        known |= {"stream", "stream_options", "tools", "tool_choice"}
        extra = {name: value for name, value in request.body.items() if name not in known}
        arguments = {name: value for name, value in request.body.items() if name in known}
        try:
            with api.with_streaming_response.create(**arguments, extra_body=extra or None) as response:
                parts = []
                for part in response.iter_text():
                    parts.append(part)
                    if time.monotonic() > deadline:
                        raise _OutOfTime
                return response.status_code, dict(response.headers), "".join(parts)
        except openai.APITimeoutError as error:
            raise _OutOfTime from error
        except openai.APIStatusError as error:
            return error.status_code, dict(error.response.headers), error.response.text
