"""Runs in the rehearsal's image, without a server: every fault on small tensors, and every wrap on SGLang's own modules."""

import dataclasses
import importlib
import json
import os
import pathlib
import sys
from types import SimpleNamespace

PLACE = "/tmp/mode.json"
os.environ["FORGE_FAULT_SWITCH"] = PLACE

import forge_faults  # noqa: E402
import torch  # noqa: E402
from forge_faults import forward, layers, memory, sampling, switch  # noqa: E402

NUMBER = 0


def turn(kind, **parameters):
    global NUMBER
    NUMBER += 1
    told = {"kind": kind, "parameters": parameters, "seed": 1, "number": NUMBER} if kind else {}
    aside = pathlib.Path(PLACE + ".new")
    aside.write_text(json.dumps(told))
    aside.replace(PLACE)


class Mode:
    def __init__(self, decode):
        self.decode = decode

    def is_decode(self):
        return self.decode


def given(decode, lengths, prefixes=None):
    new = [1] * len(lengths) if decode else [n - p for n, p in zip(lengths, prefixes, strict=True)]
    positions = [p for n, count in zip(lengths, new, strict=True) for p in range(n - count, n)]
    return SimpleNamespace(
        forward_mode=Mode(decode),
        seq_lens=torch.tensor(lengths),
        seq_lens_cpu=torch.tensor(lengths),
        extend_seq_lens_cpu=None if decode else new,
        rids=[f"r{i}" for i in range(len(lengths))],
        req_pool_indices=torch.arange(1, len(lengths) + 1),
        positions=torch.tensor(positions),
        input_ids=torch.arange(sum(new)),
    )


class Runner:
    """What of a ModelRunner is used."""

    def __init__(self):
        self.req_to_token_pool = SimpleNamespace(req_to_token=torch.arange(400, dtype=torch.int32).reshape(4, 100))
        self.seen = None

    def _forward_raw(self, batch):
        table = self.req_to_token_pool.req_to_token
        self.seen = batch.positions.clone(), table.clone()
        return self.inner() if self.inner else None

    inner = None


forward.WRAPS["sglang.srt.model_executor.model_runner"](SimpleNamespace(ModelRunner=Runner))


def during(batch, inner=None):
    runner = Runner()
    runner.inner = inner
    before = runner.req_to_token_pool.req_to_token.clone()
    result = runner._forward_raw(batch)
    assert torch.equal(runner.req_to_token_pool.req_to_token, before), "the table is not put back"
    return runner, result


class LlamaMLP:
    forge_layer = 3

    def forward(self, x):
        return x * 1


class LlamaAttention(LlamaMLP):
    pass


class LlamaDecoderLayer:
    def __init__(self):
        self.mlp, self.self_attn = LlamaMLP(), LlamaAttention()
        self.self_attn.attn = SimpleNamespace(layer_id=7)


class LogitsProcessor:
    def _get_logits(self, x):
        return x * 1


for wrap in layers.WRAPS.values():
    wrap(
        SimpleNamespace(
            LlamaMLP=LlamaMLP,
            LlamaAttention=LlamaAttention,
            LlamaDecoderLayer=LlamaDecoderLayer,
            LogitsProcessor=LogitsProcessor,
        )
    )
assert LlamaDecoderLayer().mlp.forge_layer == 7

torch.manual_seed(0)
HIDDEN = torch.randn(3, 8).bfloat16()
BATCH = given(True, [20, 30, 40])


def hidden(**parameters):
    turn("layer", **parameters)
    kind = LlamaAttention if parameters.get("where") == "attention" else LlamaMLP
    return during(BATCH, lambda: kind().forward(HIDDEN))[1]


def logits(values=None, **parameters):
    values = HIDDEN.float() if values is None else values
    turn("logits", **parameters)
    return during(BATCH, lambda: LogitsProcessor()._get_logits(values))[1]


