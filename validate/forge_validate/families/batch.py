"""The batch ladder: the same prompts alone and together, and beside another request's prefill.

Broken kernels of the public record answer well alone and wrongly from batch 3 on, or between two captured graph sizes.
All answers are compared with those said alone, the prefix cache warm in both, so that nothing but the batch differs.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from forge_core.model import Frozen
from forge_validate.checks.result import CheckResult
from forge_validate.exchange import Exchange, Request
from forge_validate.families import about, noise, overlap, prompts
from forge_validate.families.about import About
from forge_validate.families.family import Ask, Wave, Waves, result
from forge_validate.families.judging import Pair, same
from forge_validate.families.shrink import Size, Tried
from forge_validate.policy import Threshold

if TYPE_CHECKING:
    from forge_validate.judge import Bench

_TRIES = 3
# How many prompts the noise is measured on.
_NOISE = 3


class Settings(Frozen):
    """The section `batch` of a suite."""

    sizes: Annotated[tuple[Annotated[int, Field(gt=0)], ...], Field(min_length=1)]
    """Batch sizes; those above the server's largest are left out."""
    largest: Annotated[int, Field(ge=0)] = 0
    """The server's own largest batch is asked too, if it tells it, up to this size; 0: it is not."""
    graphs: Annotated[int, Field(ge=0)] = 0
    """So many captured graph sizes up to `largest`, evenly chosen, are asked at the size itself and one above."""
    tokens: Annotated[int, Field(gt=0)]
    """Tokens of each answer; doubled when the answers ended before all had begun."""
    beside: Annotated[int, Field(ge=0)] = 0
    """Batch size during which a long prompt arrives; 0: none does."""
    prefill: Annotated[int, Field(ge=0)] = 0
    """Words of that long prompt."""
    margin: Threshold
    """The bound on differences is the measured noise times this."""
    timeout: Annotated[float, Field(gt=0)]
    """Seconds for one answer."""


