"""The memory of GPUs over rounds of load: asked where it can be, held to its limit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from asking import ask, outcomes
from fake_engine import FakeEngine

LEAK = {
    "leak": {
        "rounds": 5,
        "warm_up": 1,
        "at_once": 3,
        "words": 4,
        "tokens": 8,
        "gpu_growth": {"value": 4, "reason": "less than what the test adds in a round"},
        "drain": 5,
        "timeout": 10,
    }
}


def steady() -> int:
    return 90 << 30


def growing() -> Callable[[], int]:
    rounds = itertools.count()
    return lambda: (90 << 30) + (next(rounds) * 10 << 20)


@pytest.mark.parametrize(
    ("gpu_memory", "expected"),
    [
        (steady, {}),
        (growing(), {"leak/gpu-memory": "failed"}),
        (lambda: None, {"leak/gpu-memory": "unmeasured"}),
    ],
)
def test_what_gpus_hold_after_each_round(
    gpu_memory: Callable[[], int | None], expected: dict[str, str], tmp_path: Path
) -> None:
    with FakeEngine() as engine:
        results, exchanges = ask(engine, LEAK, tmp_path, gpu_memory=gpu_memory)
    assert results.keys() == {"leak/kv-pool", "leak/gpu-memory"} and outcomes(results) == expected
    assert sum(name.startswith("leak/gpu-memory/") for name in exchanges) == 5
    if expected.get("leak/gpu-memory") == "failed":
        assert "+10.000 MiB a round" in results["leak/gpu-memory"].explanation


def test_without_a_driver_to_ask_it_is_not_asked(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        results, _ = ask(engine, LEAK, tmp_path)
    assert results.keys() == {"leak/kv-pool"} and outcomes(results) == {}
