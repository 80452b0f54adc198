"""Leaks: after equal rounds of load the KV pool is back at its baseline, and the memory of the server does not grow.

The load has requests that end, that are cancelled and that are refused, since what is left behind is mostly theirs.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from forge_core.model import Frozen
from forge_validate.checks.result import CheckResult
from forge_validate.exchange import Exchange, Request
from forge_validate.families import about, prompts
from forge_validate.families.family import GPU_MEMORY, MEMORY, Ask, Wave, Waves, named, result
from forge_validate.families.shrink import Size, Tried
from forge_validate.families.slope import slope
from forge_validate.policy import Threshold

if TYPE_CHECKING:
    from forge_validate.judge import Bench

_POLL_S = 0.5
_MIB = 1 << 20


class Settings(Frozen):
    """The section `leak` of a suite."""

    rounds: Annotated[int, Field(ge=5)]
    warm_up: Annotated[int, Field(ge=1)]
    """First rounds, which fill caches and are not counted for the memory."""
    at_once: Annotated[int, Field(ge=3)]
    """Requests of a round."""
    words: Annotated[int, Field(gt=0)]
    """Of each prompt; none was seen before."""
    tokens: Annotated[int, Field(gt=0)]
    """Of each answer."""
    growth: Threshold | None = None
    """MiB that the server's memory may grow in a round: what the interval of the slope must stay below; none: not asked."""
    gpu_growth: Threshold | None = None
    """The same for the memory of its GPUs, where their driver can be asked from here; none: not asked."""
    drain: Annotated[float, Field(gt=0)]
    """Seconds for the KV pool to be back at its baseline."""
    timeout: Annotated[float, Field(gt=0)]
    """Seconds for one answer."""


