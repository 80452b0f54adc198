"""What the tests of this side share: a sealed record, a small model folder, the package's own data."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from forge_core.model import Deviation, ImageRef, ModelRef
from forge_core.record import BuildRecord
from forge_validate import policy, suite
from forge_validate.exchange import Exchange, Request
from forge_validate.policy import Policy
from forge_validate.suite import Answers, Suite

WIRE = Path(__file__).parents[2] / "testdata" / "wire"
DIGEST = "sha256:" + "a" * 64


@pytest.fixture
def rules() -> Policy:
    return policy.load("rehearsal")


@pytest.fixture
def smoke() -> tuple[Suite, Answers]:
    return suite.load("smoke", "SmolLM2-135M-Instruct")


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 16)
    return folder


@pytest.fixture
def make_record(model_folder: Path) -> Callable[..., BuildRecord]:
    def make(**changes: Any) -> BuildRecord:
        values: dict[str, Any] = {
            "profile": "rehearsal",
            "kind": "rehearsal",
            "finished": datetime(2026, 11, 30, tzinfo=UTC),
            "forge_version": "0.1.0",
            "forge_commit": None,
            "manifest": "1" * 64,
            "lock": "2" * 64,
            "image": ImageRef(repository="127.0.0.1:5120/sm120-forge-rehearsal", digest=DIGEST),
            "image_config": "sha256:" + "b" * 64,
            "image_size": 1,
            "architectures": ("sm_120a",),
            "model": ModelRef.of_folder("SmolLM2-135M-Instruct", model_folder),
            "bases": (),
            "sources": (),
            "wheels": (),
            "inputs": (),
            "image_check": {},
            "deviations": (),
            "tools": {},
            "stages": (),
        }
        return BuildRecord(**(values | changes))

    return make


def moved_base(subject: str = "libc6") -> Deviation:
    return Deviation(kind="base-moved", subject=subject, detail="2.36-9 became 2.36-10")


def chat(
    content: str | None,
    *,
    reasoning: str | None = None,
    finish: str = "stop",
    status: int = 200,
    logprobs: list[float | None] | None = None,
    field: str = "reasoning_content",
    name: str = "known-answer",
    tokens: int = 8,
    prompt: int = 16,
) -> Exchange:
    """A chat exchange as a server would give it."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": {"role": "assistant", "content": content, field: reasoning},
        "finish_reason": finish,
        "logprobs": None if logprobs is None else {"content": [{"token": "x", "logprob": v} for v in logprobs]},
    }
    return Exchange(
        name=name,
        request=Request(method="POST", path="/v1/chat/completions", body={}),
        status=status,
        seconds=0.1,
        response={"model": "m", "choices": [choice], "usage": {"completion_tokens": tokens, "prompt_tokens": prompt}},
    )
