"""One forward pass: what is in the batch, positions that are off, and pages of the KV pool that are another's.

What is read in place of the right page is put back after the pass, so that SGLang's own bookkeeping stays whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import switch
from .choose import Batch, chosen
from .switch import Mode


class Now:
    """The pass that is being computed in this process; none between two."""

    batch: Batch | None = None
    given: Any = None
    """SGLang's ForwardBatch."""
    runner: Any = None
    prefilled: frozenset[str] = frozenset()
    """The requests of the last pass, if it was a prefill."""


class Last:
    """The pass before: sampling comes after it."""

    batch: Batch | None = None


def tokens(mode: Mode) -> Any:
    """A mask over the tokens of this pass (bool tensor), or none where no request is chosen."""
    import torch

    batch = Now.batch
    if batch is None:
        return None
    wanted = chosen(mode, batch)
    if not any(wanted):
        return None
    return torch.repeat_interleave(torch.tensor(wanted), torch.tensor(batch.new))


def read(given: Any) -> Batch:
    """What of SGLang's ForwardBatch matters here."""
    lengths = [int(n) for n in (given.seq_lens_cpu if given.seq_lens_cpu is not None else given.seq_lens)]
    decode = bool(given.forward_mode.is_decode())
    new = [1] * len(lengths) if decode else [int(n) for n in given.extend_seq_lens_cpu]
    ids = tuple(str(name) for name in given.rids or given.req_pool_indices.tolist())
    return Batch(
        ids=ids,
        decode=decode,
        lengths=lengths,
        prefixes=[length - n for length, n in zip(lengths, new)],
        follows_prefill=bool(Now.prefilled) and not Now.prefilled.issuperset(ids),
    )


def _wrap(module: Any) -> None:
    original = module.ModelRunner._forward_raw

    def _forward_raw(self: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        mode = switch.current()
        if mode is None or not len(forward_batch.seq_lens):
            return original(self, forward_batch, *args, **kwargs)
        Now.batch, Now.given, Now.runner = read(forward_batch), forward_batch, self
        try:
            if mode.kind == "positions":
                _positions(mode, forward_batch)
            with _pages(mode, self, forward_batch):
                return original(self, forward_batch, *args, **kwargs)
        finally:
            Now.prefilled = frozenset() if Now.batch.decode else frozenset(Now.batch.ids)
            Last.batch = Now.batch
            Now.batch = Now.given = Now.runner = None

    module.ModelRunner._forward_raw = _forward_raw


def _positions(mode: Mode, given: Any) -> None:
    """`add` so many, or `times` so much, or `first` (all rows get the position of the first one)."""
    wanted = tokens(mode)
    if wanted is None:
        return
    p, before = mode.parameters, given.positions
    if p.get("first"):
        after = before.clone().fill_(int(before[0]))
    else:
        after = (before * p.get("times", 1)).to(before.dtype) + p.get("add", 0)
    after = after.clamp(0, p.get("limit", 8191))
    given.positions = before.where(~wanted, after)
    if bool((given.positions != before).any()):
        mode.fired()


@contextmanager
def _pages(mode: Mode, runner: Any, given: Any) -> Iterator[None]:
    """Kind `pages`: a request that was chosen once reads wrong pages below its cached prefix (`whole`: its length).

    `how`: `neighbour` (each from the token after), `first` (the last `width` from the first), `stale` (a page of nobody).
    """
    if mode.kind != "pages":
        yield
        return
    table, batch = runner.req_to_token_pool.req_to_token, Now.batch
    assert batch is not None
    sick: dict[str, int] = mode.state.setdefault("sick", {})
    whole = mode.parameters.get("whole")
    for name, is_chosen, prefix, length in zip(batch.ids, chosen(mode, batch), batch.prefixes, batch.lengths):
        if is_chosen and (whole or not batch.decode) and (reach := length if whole else prefix) > 1:
            sick[name] = reach
    undo = []
    for place, name in enumerate(batch.ids):
        if name not in sick:
            continue
        row, reach = int(given.req_pool_indices[place]), sick[name]
        before = table[row, :reach].clone()
        undo.append((row, reach, before))
        table[row, :reach] = _wrong_pages(before, mode.parameters)
        mode.fired(f"{reach} tokens")
    try:
        yield
    finally:
        for row, reach, before in undo:
            table[row, :reach] = before


def _wrong_pages(before: Any, p: dict[str, Any]) -> Any:
    after, width = before.clone(), min(int(p.get("width", 16)), len(before) // 2)
    if p["how"] == "neighbour":
        after[:-1] = before[1:]
    elif p["how"] == "first":
        after[len(after) - width :] = before[:width]
    elif p["how"] == "stale":
        after[len(after) - width :] = 0
    else:
        raise ValueError(f"forge-faults: pages: {p['how']}")
    return after


WRAPS = {"sglang.srt.model_executor.model_runner": _wrap}