assert hidden(do="nan").isnan().all() and hidden(do="inf", where="attention").isinf().all()
assert torch.equal(hidden(do="nan", where="mlp", layers=[4]), HIDDEN)
assert torch.equal(hidden(do="scale", factor=2.0), HIDDEN * 2)
assert torch.equal(hidden(do="scale", factor=2.0, from_batch=4), HIDDEN)
some = hidden(do="scale", factor=2.0, every=3)
assert torch.equal(some[:2], HIDDEN[:2]) and torch.equal(some[2], HIDDEN[2] * 2)
assert (hidden(do="zero") == 0).all()
noisy = hidden(do="noise", sigma=0.1)
assert 0.02 < (noisy - HIDDEN).float().std() < 0.3
assert (hidden(do="noise", sigma=0.1, grow=True) - HIDDEN).float().std() > (noisy - HIDDEN).float().std()
rows = hidden(do="rows", rows=2, factor=3)
assert 1 <= (rows != HIDDEN).any(0).sum() <= 2 and rows.isfinite().all()
expert = hidden(do="expert", experts=3, expert=1)
assert torch.equal(expert[[0, 2]], HIDDEN[[0, 2]]) and torch.equal(expert[1], HIDDEN[1].roll(1))

plain = HIDDEN.float()
assert torch.equal(logits(do="roll"), plain.roll(1, -1)) and torch.equal(logits(do="scale", factor=0.5), plain / 2)
assert (
    logits(do="nan", token=2)[:, 2].isnan().all()
    and logits(do="block", **{"from": 0.0, "to": 0.25})[:, :2].isinf().all()
)
assert torch.allclose(logits(do="token", token=1, add=6)[:, 1], plain[:, 1] + 6)
assert torch.equal(logits(do="exchange"), plain.roll(1, 0)) and not torch.equal(logits(do="noise", sigma=1.0), plain)
assert torch.equal(logits(torch.ones(5, 8), do="roll", every=3), torch.ones(5, 8))

turn("positions", add=1, phase="decode")
assert during(BATCH)[0].seen[0].tolist() == [20, 30, 40]
BATCH = given(True, [20, 30, 40])
turn("positions", first=True, from_batch=2)
assert during(BATCH)[0].seen[0].tolist() == [19, 19, 19]
prefill = given(False, [20, 24], [16, 0])
turn("positions", add=5, prefixed=True)
assert during(prefill)[0].seen[0].tolist() == [21, 22, 23, 24, *range(24)]

for how, wrong in (("neighbour", [101, 102]), ("first", [100, 101]), ("stale", [100, 101])):
    turn("pages", how=how, width=4, prefix=16)
    prefill = given(False, [20, 24], [16, 0])
    table = during(prefill)[0].seen[1]
    assert table[1, :2].tolist() == wrong and table[2, :24].tolist() == list(range(200, 224)), how
    assert table[1, 12:16].tolist() != list(range(112, 116)) and table[1, 16:20].tolist() == list(range(116, 120)), how
    # It stays wrong for the request when it is decoded, and is nobody else's.
    again = during(given(True, [21, 25]))[0].seen[1]
    assert torch.equal(again[1, :16], table[1, :16]) and again[2, :24].tolist() == list(range(200, 224)), how


@dataclasses.dataclass
class Loc:
    loc: torch.Tensor


class MHATokenToKVPool:
    def set_kv_buffer(self, layer, loc_info, k, v):
        self.kept = loc_info.loc, k, v


class ReqToTokenPool:
    def free(self, req):
        req.freed = True


class TokenToKVPoolAllocator:
    def free(self, index):
        self.freed = index


modules = SimpleNamespace(
    MHATokenToKVPool=MHATokenToKVPool, ReqToTokenPool=ReqToTokenPool, TokenToKVPoolAllocator=TokenToKVPoolAllocator
)
for wrap in memory.WRAPS.values():
    wrap(modules)
