"""The seeds' test, for comparison: what a gate of four questions and one forbidden word would have let pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from forge_core.model import Frozen
from forge_lab.journal import Baseline
from forge_lab.mutants import load
from forge_validate import exchange, reply
from forge_validate.exchange import Exchange, Request
from forge_validate.server import Server
from forge_validate.suite import Name
from forge_validate.talk import send


class Question(Frozen):
    """One request; `model` is added to its body."""

    name: Name
    method: Literal["GET", "POST"]
    path: str
    body: dict[str, Any] | None = None


class Seeds(Frozen):
    """seeds.yaml."""

    schema_version: Literal[1] = Field(alias="schema")
    forbidden: str
    """What must stand nowhere in an answer."""
    timeout: float
    """Seconds for one answer."""
    questions: tuple[Question, ...]


def ask(server: Server, folder: Path) -> Baseline:
    """Ask the questions; writes the exchanges to `folder`."""
    seeds = load("seeds", Seeds)
    for question in seeds.questions:
        body = None if question.body is None else {"model": server.served, **question.body}
        request = Request(method=question.method, path=question.path, body=body)
        told = send(server, f"seeds/{question.name}", request, seeds.timeout)
        exchange.save(exchange.masked(told, (server.api_key,) if server.api_key else ()), folder)
        if (why := _complaint(told, seeds.forbidden)) is not None:
            return Baseline(passed=False, why=f"{question.name}: {why}")
    return Baseline(passed=True, why=f"{len(seeds.questions)} questions answered")


def _complaint(told: Exchange, forbidden: str) -> str | None:
    if told.error is not None:
        return told.error
    if told.status != 200:
        return f"HTTP {told.status}"
    if told.request.method == "GET":
        return None
    if forbidden in json.dumps(told.response, ensure_ascii=False):
        return f"{forbidden!r} in the answer"
    try:
        said = reply.read(told)
    except reply.NotAReply as error:
        return str(error)
    return None if said.content.strip() or said.reasoning.strip() else "nothing is said"