class Batch:
    """The family."""

    name = "batch"
    settings = Settings
    checks = "each size against alone, a size beside a prefill"
    tries = 12

    def waves(self, settings: Settings, bench: Bench) -> Waves:
        """Alone twice (cold, warm), the noise, every size, the prefill."""
        recorded: dict[str, Exchange] = {}
        for wave in self._first(settings, bench):
            recorded.update((one.name, one) for one in (yield wave))
        sizes = _sizes(settings, about.read(recorded, self.name))
        for index in range(max((*sizes, settings.beside))):
            (cold,) = yield Wave((self._ask(settings, bench, f"cold/{index}", index),))
            yield Wave((self._ask(settings, bench, f"alone/{index}", index),))
            if index < _NOISE:
                yield from noise.waves(self.name, index, cold, bench, settings.timeout)
        for size in sizes:
            yield from self._together(settings, bench, size)
        if settings.beside:
            yield from self._beside(settings, bench)

    def judge(self, settings: Settings, bench: Bench, exchanges: Mapping[str, Exchange]) -> tuple[CheckResult, ...]:
        """One check for each size, one for the prefill."""
        bound = noise.bound(exchanges, self.name, settings.margin)
        found = [
            self._size(settings, size, exchanges, bound) for size in _sizes(settings, about.read(exchanges, self.name))
        ]
        if settings.beside:
            found.append(self._prefill(settings, exchanges, bound))
        return tuple(found)

    def cost(self, settings: Settings) -> int:
        """As if the server told the largest size and the most graphs, and no wave had to be asked again."""
        sizes = [*settings.sizes, settings.largest, *([settings.largest + 1] * 2 * settings.graphs)]
        most = max((*sizes, settings.beside))
        longest = max((prompts.counting(index) for index in range(most)), key=len)
        answers = 2 * most + sum(sizes) + 3 * settings.beside
        noises = _NOISE * noise.cost(settings.tokens, longest)
        whole = answers * (prompts.tokens_at_most(longest) + settings.tokens)
        return whole + noises + prompts.filler_tokens(settings.prefill)

    def start(self, settings: Settings, failed: CheckResult, exchanges: Mapping[str, Exchange]) -> Size | None:
        """The batch size that failed, or the streams and the words of the prefill beside them."""
        if failed.check == "batch/beside-prefill":
            return Size(batch=settings.beside, length=settings.prefill)
        return Size(
            batch=int(failed.check.removeprefix("batch/size-")), length=prompts.counted(0), tokens=settings.tokens
        )

    def again(
        self,
        settings: Settings,
        bench: Bench,
        failed: CheckResult,
        size: Size,
        exchanges: Mapping[str, Exchange],
        place: str,
    ) -> Tried:
        """One prompt alone, warm, then several times at one moment, or beside a prefill."""
        beside = failed.check == "batch/beside-prefill"
        request = self._small(bench, size) if not beside else self._stream(bench, 2 * settings.tokens)
        yield Wave((Ask(f"{place}/cold", request, settings.timeout),))
        alone = yield Wave((Ask(f"{place}/alone", request, settings.timeout),))
        asks = tuple(Ask(f"{place}/{i}", request, settings.timeout) for i in range(size.batch))
        if beside:
            long = _prefill(bench, prompts.nonce(), size.length)
            prefill = Ask(f"{place}/prefill", long, settings.timeout, follows=asks[-1].name)
            found = (yield Wave((*asks, prefill)))[:-1]
        else:
            found = yield Wave(asks)
        asked = {one.name: one for one in (*alone, *found)}
        pairs = [Pair(f"{place}/alone", one.name, place) for one in found]
        return (
            same("batch/smaller", pairs, asked, noise.bound(exchanges, self.name, settings.margin)).outcome == "failed"
        )

    def line(
        self,
        settings: Settings,
        bench: Bench,
        failed: CheckResult,
        size: Size,
        exchanges: Mapping[str, Exchange],
    ) -> str:
        """The answers of one prompt at one moment: they must be those of one alone."""
        if failed.check != "batch/beside-prefill":
            return prompts.curl_at_once(self._small(bench, size), size.batch)
        # Long enough for a shell to come with the long prompt in the midst of it.
        stream = prompts.curl(self._stream(bench, 16 * settings.tokens))
        streams = [one for name, one in exchanges.items() if name.startswith("batch/beside") and one.first is not None]
        waits = [(one.first or 0.0) - (one.began or 0.0) for one in streams if not one.name.endswith("/prefill")]
        wait = max(waits, default=0.5)
        long = prompts.curl(_prefill(bench, "FIRST", size.length)).replace("FIRST", "'\"$(date +%s%N)\"'")
        # The long prompt must come when the answers have begun.
        some = f"for i in $(seq {size.batch}); do {stream} & done"
        return f"{stream}; {some}; sleep {wait + 0.02:.2f}; {long} >/dev/null & wait"

    def _small(self, bench: Bench, size: Size) -> Request:
        text = prompts.counting(0, size.length)
        return prompts.complete(bench, text, size.tokens, logprobs="logprobs" in bench.offers)

    def _stream(self, bench: Bench, tokens: int) -> Request:
        return prompts.complete(bench, prompts.counting(0), tokens, logprobs="logprobs" in bench.offers)

    def _first(self, settings: Settings, bench: Bench) -> Generator[Wave, None, None]:
        if asks := about.asks(self.name, bench):
            yield Wave(asks)

    def _ask(self, settings: Settings, bench: Bench, place: str, index: int, tokens: int | None = None) -> Ask:
        request = prompts.complete(
            bench, prompts.counting(index), tokens or settings.tokens, logprobs="logprobs" in bench.offers
        )
        return Ask(f"batch/{place}", request, settings.timeout)

    def _together(self, settings: Settings, bench: Bench, size: int) -> Waves:
        """One size; again with longer answers when not all of them were said at one time."""
        for attempt in range(_TRIES):
            asks = tuple(
                self._ask(settings, bench, f"{_try(size, attempt)}/{index}", index, settings.tokens << attempt)
                for index in range(size)
            )
            found = yield Wave(asks)
            if size == 1 or overlap.at_once(found) >= size or any(one.error for one in found):
                return

    def _beside(self, settings: Settings, bench: Bench) -> Waves:
        """Streams, and a long prompt of its own that is sent when the last of them speaks."""
        for attempt in range(_TRIES):
            asks = [
                self._ask(settings, bench, f"{_try('beside', attempt)}/{i}", i, settings.tokens << (attempt + 1))
                for i in range(settings.beside)
            ]
            long = _prefill(bench, prompts.nonce(), settings.prefill)
            name = f"batch/{_try('beside', attempt)}/prefill"
            asks.append(Ask(name, long, settings.timeout, follows=asks[-1].name))
            found = yield Wave(tuple(asks))
            if overlap.beside(found[-1], found[:-1]) or any(one.error for one in found):
                return

    def _size(
        self, settings: Settings, size: int, exchanges: Mapping[str, Exchange], bound: float | None
    ) -> CheckResult:
        check = f"batch/size-{size}"
        tries = _tries(exchanges, size, size)
        if not tries:
            return result(check, "unmeasured", "was not asked")
        most = max(overlap.at_once(one) for one in tries)
        judged = _judged(check, sum(tries, ()), exchanges, bound, size)
        if judged.outcome == "passed" and size > 1 and most < size:
            return result(
                check, "unmeasured", f"only {most} of {size} answers were said at one time: it did not batch so many"
            )
        return judged

    def _prefill(self, settings: Settings, exchanges: Mapping[str, Exchange], bound: float | None) -> CheckResult:
        check = "batch/beside-prefill"
        tries = _tries(exchanges, "beside", settings.beside)
        if not tries:
            return result(check, "unmeasured", "was not asked")
        judged = _judged(check, sum(tries, ()), exchanges, bound, settings.beside)
        reached = 0
        for attempt, streams in enumerate(tries):
            prefill = exchanges.get(f"batch/{_try('beside', attempt)}/prefill")
            reached = max(reached, overlap.beside(prefill, streams) if prefill is not None else 0)
        if judged.outcome == "passed" and not reached:
            return result(check, "unmeasured", "no answer was being said during the whole of the prefill")
        return judged


