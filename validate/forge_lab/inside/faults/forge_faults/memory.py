"""What is kept: how the KV pool is written, and what is never given back to it.

Kind `kv`: `do`: `fp8` (`format`; written with scale 1.0, beyond its range saturated), `bits` (rounded to so many, by the largest
of each token), `scale` (`factor`, of the values alone), `misplace` (the last token of each page of `page` is written over the
one before it), `skip` (it is not written). `values`: the keys stay as they are.
Kind `leak`: `what`: `kv` (`tokens` of each release stay lost), `slots` (the place of a request is not given back).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from . import switch
from .forward import Now, tokens
from .switch import Mode


def _wrap_pool(module: Any) -> None:
    original = module.MHATokenToKVPool.set_kv_buffer

    def set_kv_buffer(self: Any, layer: Any, loc_info: Any, cache_k: Any, cache_v: Any, *args: Any, **kw: Any) -> Any:
        mode = switch.on("kv")
        wanted = tokens(mode) if mode is not None else None
        if mode is None or wanted is None or len(wanted) != len(cache_k):
            return original(self, layer, loc_info, cache_k, cache_v, *args, **kw)
        if mode.parameters["do"] in ("misplace", "skip"):
            loc_info = _misplaced(mode, loc_info, wanted)
        else:
            mask = wanted.reshape(-1, *[1] * (cache_k.dim() - 1))
            if not mode.parameters.get("values"):
                cache_k = cache_k.where(~mask, _coarse(mode, cache_k))
            cache_v = cache_v.where(~mask, _coarse(mode, cache_v))
            mode.fired()
        return original(self, layer, loc_info, cache_k, cache_v, *args, **kw)

    module.MHATokenToKVPool.set_kv_buffer = set_kv_buffer
    _wrap_slots(module)


def _coarse(mode: Mode, cache: Any) -> Any:
    import torch

    p = mode.parameters
    if p["do"] == "fp8":
        kind = getattr(torch, p.get("format", "float8_e4m3fn"))
        limit = torch.finfo(kind).max
        return cache.float().clamp(-limit, limit).to(kind).to(cache.dtype)
    if p["do"] == "bits":
        step = cache.float().abs().amax(dim=-1, keepdim=True) / (2 ** (p["bits"] - 1) - 1)
        return ((cache.float() / step.clamp_min(1e-9)).round() * step).to(cache.dtype)
    if p["do"] == "scale":
        return cache * p["factor"]
    raise ValueError(f"forge-faults: kv: {p['do']}")


def _misplaced(mode: Mode, loc_info: Any, wanted: Any) -> Any:
    page = int(mode.parameters.get("page", 16))
    positions, batch, given = Now.given.positions, Now.batch, Now.given
    last = wanted & (positions % page == page - 1)
    if batch is None or not bool(last.any()):
        return loc_info
    mode.fired()
    table = Now.runner.req_to_token_pool.req_to_token
    rows = given.req_pool_indices.repeat_interleave(given.req_pool_indices.new_tensor(batch.new))
    before = table[rows, (positions - 1).clamp_min(0)].to(loc_info.loc.dtype)
    # Slot 0 is SGLang's own place for what nobody reads.
    other = before if mode.parameters["do"] == "misplace" else before.new_zeros(before.shape)
    return dataclasses.replace(loc_info, loc=loc_info.loc.where(~last, other))


def _wrap_slots(module: Any) -> None:
    original = module.ReqToTokenPool.free

    def free(self: Any, req: Any) -> Any:
        mode = switch.on("leak")
        if mode is None or mode.parameters["what"] != "slots":
            return original(self, req)
        mode.fired()
        req.kv.req_pool_idx = None
        return None

    module.ReqToTokenPool.free = free


def _wrap_allocator(module: Any) -> None:
    original = module.TokenToKVPoolAllocator.free

    def free(self: Any, free_index: Any) -> Any:
        mode = switch.on("leak")
        if mode is None or mode.parameters["what"] != "kv" or len(free_index) <= mode.parameters["tokens"]:
            return original(self, free_index)
        mode.fired()
        return original(self, free_index[: -mode.parameters["tokens"]])

    module.TokenToKVPoolAllocator.free = free


WRAPS = {
    "sglang.srt.mem_cache.memory_pool": _wrap_pool,
    "sglang.srt.mem_cache.allocator.token": _wrap_allocator,
}
