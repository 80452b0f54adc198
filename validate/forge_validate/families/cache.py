"""The cache ladder: one prompt with a cold, a warm, a flushed and an evicted prefix cache, and prefixes cut around pages.

Broken kernels of the public record answer rightly from an empty cache and wrongly behind a cached prefix of one length.
Every answer is compared with a cold one. That the cache was hit, and by how much, is told by `usage` (SGLang with
--enable-cache-report, vLLM with --enable-prompt-tokens-details) or by the counters of /metrics.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from forge_core.model import Frozen
from forge_validate import reply
from forge_validate.checks.result import CheckResult
from forge_validate.exchange import Exchange, Request
from forge_validate.families import about, noise, prompts, said
from forge_validate.families.family import Ask, Wave, Waves, result
from forge_validate.families.judging import Pair, same
from forge_validate.families.shrink import Size, Tried
from forge_validate.policy import Threshold

if TYPE_CHECKING:
    from forge_validate.judge import Bench

# What follows a prefix: different from its first token on, and the second is gone on with confidently.
_OTHER_TAIL = " and so the list of words goes on and ends here."
_TAIL = "\n" + prompts.counting(2)
_FILL_AT_ONCE = 4


class Settings(Frozen):
    """The section `cache` of a suite."""

    words: Annotated[int, Field(ge=16)]
    """Of the prompt that is asked cold, warm, flushed and evicted."""
    lengths: tuple[Annotated[int, Field(gt=0)], ...] = ()
    """Cached prefixes, in tokens, in front of a new end; those around the server's page are asked too."""
    evict: Annotated[int, Field(ge=0)] = 0
    """Tokens that may be spent to push a prompt out of the cache; 0: not asked."""
    evict_words: Annotated[int, Field(ge=16)] = 400
    """Words of each prompt that does."""
    tokens: Annotated[int, Field(gt=0)]
    """Tokens of each answer."""
    margin: Threshold
    """The bound on differences is the measured noise times this."""
    timeout: Annotated[float, Field(gt=0)]
    """Seconds for one answer."""