def _prefill(bench: Bench, first: str, words: int) -> Request:
    return prompts.complete(bench, prompts.filler(first, words), 1, logprobs=False)


def _judged(
    check: str, together: Sequence[Exchange], exchanges: Mapping[str, Exchange], bound: float | None, size: int
) -> CheckResult:
    """Hold every answer of a wave against the one said alone."""
    pairs = [
        Pair(f"batch/alone/{index}", one.name, f"prompt {index} of {size} at once is not answered as alone")
        for one in together
        for index in (one.name.rsplit("/", 1)[1],)
    ]
    return same(check, pairs, exchanges, bound, value=size)


def _sizes(settings: Settings, told: About) -> tuple[int, ...]:
    """The sizes to ask, ascending."""
    wanted = set(settings.sizes)
    if told.max_running is not None and told.max_running <= settings.largest:
        wanted.add(told.max_running)
    graphs = [size for size in told.graphs if size <= settings.largest]
    if settings.graphs and graphs:
        step = max(1, len(graphs) // settings.graphs)
        for captured in graphs[::-1][::step][: settings.graphs]:
            wanted |= {captured, captured + 1}
    limit = told.max_running or max(settings.sizes)
    return tuple(sorted(size for size in wanted if size <= limit))


def _try(what: object, attempt: int) -> str:
    return f"{what}+{attempt}" if attempt else str(what)


def _tries(exchanges: Mapping[str, Exchange], what: object, size: int) -> list[tuple[Exchange, ...]]:
    """The exchanges of each attempt at a wave."""
    found = []
    for attempt in range(_TRIES):
        names = [f"batch/{_try(what, attempt)}/{index}" for index in range(size)]
        if all(name in exchanges for name in names):
            found.append(tuple(exchanges[name] for name in names))
    return found
