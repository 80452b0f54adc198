"""The rehearsal's own model folder, rendered offline, against what its server counted."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from forge_core.cli import work_folder
from forge_core.record import BuildRecord
from forge_validate import data, exchange, reply
from forge_validate.families.render import Renderer
from forge_validate.families.template import shapes
from forge_validate.suite import Answers

RECORDED = Path(__file__).parents[1] / "testdata" / "exchanges" / "smoke"
(SGLANG,) = (dialect for dialect in shapes().dialects if dialect.name == "sglang")


@pytest.fixture(scope="module")
def renderer(built: BuildRecord) -> Renderer:
    return Renderer(work_folder("rehearsal") / "model")


def test_recorded_prompts_are_as_long_as_rendered(renderer: Renderer) -> None:
    compared = 0
    for path in sorted(RECORDED.glob("*.json")):
        one = exchange.load(path)
        if one.request.path == "/v1/chat/completions":
            length = renderer.length(one.request.body, SGLANG, datetime.now(UTC))
            assert (path.name, reply.read(one).prompt_tokens) == (path.name, length)
            compared += 1
    assert compared >= 7


def test_known_prompt_lengths_are_as_rendered(renderer: Renderer) -> None:
    answers = data.load("answers", "SmolLM2-135M-Instruct", Answers)
    known = {name: question for name, question in answers.questions.items() if question.prompt_tokens}
    assert len(known) >= 3
    for name, question in known.items():
        body = {"messages": list(question.messages), "tools": list(question.tools)}
        assert (name, renderer.length(body, SGLANG, datetime.now(UTC))) == (name, question.prompt_tokens)
