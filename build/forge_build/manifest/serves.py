"""The manifest's words for what the image is to serve, as far as they decide which FlashInfer modules a server asks for.

The names are SGLang's own, those of its flags; what cannot run on SM120, or was reported to answer wrongly there, is not among
them. docs/flashinfer.md says which modules follow.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from forge_core.model import Frozen

Dtype = Literal["bfloat16", "float16"]
KvDtype = Literal["bfloat16", "float16", "float8_e4m3fn"]
"""torch's names."""


class Serves(Frozen):
    """What a server of this image may be started with; each is a set, so that one image can serve more than one way."""

    moe: tuple[Literal["flashinfer_cutlass", "cutlass", "triton"], ...] = ()
    """`--moe-runner-backend`."""
    fp4_gemm: tuple[Literal["auto", "flashinfer_cudnn", "flashinfer_cutlass"], ...] = ()
    """`--fp4-gemm-backend`; none: no NVFP4 checkpoint."""
    attention: Annotated[tuple[Literal["flashinfer", "triton"], ...], Field(min_length=1)]
    """`--attention-backend`."""
    sampling: Annotated[tuple[Literal["flashinfer", "pytorch"], ...], Field(min_length=1)] = ("flashinfer",)
    """`--sampling-backend`; the server's own choice is `flashinfer`."""
    head_dims: tuple[Annotated[int, Field(ge=64, le=256, multiple_of=64)], ...] = ()
    """Sizes of an attention head, of the models that run with `flashinfer`."""
    dtype: Dtype = "bfloat16"
    """`--dtype`: of activations."""
    kv_dtypes: Annotated[tuple[KvDtype, ...], Field(min_length=1)] = ("bfloat16",)
    """`--kv-cache-dtype`."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if ("flashinfer" in self.attention) != bool(self.head_dims):
            raise ValueError("`head_dims` goes with the attention `flashinfer`, and only with it")
        return self