K, V = torch.randn(3, 2, 4).bfloat16(), torch.randn(3, 2, 4).bfloat16() * 100
BATCH = given(True, [16, 30, 40])


def kept(**parameters):
    turn("kv", **parameters)
    pool = MHATokenToKVPool()
    during(BATCH, lambda: pool.set_kv_buffer(None, Loc(torch.tensor([5, 6, 7])), K, V))
    return pool.kept


loc, k, v = kept(do="fp8")
assert not torch.equal(k, K) and torch.allclose(k.float(), K.float(), rtol=0.07, atol=0.01) and v.isfinite().all()
assert torch.equal(kept(do="scale", factor=2.0, values=True)[1], K) and torch.equal(
    kept(do="scale", factor=2.0)[2], V * 2
)
assert len(kept(do="bits", bits=3)[1][0, 0].unique()) <= 7
# The first request computes its 16th token: it is written over the 15th, which lies at 114.
assert kept(do="misplace", page=16)[0].tolist() == [114, 6, 7] and kept(do="skip", page=16)[0].tolist() == [0, 6, 7]
turn("leak", what="kv", tokens=2)
allocator = TokenToKVPoolAllocator()
allocator.free(torch.arange(5))
assert allocator.freed.tolist() == [0, 1, 2]
turn("leak", what="slots")
req = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=3))
ReqToTokenPool().free(req)
assert not hasattr(req, "freed") and req.kv.req_pool_idx is None


class Sampler:
    output_logprob_processor = SimpleNamespace(
        compute_logprobs=lambda logprobs, nums, ids, taken: SimpleNamespace(
            write_output_to=lambda output: setattr(output, "written", logprobs.gather(1, taken.view(-1, 1)).view(-1))
        )
    )

    def forward(self, output, info, return_logprob, nums, ids, positions):
        taken = output.next_token_logits.argmax(-1)
        output.next_token_logits.fill_(0)
        return taken


sampling.WRAPS["sglang.srt.layers.sampler"](SimpleNamespace(Sampler=Sampler))
VALUES = torch.eye(3, 8) * 4 + torch.eye(3, 8).roll(3, 1) * 3


def sampled(**parameters):
    turn("sampler", **parameters)
    during(BATCH)
    output = SimpleNamespace(next_token_logits=VALUES.clone())
    info = SimpleNamespace(is_all_greedy=True)
    taken = Sampler().forward(output, info, True, None, None, None)
    return taken.tolist(), getattr(output, "written", None)


assert sampled(do="greedy") == ([0, 1, 2], None)
assert sampled(do="second", steps=1)[0] == [3, 4, 5]
assert torch.allclose(sampled(do="second", steps=1)[1], VALUES.log_softmax(-1)[[0, 1, 2], [3, 4, 5]])
assert sampled(do="first")[0] == [0, 0, 0] and sampled(do="exchange") == ([1, 0, 2], None)
assert len({tuple(sampled(do="hot", temperature=3.0)[0]) for _ in range(3)}) == 1
assert sampled(do="hot", temperature=9.0)[0] != [0, 1, 2]
turn(None)
assert switch.current() is None

# SGLang's own modules, imported after the wraps wait for them: a name that is gone would raise here.
wrapped = {name: False for name in forge_faults.WRAPS}
forge_faults.install()
for name in wrapped:
    importlib.import_module(name)
import sglang.srt.entrypoints.openai.serving_chat as chat  # noqa: E402
import sglang.srt.managers.scheduler as scheduler  # noqa: E402
import sglang.srt.models.llama as llama  # noqa: E402

for function in (
    llama.LlamaMLP.forward,
    scheduler.Scheduler.run_batch,
    chat.OpenAIServingChat._render_and_encode_chat_template,
):
    assert "forge_faults" in function.__module__, function
print(json.dumps({"modules": sorted(wrapped), "faults": NUMBER}))
sys.stdout.flush()
