"""What a server tells of its sizes, whatever it is: from its own description and from its metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forge_validate.exchange import Exchange, Request
from forge_validate.families.family import Ask
from forge_validate.resolved import told

if TYPE_CHECKING:
    from forge_validate.judge import Bench

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? ([0-9.eE+-]+|NaN|[+-]Inf)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

RUNNING = ("sglang:num_running_reqs", "vllm:num_requests_running")
"""Gauges of requests that are being computed."""
WAITING = ("sglang:num_queue_reqs", "vllm:num_requests_waiting")
"""Gauges of requests in the queue."""
KV_USED = ("sglang:kv_used_tokens", "sglang:num_used_tokens", "vllm:kv_cache_usage_perc")
"""Gauges of the part of the KV pool that requests hold; what the prefix cache could give up does not count."""
CACHED = ("sglang:cached_tokens_total", "vllm:prefix_cache_hits_total")
"""Counters of prompt tokens that came from the prefix cache."""
RESIDENT = ("process_resident_memory_bytes",)
"""Memory of the process that answers /metrics; SGLang's many processes do not tell it."""


@dataclass(frozen=True)
class About:
    """Sizes; none: not told."""

    max_running: int | None = None
    """Requests that are computed at one time."""
    page: int | None = None
    """Tokens of a page (block) of the KV pool: the grain of the prefix cache, in SGLang down to 1."""
    pool: int | None = None
    """Tokens of the KV pool."""
    window: int | None = None
    """Tokens of a prompt and its answer together."""
    input: int | None = None
    """Tokens of which a prompt must be shorter, where the server sets a limit of its own."""
    chunk: int | None = None
    """Tokens that are prefilled in one step, a longer prompt in several; 0: all in one."""
    graphs: tuple[int, ...] = ()
    """Batch sizes for which a CUDA graph was captured."""


def asks(family: str, bench: Bench, place: str = "about") -> tuple[Ask, ...]:
    """What to ask for `about`: whatever the server offers of it."""
    found = []
    if "native" in bench.offers:
        found.append(Ask(f"{family}/{place}/server-info", Request(method="GET", path="/server_info"), timeout=30))
    if "metrics" in bench.offers:
        found.append(metrics(f"{family}/{place}/metrics"))
    return tuple(found)


def models(place: str) -> Ask:
    """An ask for the list of models; both servers tell the window there (`max_model_len`)."""
    return Ask(f"{place}/models", Request(method="GET", path="/v1/models"), timeout=30)


def metrics(name: str, follows: str | None = None) -> Ask:
    """An ask for the metrics."""
    return Ask(name, Request(method="GET", path="/metrics"), timeout=30, follows=follows)


def read(exchanges: Mapping[str, Exchange], family: str, place: str = "about") -> About:
    """The sizes from the exchanges of `asks`."""
    info = exchanges.get(f"{family}/{place}/server-info")
    text = exchanges.get(f"{family}/{place}/metrics")
    settings = told(info.response) if info is not None else {}
    labels = _labels(text.text or "", "vllm:cache_config_info") if text is not None else {}
    running = _whole(settings.get("effective_max_running_requests_per_dp")) or _whole(
        settings.get("max_running_requests")
    )
    page = _whole(settings.get("page_size")) or _whole(labels.get("block_size"))
    blocks = _whole(labels.get("num_gpu_blocks"))
    chunk = settings.get("chunked_prefill_size")
    return About(
        max_running=running * (_whole(settings.get("dp_size")) or 1) if running else None,
        page=page,
        pool=_whole(settings.get("max_total_num_tokens")) or (blocks * page if blocks and page else None),
        window=_window(exchanges.get(f"{family}/{place}/models")) or _whole(settings.get("context_length")),
        input=_whole(settings.get("max_req_input_len")),
        # SGLang: -1 is off.
        chunk=0 if isinstance(chunk, int) and chunk <= 0 else _whole(chunk),
        graphs=_graphs(info.response if info is not None else None),
    )


@dataclass(frozen=True)
class Load:
    """What a server has at work at one moment; none: not told."""

    running: float | None = None
    waiting: float | None = None
    kv: float | None = None
    """What requests hold of the KV pool: tokens in SGLang, a share in vLLM. The prefix cache's part does not count."""

    @property
    def idle(self) -> bool | None:
        """Whether nothing runs and nothing waits."""
        return None if self.running is None or self.waiting is None else self.running == 0 and self.waiting == 0


def load_asks(name: str, bench: Bench) -> tuple[Ask, ...]:
    """What to ask for a `Load`: SGLang's own /v1/loads, which is exact when idle, and the metrics, which may lag there."""
    found = []
    if "native" in bench.offers:
        found.append(Ask(f"{name}/loads", Request(method="GET", path="/v1/loads?include=core"), timeout=30))
    if "metrics" in bench.offers:
        found.append(metrics(f"{name}/metrics"))
    return tuple(found)


def load(exchanges: Iterable[Exchange]) -> Load:
    """The load from the exchanges of `load_asks`."""
    for one in sorted(exchanges, key=lambda one: one.name):
        if one.status == 200 and one.request.path.startswith("/v1/loads") and isinstance(one.response, dict):
            ranks = [rank for rank in one.response.get("loads") or () if isinstance(rank, dict)]
            if ranks:
                return Load(
                    _sum(ranks, "num_running_reqs"), _sum(ranks, "num_waiting_reqs"), _sum(ranks, "num_used_tokens")
                )
        if one.status == 200 and one.request.path == "/metrics":
            return Load(gauge(one, RUNNING), gauge(one, WAITING), gauge(one, KV_USED))
    return Load()


def _sum(ranks: Sequence[Mapping[str, Any]], name: str) -> float | None:
    values = [float(rank[name]) for rank in ranks if isinstance(rank.get(name), (int, float))]
    return sum(values) if len(values) == len(ranks) else None


def gauge(exchange: Exchange | None, names: tuple[str, ...]) -> float | None:
    """The first of these metrics that an exchange with /metrics tells, summed over its labels; none: it tells none."""
    if exchange is None or exchange.status != 200 or not exchange.text:
        return None
    samples = _SAMPLE.findall(exchange.text)
    for name in names:
        if found := [float(value) for sample, _, value in samples if sample == name]:
            return sum(found)
    return None


def _labels(text: str, name: str) -> dict[str, str]:
    return next((dict(_LABEL.findall(labels)) for sample, labels, _ in _SAMPLE.findall(text) if sample == name), {})


def _window(models: Exchange | None) -> int | None:
    """The smallest window of the models listed."""
    body = models.response if models is not None and models.status == 200 else None
    listed = body.get("data") if isinstance(body, dict) else None
    found = [_whole(one.get("max_model_len")) for one in listed or () if isinstance(one, dict)]
    return min((size for size in found if size is not None), default=None)


def _graphs(info: Any) -> tuple[int, ...]:
    states = info.get("internal_states") if isinstance(info, dict) else None
    inner = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    found = inner.get("decode_cuda_graph_bs") or inner.get("cuda_graph_bs") or ()
    return tuple(sorted(size for size in found if isinstance(size, int) and size > 0))


def _whole(value: Any) -> int | None:
    try:
        return int(value) if value is not None and not isinstance(value, bool) and int(value) > 0 else None
    except (TypeError, ValueError):
        return None
