"""Tokens that the numbers do not stand behind.

Kind `sampler`: `do`: `hot` (greedy requests are sampled at `temperature`), `second` (the second best of one step in `steps`),
`greedy` (whatever the temperature), `first` (all get the token of the first in the batch), `exchange` (the batch's first two change
their tokens). The logprobs told are those of the tokens given, except for `exchange`.
"""

from __future__ import annotations

from typing import Any

from . import switch
from .choose import chosen
from .forward import Last
from .switch import Mode


def _wrap(module: Any) -> None:
    original = module.Sampler.forward

    def forward(
        self: Any,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: Any,
        token_ids_logprobs: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        mode = switch.on("sampler")
        # The sampler works in place.
        logits: Any = logits_output.next_token_logits.clone() if mode is not None else None
        taken = original(
            self,
            logits_output,
            sampling_info,
            return_logprob,
            top_logprobs_nums,
            token_ids_logprobs,
            *args,
            **kwargs,
        )
        if mode is None or not len(taken):
            return taken
        other = _other(mode, logits, taken, sampling_info)
        if other is None or bool((other == taken).all()):
            return taken
        mode.fired()
        if return_logprob and mode.parameters["do"] != "exchange":
            found = self.output_logprob_processor.compute_logprobs(
                logits.float().log_softmax(dim=-1), top_logprobs_nums, token_ids_logprobs, other
            )
            found.write_output_to(logits_output)
        return other

    module.Sampler.forward = forward


def _other(mode: Mode, logits: Any, taken: Any, info: Any) -> Any:
    import torch

    p, do = mode.parameters, mode.parameters["do"]
    batch = Last.batch
    wanted = torch.tensor(chosen(mode, batch)) if batch is not None and batch.size == len(taken) else None
    if wanted is None or not bool(wanted.any()):
        return None
    if do == "hot":
        if not info.is_all_greedy:
            return None
        maker = mode.state.setdefault("maker", torch.Generator().manual_seed(mode.seed))
        probabilities = (logits.float() / p["temperature"]).softmax(dim=-1)
        other = torch.multinomial(probabilities, 1, generator=maker).view(-1)
    elif do == "second":
        if not mode.lucky(("step", mode.count("steps")), p["steps"]):
            return None
        other = logits.topk(2, dim=-1).indices[:, 1]
    elif do == "greedy":
        other = logits.argmax(dim=-1)
    elif do == "first":
        other = taken[:1].expand(len(taken)).clone()
    elif do == "exchange":
        if len(taken) < 2:
            return None
        other = taken.clone()
        other[:2] = taken[:2].flip(0)
    else:
        raise ValueError(f"forge-faults: sampler: {do}")
    return taken.where(~wanted, other.to(taken.dtype))


WRAPS = {"sglang.srt.layers.sampler": _wrap}
