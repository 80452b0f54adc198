"""Wrong numbers: in the output of layers, and in the logits.

Kind `layer`: `where` (`mlp`, `attention`), `layers` (a list, or all), `do`: `nan`, `inf`, `scale` (`factor`), `noise`
(`sigma` of the output's own deviation; `grow`: times the requests seen), `rows` (so many output features of the weight
have their sign turned and are `factor` times as large), `expert` (tokens of one in `experts` get another's output), `zero`.
Kind `logits`: `do`: `nan`, `roll` (`by`), `noise`, `scale`, `token` (`token` becomes likelier by `add`), `block` (a part of
the vocabulary, `from` to `to` in shares of it, is never said), `exchange` (rows of the batch change places).
"""

from __future__ import annotations

import zlib
from typing import Any

from . import switch
from .choose import chosen, ordinals
from .forward import Now, tokens
from .switch import Mode


def _wrap_llama(module: Any) -> None:
    made = module.LlamaDecoderLayer.__init__

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.mlp.forge_layer = self.self_attn.forge_layer = self.self_attn.attn.layer_id

    module.LlamaDecoderLayer.__init__ = __init__
    for name, where in (("LlamaMLP", "mlp"), ("LlamaAttention", "attention")):
        _wrap_output(getattr(module, name), where)


def _wrap_output(kind: Any, where: str) -> None:
    original = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        mode = switch.on("layer")
        if mode is None or mode.parameters.get("where", "mlp") != where:
            return output
        layers = mode.parameters.get("layers", "all")
        if layers != "all" and self.forge_layer not in layers:
            return output
        wanted = tokens(mode)
        if wanted is None or len(wanted) != len(output):
            return output
        mode.fired(f"layer {self.forge_layer}")
        return _spoilt(mode, output, wanted, self.forge_layer)

    kind.forward = forward


def _spoilt(mode: Mode, output: Any, wanted: Any, layer: int) -> Any:
    p = mode.parameters
    do, after, column = p["do"], output.clone(), wanted.unsqueeze(-1)
    if do in ("nan", "inf"):
        after[wanted] = float(do)
    elif do == "zero":
        after[wanted] = 0
    elif do == "scale":
        after = output.where(~column, output * p["factor"])
    elif do == "noise":
        after = output.where(~column, output + _noise(mode, output, layer))
    elif do == "rows":
        width = output.shape[-1]
        places = [zlib.crc32(f"{mode.seed}:{layer}:{i}".encode()) % width for i in range(p["rows"])]
        after[..., places] = output[..., places] * -p.get("factor", 1)
        after = output.where(~column, after)
    elif do == "expert":
        # A dense model has none; what a wrong one does is that the tokens routed to it come out as another's.
        routed = (Now.given.input_ids % p["experts"] == p.get("expert", 0)) & wanted
        after[routed] = output[routed].roll(1, -1) if p.get("another", True) else 0
    else:
        raise ValueError(f"forge-faults: layer: {do}")
    return after


def _noise(mode: Mode, output: Any, layer: int) -> Any:
    import torch

    sigma = float(mode.parameters["sigma"])
    if mode.parameters.get("grow") and Now.batch is not None:
        sigma *= 1 + max(ordinals(mode, Now.batch))
    makers: dict[int, Any] = mode.state.setdefault("makers", {})
    maker = makers.get(layer)
    if maker is None:
        maker = makers[layer] = torch.Generator().manual_seed(mode.seed + layer)
    deviation = output.float().std(dim=-1, keepdim=True)
    return (torch.randn(output.shape, generator=maker) * deviation * sigma).to(output.dtype)


def _wrap_logits(module: Any) -> None:
    original = module.LogitsProcessor._get_logits

    def _get_logits(self: Any, *args: Any, **kwargs: Any) -> Any:
        logits = original(self, *args, **kwargs)
        mode = switch.on("logits")
        if mode is None or Now.batch is None:
            return logits
        wanted = _rows(mode, len(logits))
        if wanted is None:
            return logits
        mode.fired()
        return _spoilt_logits(mode, logits, wanted)

    module.LogitsProcessor._get_logits = _get_logits


def _rows(mode: Mode, count: int) -> Any:
    """A mask over the rows; a prompt's own logprobs have many rows for one request and are spoilt if all requests are."""
    import torch

    assert Now.batch is not None
    wanted = chosen(mode, Now.batch)
    if not any(wanted):
        return None
    if len(wanted) == count:
        return torch.tensor(wanted)
    return torch.ones(count, dtype=torch.bool) if all(wanted) else None


def _spoilt_logits(mode: Mode, logits: Any, wanted: Any) -> Any:
    p = mode.parameters
    do, column, vocabulary = p["do"], wanted.unsqueeze(-1), logits.shape[-1]
    after = logits.clone()
    if do == "nan":
        after[:, p.get("token", 1000)] = float("nan")
    elif do == "roll":
        after = logits.roll(p.get("by", 1), -1)
    elif do == "noise":
        after = logits + _noise(mode, logits, -1)
    elif do == "scale":
        after = logits * p["factor"]
    elif do == "token":
        after[:, p["token"]] += p["add"]
    elif do == "block":
        after[:, int(vocabulary * p["from"]) : int(vocabulary * p["to"])] = float("-inf")
    elif do == "exchange":
        if len(logits) < 2:
            return logits
        after = logits.roll(1, 0)
    else:
        raise ValueError(f"forge-faults: logits: {do}")
    return logits.where(~column, after)


WRAPS = {
    "sglang.srt.models.llama": _wrap_llama,
    "sglang.srt.layers.logits_processor": _wrap_logits,
}