class Cache:
    """The family."""

    name = "cache"
    settings = Settings
    checks = "warm, flushed, evicted and branched prefixes against cold ones; every hit is asserted"
    tries = 8

    def waves(self, settings: Settings, bench: Bench) -> Waves:
        """Cold, noise, warm; branches; flushed; evicted."""
        recorded: dict[str, Exchange] = {}
        if asks := about.asks(self.name, bench):
            recorded.update((one.name, one) for one in (yield Wave(asks)))
        told = about.read(recorded, self.name)
        prompt = prompts.filler(prompts.nonce(), settings.words) + _TAIL
        cold = yield from self._measured(settings, bench, "cold/0", prompt)
        yield from noise.waves(self.name, 0, cold, bench, settings.timeout)
        yield from self._measured(settings, bench, "warm/0", prompt)
        if "tokenize" in bench.offers:
            for length in _lengths(settings, told):
                yield from self._branch(settings, bench, length)
        if "native" in bench.offers:
            # A server refuses to flush while a request runs; the wait is its own.
            flush = Request(method="POST", path="/flush_cache?timeout=30")
            yield Wave((Ask("cache/flush", flush, timeout=60),))
            yield from self._measured(settings, bench, "flushed/0", prompt)
        if settings.evict and told.pool is not None and told.pool <= settings.evict:
            yield from self._measured(settings, bench, "before-eviction/0", prompt)
            yield from self._fill(settings, bench, told.pool)
            yield from self._measured(settings, bench, "evicted/0", prompt)

    def judge(self, settings: Settings, bench: Bench, exchanges: Mapping[str, Exchange]) -> tuple[CheckResult, ...]:
        """`warm`, `flushed`, `evicted`, and one check for each length of a branch."""
        bound = noise.bound(exchanges, self.name, settings.margin)
        told = about.read(exchanges, self.name)
        found = [
            self._warm(exchanges, bound),
            *(self._branched(length, told.page, exchanges, bound) for length in _lengths(settings, told)),
        ]
        if "native" in bench.offers or "cache/flush" in exchanges:
            found.append(self._emptied("flushed", "warm", exchanges, bound))
        if settings.evict:
            found.append(self._evicted(settings, told.pool, exchanges, bound))
        return tuple(found)

    def cost(self, settings: Settings) -> int:
        """As if the page added four lengths and the pool were as large as may be."""
        whole = prompts.filler_tokens(settings.words) + prompts.tokens_at_most(_TAIL) + settings.tokens
        tails = 3 * max(map(prompts.tokens_at_most, (_TAIL, _OTHER_TAIL))) + 3 * settings.tokens
        lengths = (*settings.lengths, *((max(settings.lengths, default=64),) * 4))
        evict = settings.evict + _FILL_AT_ONCE * (prompts.filler_tokens(settings.evict_words) + 1)
        noises = noise.cost(settings.tokens, "") + whole
        return 6 * whole + noises + sum(3 * length + tails for length in lengths) + (evict if settings.evict else 0)

    def start(self, settings: Settings, failed: CheckResult, exchanges: Mapping[str, Exchange]) -> Size | None:
        """The warm prompt's words, and the tokens of its answer; a branch has the length it has."""
        if failed.check == "cache/warm":
            return Size(length=settings.words, tokens=settings.tokens)
        return Size(tokens=settings.tokens) if failed.check.startswith("cache/branch-") else None

    def again(
        self,
        settings: Settings,
        bench: Bench,
        failed: CheckResult,
        size: Size,
        exchanges: Mapping[str, Exchange],
        place: str,
    ) -> Tried:
        """Cold, then what fills the cache, then the same behind what it holds; salts keep the two apart."""
        first, then = self._small(settings, bench, failed, size, exchanges)
        cold = yield Wave((Ask(f"{place}/cold", salted(then, prompts.nonce()), settings.timeout),))
        salt = prompts.nonce()
        yield Wave((Ask(f"{place}/first", salted(first, salt), settings.timeout),))
        warm = yield Wave((Ask(f"{place}/warm", salted(then, salt), settings.timeout),))
        asked = {one.name: one for one in (*cold, *warm)}
        bound = noise.bound(exchanges, self.name, settings.margin)
        return same("cache/smaller", [Pair(f"{place}/cold", f"{place}/warm", place)], asked, bound).outcome == "failed"

    def line(
        self,
        settings: Settings,
        bench: Bench,
        failed: CheckResult,
        size: Size,
        exchanges: Mapping[str, Exchange],
    ) -> str:
        """A cold answer, and the same behind a cached prefix: they must be one."""
        first, then = self._small(settings, bench, failed, size, exchanges)
        cold, fill, warm = (
            prompts.curl(salted(one, "SALT" + end)) for one, end in ((then, "-cold"), (first, ""), (then, ""))
        )
        # A salt of its own for each run of the line: what one run cached must not warm the next.
        return f"S=$(date +%s%N); {cold}; {fill} >/dev/null; {warm}".replace("SALT", "'\"$S\"'")

    def _small(
        self,
        settings: Settings,
        bench: Bench,
        failed: CheckResult,
        size: Size,
        exchanges: Mapping[str, Exchange],
    ) -> tuple[Request, Request]:
        """What fills the cache, and what is asked behind it."""
        if failed.check == "cache/warm":
            text = prompts.filler("prefix", size.length) + _TAIL
            both = prompts.complete(bench, text, size.tokens)
            return both, both
        place = failed.check
        base, warm = (exchanges[f"{place}/{which}"].request for which in ("base", "warm"))
        shorter = {"max_tokens": size.tokens}
        return (
            base.model_copy(update={"body": base.body | shorter}),
            warm.model_copy(update={"body": warm.body | shorter}),
        )

    # --- asking -----------------------------------------------------------------------------------------------------

    def _measured(
        self, settings: Settings, bench: Bench, place: str, prompt: str | list[int], salt: str | None = None
    ) -> Generator[Wave, tuple[Exchange, ...], Exchange]:
        """One prompt alone, between two looks at the counters."""
        request = prompts.complete(bench, prompt, settings.tokens, logprobs="logprobs" in bench.offers, salt=salt)
        counted = "metrics" in bench.offers
        if counted:
            yield Wave((about.metrics(f"cache/{place}/before"),))
        (found,) = yield Wave((Ask(f"cache/{place}", request, settings.timeout),))
        if counted:
            yield Wave((about.metrics(f"cache/{place}/after"),))
        return found

    def _branch(self, settings: Settings, bench: Bench, length: int) -> Waves:
        """A cold answer (a salt keeps it apart), the prefix with another end, then the prefix with the end of before."""
        first = prompts.filler(prompts.nonce(), length)
        ids: list[list[int]] = []
        for number, text in enumerate((first, _TAIL, _OTHER_TAIL)):
            body = {"model": bench.served, "prompt": text, "add_special_tokens": number == 0}
            ask = Ask(
                f"cache/tokenize-{length}/{number}", Request(method="POST", path="/tokenize", body=body), timeout=30
            )
            (found,) = yield Wave((ask,))
            ids.append(_ids(found))
        prefix, tail, other = ids[0][:length], ids[1], ids[2]
        if len(prefix) < length or not tail or not other or tail[0] == other[0]:
            return
        yield from self._measured(settings, bench, f"branch-{length}/cold", prefix + tail, salt=prompts.nonce())
        yield from self._measured(settings, bench, f"branch-{length}/base", prefix + other)
        yield from self._measured(settings, bench, f"branch-{length}/warm", prefix + tail)

    def _fill(self, settings: Settings, bench: Bench, pool: int) -> Waves:
        """Prompts that no cache has seen, until they are more than the pool holds."""
        filled = number = 0
        while filled <= pool:
            asks = []
            for _ in range(_FILL_AT_ONCE):
                text = prompts.filler(prompts.nonce(), settings.evict_words)
                request = prompts.complete(bench, text, 1, stream=False, logprobs=False)
                asks.append(Ask(f"cache/fill/{number}", request, settings.timeout))
                number += 1
            found = yield Wave(tuple(asks))
            tokens = [_prompt_tokens(one) for one in found]
            if not all(tokens):
                return
            filled += sum(tokens)

    # --- judging ----------------------------------------------------------------------------------------------------

    def _warm(self, exchanges: Mapping[str, Exchange], bound: float | None) -> CheckResult:
        check = "cache/warm"
        judged = same(check, [Pair("cache/cold/0", "cache/warm/0", "warm is not cold")], exchanges, bound, value="warm")
        if judged.outcome != "passed":
            return judged
        hit, cold = _hit(exchanges, "cache/warm/0"), _hit(exchanges, "cache/cold/0")
        length = _prompt_tokens(exchanges["cache/warm/0"])
        if hit is None:
            return result(check, "unmeasured", "the server does not tell whether its prefix cache was hit")
        # Half: what a page rounds off, and the one token that is always computed, are far less.
        if hit < length / 2 or (cold or 0) >= length / 2:
            return result(
                check, "unmeasured", f"{hit} of {length} prompt tokens were cached, {cold} the first time: no warm hit"
            )
        return result(
            check, "passed", f"{hit} of {length} prompt tokens cached; {judged.explanation}", value=judged.value
        )

    def _branched(
        self, length: int, page: int | None, exchanges: Mapping[str, Exchange], bound: float | None
    ) -> CheckResult:
        check, place = f"cache/branch-{length}", f"cache/branch-{length}"
        pair = Pair(f"{place}/cold", f"{place}/warm", f"behind a cached prefix of {length} tokens")
        judged = same(check, [pair], exchanges, bound, value=length)
        if judged.outcome != "passed":
            return judged
        hit, cold = _hit(exchanges, f"{place}/warm"), _hit(exchanges, f"{place}/cold")
        expected = length // (page or 1) * (page or 1)
        if hit is None:
            return result(check, "unmeasured", "the server does not tell whether its prefix cache was hit")
        if hit != expected or cold:
            return result(
                check, "unmeasured", f"{hit} prompt tokens were cached, {expected} should be, and {cold} when cold"
            )
        return result(check, "passed", f"{hit} prompt tokens cached; {judged.explanation}", value=judged.value)

    def _emptied(self, name: str, before: str, exchanges: Mapping[str, Exchange], bound: float | None) -> CheckResult:
        """After a flush or an eviction: the answer is the cold one, and it was computed anew."""
        check = f"cache/{name}"
        pair = Pair("cache/cold/0", f"cache/{name}/0", f"{name} is not cold")
        judged = same(check, [pair], exchanges, bound, value=name)
        if judged.outcome != "passed":
            return judged
        was, hit = _hit(exchanges, f"cache/{before}/0"), _hit(exchanges, f"cache/{name}/0")
        if not was or hit is None or hit >= was / 2:
            return result(check, "unmeasured", f"{hit} prompt tokens were cached, {was} before: it was not {name}")
        return result(check, "passed", f"{hit} prompt tokens cached; {judged.explanation}", value=judged.value)

    def _evicted(
        self, settings: Settings, pool: int | None, exchanges: Mapping[str, Exchange], bound: float | None
    ) -> CheckResult:
        if pool is None or pool > settings.evict:
            size = "the server does not tell the size of its KV pool"
            if pool is not None:
                size = f"the KV pool holds {pool} tokens, and only {settings.evict} may be spent to fill it"
            return result("cache/evicted", "unmeasured", size)
        return self._emptied("evicted", "before-eviction", exchanges, bound)


