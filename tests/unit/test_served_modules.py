"""What the image is built to serve against what its server is started with: two files, on two sides, of one profile."""

from __future__ import annotations

import pytest

from forge_build import manifest as manifests
from forge_build.compile.flashinfer_modules import modules
from forge_validate import serving

KV = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp8_e4m3": "float8_e4m3fn"}
"""`--kv-cache-dtype` as SGLang writes it, to torch's name."""
WITH = [p for p in manifests.profiles() if any(wheel.serves for wheel in manifests.load(p).wheels.values())]


def test_the_production_profile_says_what_it_serves() -> None:
    assert "sm120" in WITH


@pytest.mark.parametrize("profile", WITH)
def test_every_backend_that_the_server_is_told_to_take_was_compiled_for(profile: str) -> None:
    (serves,) = [wheel.serves for wheel in manifests.load(profile).wheels.values() if wheel.serves]
    flags = serving.load(profile).flags
    # A backend that is left to the server is one that nobody compiled for.
    assert flags["moe-runner-backend"] in serves.moe
    assert flags["fp4-gemm-backend"] in serves.fp4_gemm
    assert flags["attention-backend"] in serves.attention
    assert flags.get("sampling-backend", "flashinfer") in serves.sampling
    assert KV[str(flags["kv-cache-dtype"])] in serves.kv_dtypes
    assert KV[str(flags.get("dtype", "bfloat16"))] == serves.dtype


def test_the_modules_of_the_production_image() -> None:
    spec = manifests.load("sm120").wheels["flashinfer-jit-cache"]
    found = set(modules(spec, "wheels.flashinfer-jit-cache"))
    assert found >= {"fp4_quantization_120", "fp4_gemm_cutlass_sm120", "fused_moe_120", "sampling", "cascade"}
    assert found >= {"norm", "page", "rope"}
    assert {name.split("_with_")[0] for name in found if "_with_" in name} == {"batch_prefill", "batch_decode"}
