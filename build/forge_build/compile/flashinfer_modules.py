"""Which FlashInfer modules a server asks for: derived from what the manifest says the image is to serve.

Read in SGLang 6ffc74efd and FlashInfer 0.6.5; docs/flashinfer.md names the places.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from forge_build.compile.units import Module, named, template, units
from forge_build.manifest import BuiltWheel
from forge_build.manifest.serves import Serves
from forge_core.errors import UsageError

RECIPE = "flashinfer-jit"
_SHORT = {"bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "e4m3"}
"""As FlashInfer writes a type into a module's name (`filename_safe_dtype_map`)."""


def modules(spec: BuiltWheel, where: str) -> dict[str, Module]:
    """The modules of a wheel, sorted by name: those that follow from `serves`, and those that `modules` names beside them.

    Raises UsageError naming `where` in the manifest when it names an unknown module, none at all, or an architecture whose
    modules are not known here.
    """
    found: dict[str, Module] = {}
    if spec.serves is not None:
        found = {module.name: module for module in derived(spec.serves, spec.architectures, f"{where}.architectures")}
    if spec.modules or not found:
        found |= units(RECIPE, spec.modules, f"{where}.modules")
    return dict(sorted(found.items()))


def derived(serves: Serves, architectures: tuple[str, ...], where: str) -> Iterator[Module]:
    """What servers of that kind load, each once; UsageError for an architecture other than SM120."""
    if foreign := [name for name in architectures if not re.fullmatch(r"12\.0[af]?", name)]:
        raise UsageError(
            f"{where}: which modules {', '.join(foreign)} needs is not known here",
            hint="name them under `modules`, without `serves`",
        )
    if serves.fp4_gemm:
        yield named(RECIPE, "fp4_quantization_120")
    # cuDNN builds its own graph at run time; `auto` may take either
    if {"auto", "flashinfer_cutlass"} & set(serves.fp4_gemm):
        yield named(RECIPE, "fp4_gemm_cutlass_sm120")
    if "flashinfer_cutlass" in serves.moe:
        yield named(RECIPE, "fused_moe_120")
    if "flashinfer" in serves.sampling:
        yield named(RECIPE, "sampling")
    if "flashinfer" in serves.attention:
        yield from _attention(serves)


def _attention(serves: Serves) -> Iterator[Module]:
    """FlashInfer's backend: new tokens in the layers' own type, the prefix in the cache's, and the merge of both."""
    yield named(RECIPE, "cascade")
    for head_dim in sorted(set(serves.head_dims)):
        for kv in dict.fromkeys((serves.dtype, *serves.kv_dtypes)):
            words = {
                "head_dim": head_dim,
                "dtype": serves.dtype,
                "kv": kv,
                "short": _SHORT[serves.dtype],
                "kv_short": _SHORT[kv],
            }
            yield template(RECIPE, "batch_prefill", words)
            # under four query heads for one of the cache a decode without tensor cores; with an 8 bit cache never
            if kv in serves.kv_dtypes and kv != "float8_e4m3fn":
                yield template(RECIPE, "batch_decode", words)
