from __future__ import annotations

import pytest

from forge_validate import exchange, serving
from forge_validate.resolved import differing, resolved

from .conftest import WIRE

INFO = exchange.load(WIRE.parent / "exchanges" / "smoke" / "server-info.json").response
LOG = [
    "[2026-11-30 08:34:31] Load weight end. elapsed=0.45 s, type=LlamaForCausalLM, avail mem=20.83 GB, mem usage=0.23 GB.",
    "[2026-11-30 08:34:34] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 16384, K size: 0.18 GB, V size: 0.18 GB",
    "[2026-11-30 08:34:35] KV Cache is allocated. dtype: torch.float16, #tokens: 1, K size: 0.18 GB, V size: 0.18 GB",
]


def test_what_a_real_server_tells() -> None:
    found = resolved(INFO, LOG, serving.load("rehearsal").tells)
    assert found["attention_backend"] == "torch_native"
    assert found["sampling_backend"] == "pytorch" and found["version"] == "0.5.23"
    assert found["log.kv-dtype"] == "torch.bfloat16" and found["log.model"] == "LlamaForCausalLM"
    assert not any("key" in name for name in found)


def test_what_the_scheduler_made_of_a_flag_counts() -> None:
    info = {"attention_backend": "auto", "internal_states": [{"attention_backend": "triton", "api_key": "x"}]}
    assert resolved(info, [], {}) == {"attention_backend": "triton"}


def test_a_server_that_tells_nothing() -> None:
    assert resolved(None, [], {}) == {} == resolved({"internal_states": []}, ["x"], {"a": "(y)"})


def test_flags_of_the_real_serving_are_told_back() -> None:
    assert differing(INFO, serving.load("rehearsal").intended()) == ()


@pytest.mark.parametrize(
    ("name", "wanted", "told"),
    [
        ("attention_backend", "triton", "torch_native"),
        ("max_running_requests", 16, "8"),
        ("enable_metrics", False, "True"),
        ("no_such_setting", "x", "?"),
        ("max_total_tokens", "many", "16384"),
    ],
)
def test_a_flag_that_was_overruled(name: str, wanted: str | int | bool, told: str) -> None:
    assert differing(INFO, {name: wanted, "device": "cpu"}) == ((name, str(wanted), told),)


def test_what_was_left_to_the_server_cannot_differ() -> None:
    plan = serving.load("rehearsal")
    flags = {"moe-runner-backend": "auto", "fp4-gemm-backend": "cudnn", "tp-size": 2}
    some = plan.model_copy(update={"flags": flags, "told_as": {"fp4-gemm-backend": "fp4_gemm_runner_backend"}})
    assert some.intended() == {"fp4_gemm_runner_backend": "cudnn", "tp_size": 2}