class Leak:
    """The family."""

    name = "leak"
    settings = Settings
    checks = "the KV pool back at its baseline, memory over rounds of load with the interval of its slope"
    # Each that still leaks waits for the whole drain.
    tries = 3

    def waves(self, settings: Settings, bench: Bench) -> Waves:
        """The baseline after one request, then round by round the load, the pool and the memory."""
        (first,) = yield Wave((self._ask(settings, bench, "first/0"),))
        took = first.seconds
        baseline = yield from self._pool_at(settings, bench, "baseline", None)
        for number in range(settings.rounds):
            asks = (
                self._load(settings, bench, f"round-{number}/{index}", index, took if number % 2 else None)
                for index in range(settings.at_once)
            )
            yield Wave(tuple(asks))
            yield from self._pool_at(settings, bench, f"after-{number}", baseline)
            if settings.growth is not None:
                yield Wave((Ask(f"leak/memory/{number}", Request(method="GET", path=MEMORY), timeout=30),))
            if settings.gpu_growth is not None and "gpu-memory" in bench.offers:
                yield Wave((Ask(f"leak/gpu-memory/{number}", Request(method="GET", path=GPU_MEMORY), timeout=30),))

    def judge(self, settings: Settings, bench: Bench, exchanges: Mapping[str, Exchange]) -> tuple[CheckResult, ...]:
        """`kv-pool` and, where a limit is given, `memory`; `gpu-memory`, where that can be asked, too."""
        found = [self._pool(settings, exchanges)]
        if settings.growth is not None:
            found.append(_memory("memory", settings, settings.growth, exchanges))
        if settings.gpu_growth is not None and ("gpu-memory" in bench.offers or "leak/gpu-memory/0" in exchanges):
            found.append(_memory("gpu-memory", settings, settings.gpu_growth, exchanges))
        return tuple(found)

    def cost(self, settings: Settings) -> int:
        """As if no request were cancelled."""
        return (settings.rounds * settings.at_once + 1) * (prompts.filler_tokens(settings.words) + settings.tokens)

    def start(self, settings: Settings, failed: CheckResult, exchanges: Mapping[str, Exchange]) -> Size | None:
        """One round of load; that memory grows takes many to see."""
        return Size(batch=settings.at_once) if failed.check == "leak/kv-pool" else None

    def again(
        self,
        settings: Settings,
        bench: Bench,
        failed: CheckResult,
        size: Size,
        exchanges: Mapping[str, Exchange],
        place: str,
    ) -> Tried:
        """The pool, fewer requests, the pool; the first one is cancelled, since what is left behind is mostly theirs."""
        place = place.removeprefix("leak/")
        before = yield from self._pool_at(settings, bench, f"{place}/before", None)
        yield Wave(
            tuple(self._load(settings, bench, f"{place}/load/{index}", index + 2) for index in range(size.batch))
        )
        after = yield from self._pool_at(settings, bench, f"{place}/after", before)
        return before is not None and after is not None and after > before

    def line(
        self,
        settings: Settings,
        bench: Bench,
        failed: CheckResult,
        size: Size,
        exchanges: Mapping[str, Exchange],
    ) -> str:
        """What is held, the requests, what is held once they are over: it must be the same."""
        look = prompts.curl(about.load_asks("", bench)[0].request)
        load = (
            prompts.curl_load(self._load(settings, bench, "", index + 2), exchanges["leak/first/0"].seconds)
            for index in range(size.batch)
        )
        return f"{look}; {' '.join(load)} wait; sleep {settings.drain:.0f}; {look}"

    def _load(self, settings: Settings, bench: Bench, place: str, index: int, early: float | None = None) -> Ask:
        """A request of a round. Every third is cancelled: in the midst of its answer, or `early`, a fifth of so many seconds."""
        whole = self._ask(settings, bench, place)
        if index % 3 != 2:
            return whole
        return replace(whole, abort_at=3) if early is None else replace(whole, abort_after=early * 0.2)

    def _ask(self, settings: Settings, bench: Bench, place: str) -> Ask:
        text = prompts.filler(prompts.nonce(), settings.words)
        request = prompts.complete(bench, text, settings.tokens, logprobs=False)
        return Ask(f"leak/{place}", request, settings.timeout)

    def _pool_at(
        self, settings: Settings, bench: Bench, place: str, baseline: float | None
    ) -> Generator[Wave, tuple[Exchange, ...], float | None]:
        """Look at the pool until the server is idle and, given a baseline, back at it; or until the time is over."""
        used = None
        for number in range(max(1, int(settings.drain / _POLL_S))):
            if not (polls := about.load_asks(f"leak/{place}/{number}", bench)):
                return None
            seen = about.load((yield Wave(polls, pause=_POLL_S if number else 0.0)))
            used = seen.kv
            if used is None or (seen.idle is not False and (baseline is None or used <= baseline)):
                break
        return used

    def _pool(self, settings: Settings, exchanges: Mapping[str, Exchange]) -> CheckResult:
        check = "leak/kv-pool"
        baseline = _last(exchanges, "leak/baseline/").kv
        if baseline is None:
            return result(check, "unmeasured", "the server does not tell how much of its KV pool is held")
        ended = 0
        for number in range(settings.rounds):
            sent = named(exchanges, f"leak/round-{number}/").values()
            ended += sum(1 for one in sent if one.error is None)
            if lost := [one for one in sent if one.error is not None]:
                return result(check, "unmeasured", f"{lost[0].name}: {lost[0].error}")
            after = _last(exchanges, f"leak/after-{number}/")
            if after.kv is None:
                return result(check, "unmeasured", f"the KV pool was not told after round {number}")
            if after.kv > baseline:
                what = (
                    f"{after.kv:g} of the KV pool held {settings.drain:.0f} s after round {number}, {baseline:g} before"
                )
                return result(check, "failed", what, value=after.kv - baseline)
        cancelled = sum(1 for one in named(exchanges, "leak/round-").values() if one.aborted)
        if not cancelled:
            return result(check, "unmeasured", f"no request of {ended} was cancelled: the load was too short")
        told = f"back at {baseline:g} after each of {settings.rounds} rounds, {cancelled} of {ended} requests cancelled"
        return result(check, "passed", told, value=baseline)


def _memory(what: str, settings: Settings, growth: Threshold, exchanges: Mapping[str, Exchange]) -> CheckResult:
    """The slope of one memory over the rounds, held to its limit."""
    check = f"leak/{what}"
    values = []
    for number in range(settings.warm_up, settings.rounds):
        one = exchanges.get(f"{check}/{number}")
        if one is None or one.error is not None or not isinstance(one.response, dict):
            return result(check, "unmeasured", "was not asked" if one is None else str(one.error))
        values.append(one.response["bytes"] / _MIB)
    if len(values) < 3:
        return result(check, "unmeasured", f"{len(values)} rounds after the first {settings.warm_up} give no slope")
    found = slope(values)
    told = f"{found.value:+.3f} MiB a round, 95 % between {found.low:+.3f} and {found.high:+.3f}"
    limit = f"{growth.value:g} MiB are allowed"
    if found.low > growth.value:
        return result(check, "failed", f"it grows by {told}; {limit}", value=found.value)
    if found.high > growth.value:
        return result(check, "unmeasured", f"{told}: too unsure to tell, {limit}; more rounds tell more")
    return result(check, "passed", f"{told}; {limit}", value=found.value)


def _last(exchanges: Mapping[str, Exchange], prefix: str) -> about.Load:
    """The last look at the load below a prefix."""
    looks = named(exchanges, prefix)
    if not looks:
        return about.Load()
    last = max(int(place.partition("/")[0]) for place in looks)
    return about.load(named(exchanges, f"{prefix}{last}/").values())
