"""Which FlashInfer modules follow from what an image is to serve."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from forge_build import manifest as manifests
from forge_build.compile.flashinfer_modules import modules
from forge_build.manifest import BuiltWheel
from forge_core.errors import UsageError

CHECK = {"demand": ["sm_120a"], "allow": ["sm_120a"]}
PREFILL = (
    "batch_prefill_with_kv_cache_dtype_q_{q}_dtype_kv_{kv}_dtype_o_{q}_dtype_idx_i32_head_dim_qk_{dim}_head_dim_vo_{dim}"
    "_posenc_0_use_swa_False_use_logits_cap_False_f16qk_False"
)
DECODE = (
    "batch_decode_with_kv_cache_dtype_q_{q}_dtype_kv_{kv}_dtype_o_{q}_dtype_idx_i32_head_dim_qk_{dim}_head_dim_vo_{dim}"
    "_posenc_0_use_swa_False_use_logits_cap_False"
)


def wheel(serves: dict[str, Any] | None = None, **other: Any) -> BuiltWheel:
    base: dict[str, Any] = {
        "source": "flashinfer",
        "recipe": "flashinfer-jit",
        "architectures": ["12.0a"],
        "check": CHECK,
    }
    return BuiltWheel.model_validate(base | ({"serves": serves} if serves else {}) | other)


def test_nothing_but_what_is_served_is_compiled() -> None:
    assert list(modules(wheel({"attention": ["triton"], "sampling": ["flashinfer"]}), "x")) == ["sampling"]
    served = {"attention": ["triton"], "sampling": ["pytorch"], "fp4_gemm": ["flashinfer_cudnn"]}
    assert list(modules(wheel(served), "x")) == ["fp4_quantization_120"]


@pytest.mark.parametrize("backend", ["flashinfer_cutlass", "auto"])
def test_the_gemm_that_the_server_may_choose_is_there(backend: str) -> None:
    found = modules(wheel({"attention": ["triton"], "fp4_gemm": [backend], "moe": ["flashinfer_cutlass"]}), "x")
    assert list(found) == ["fp4_gemm_cutlass_sm120", "fp4_quantization_120", "fused_moe_120", "sampling"]


def test_attention_is_asked_for_by_head_size_and_type() -> None:
    found = modules(wheel({"attention": ["flashinfer"], "head_dims": [128, 64, 128], "sampling": ["pytorch"]}), "x")
    names = {kind.format(q="bf16", kv="bf16", dim=dim) for kind in (PREFILL, DECODE) for dim in (64, 128)}
    assert set(found) == names | {"cascade"}
    call = found[PREFILL.format(q="bf16", kv="bf16", dim=64)].call
    place, _, given = call.partition(" ")
    assert place == "flashinfer.jit.attention.modules:gen_batch_prefill_module"
    assert json.loads(given) == {
        "backend": "fa2",
        "dtype_q": "torch.bfloat16",
        "dtype_kv": "torch.bfloat16",
        "dtype_o": "torch.bfloat16",
        "dtype_idx": "torch.int32",
        "head_dim_qk": 64,
        "head_dim_vo": 64,
        "pos_encoding_mode": 0,
        "use_sliding_window": False,
        "use_logits_soft_cap": False,
        "use_fp16_qk_reduction": False,
    }


def test_an_8_bit_cache_needs_the_layers_own_type_too_and_no_plain_decode() -> None:
    served = {"attention": ["flashinfer"], "head_dims": [64], "dtype": "float16", "kv_dtypes": ["float8_e4m3fn"]}
    found = modules(wheel(served | {"sampling": ["pytorch"]}), "x")
    assert set(found) == {"cascade", *(PREFILL.format(q="f16", kv=kv, dim=64) for kv in ("f16", "e4m3"))}


def test_modules_by_hand_stand_alone_or_beside() -> None:
    assert list(modules(wheel(modules=["rope", "norm"]), "x")) == ["norm", "rope"]
    assert list(modules(wheel({"attention": ["triton"]}, modules=["rope"]), "x")) == ["rope", "sampling"]
    with pytest.raises(UsageError, match=r"x\.modules: no module is named"):
        modules(wheel(), "x")
    with pytest.raises(UsageError, match=r"x\.modules: .* knows no 'magic'"):
        modules(wheel({"attention": ["triton"]}, modules=["magic"]), "x")
    # a family is no module
    with pytest.raises(UsageError, match="knows no 'batch_prefill'"):
        modules(wheel(modules=["batch_prefill"]), "x")


def test_another_architecture_is_refused() -> None:
    with pytest.raises(UsageError, match=r"x\.architectures: which modules 10\.0a"):
        modules(wheel({"attention": ["triton"]}, architectures=["12.0a", "10.0a"]), "x")


@pytest.mark.parametrize(
    "serves",
    [
        {"attention": ["flashinfer"]},
        {"attention": ["triton"], "head_dims": [64]},
        {"attention": []},
        {"attention": ["triton"], "kv_dtypes": []},
        # killed at launch, or answering nonsense, on SM120
        {"attention": ["triton"], "moe": ["flashinfer_trtllm"]},
        {"attention": ["triton"], "moe": ["flashinfer_cutedsl"]},
        {"attention": ["triton"], "fp4_gemm": ["flashinfer_trtllm"]},
        {"attention": ["trtllm_mha"]},
    ],
)
def test_what_cannot_be_served_is_a_mistake(serves: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        wheel(serves)


def test_every_module_of_the_manifests_is_known() -> None:
    for profile in manifests.profiles():
        for name, spec in manifests.load(profile).wheels.items():
            if spec.recipe == "flashinfer-jit":
                assert modules(spec, f"wheels.{name}")