def salted(request: Request, salt: str) -> Request:
    """The same request, in a part of the prefix cache of its own."""
    return request.model_copy(update={"body": request.body | {"cache_salt": salt}})


def _lengths(settings: Settings, told: about.About) -> tuple[int, ...]:
    page = told.page or 1
    return tuple(sorted({*settings.lengths, *(n for n in (page - 1, page, page + 1) if n > 0)}))


def _hit(exchanges: Mapping[str, Exchange], name: str) -> int | None:
    """Prompt tokens from the cache: as `usage` tells, else as the counters grew; none: nobody tells."""
    one = exchanges.get(name)
    try:
        told = said.read(one).cached if one is not None else None
    except reply.NotAReply:
        return None
    if told is not None:
        return told
    before = about.gauge(exchanges.get(f"{name}/before"), about.CACHED)
    after = about.gauge(exchanges.get(f"{name}/after"), about.CACHED)
    return None if after is None else int(after - (before or 0.0))


def _prompt_tokens(one: Exchange) -> int:
    try:
        return said.read(one).prompt_tokens or 0
    except reply.NotAReply:
        return 0


def _ids(one: Exchange) -> list[int]:
    found = one.response.get("tokens") if isinstance(one.response, dict) else None
    return found if isinstance(found, list) and all(isinstance(token, int) for token in found) else []
