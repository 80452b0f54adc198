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
from forge_validate.checks.result import CheckResult
from forge_validate.exchange import Exchange, Request
from forge_validate.families import about, evict, hits, noise, prompts
from forge_validate.families.family import Ask, Wave, Waves, result
from forge_validate.families.judging import Pair, same
from forge_validate.families.shrink import Size, Tried
from forge_validate.policy import Threshold

if TYPE_CHECKING:
    from forge_validate.judge import Bench

# What follows a prefix: different from its first token on, and the second is gone on with confidently.
_OTHER_TAIL = " and so the list of words goes on and ends here."
_TAIL = "\n" + prompts.counting(2)


class Settings(Frozen):
    """The section `cache` of a suite."""

    words: Annotated[int, Field(ge=16)]
    """Of the prompt that is asked cold, warm, flushed and evicted."""
    lengths: tuple[Annotated[int, Field(gt=0)], ...] = ()
    """Cached prefixes, in tokens, in front of a new end; those around the server's page are asked too."""
    evict: Annotated[int, Field(ge=0)] = 0
    """Tokens that may be spent to push a prompt out of the cache, a pool's worth, then twice that; 0: not asked."""
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
        prompt = evict.KEPT + prompts.filler(prompts.nonce(), settings.words) + _TAIL
        cold = yield from self._measured(settings, bench, "cold/0", prompt)
        yield from noise.waves(self.name, 0, cold, bench, settings.timeout)
        yield from self._measured(settings, bench, "warm/0", prompt)
        if "tokenize" in bench.offers and not prompts.chat_only(bench):
            for length in _lengths(settings, told):
                yield from self._branch(settings, bench, length)
        if "native" in bench.offers:
            yield Wave((_flush("cache/flush"),))
            yield from self._measured(settings, bench, "flushed/0", prompt)
        if settings.evict and told.pool is not None and told.pool <= settings.evict:
            yield from evict.waves(settings, bench, told.pool, self._request(settings, bench, prompt))

    def judge(self, settings: Settings, bench: Bench, exchanges: Mapping[str, Exchange]) -> tuple[CheckResult, ...]:
        """`warm`, `flushed`, `evicted`, and one check for each length of a branch."""
        bound = noise.bound(exchanges, self.name, settings.margin)
        told = about.read(exchanges, self.name)
        found = [
            self._warm(exchanges, bound),
            *(self._branched(length, told.page, bench, exchanges, bound) for length in _lengths(settings, told)),
        ]
        if "native" in bench.offers or "cache/flush" in exchanges:
            found.append(self._emptied("flushed", "cache/flushed/0", "cache/warm/0", exchanges, bound))
        if settings.evict:
            found.append(self._evicted(settings, told.pool, exchanges, bound))
        return tuple(found)

    def cost(self, settings: Settings) -> int:
        """As if the page added four lengths and the pool were as large as may be."""
        whole = prompts.filler_tokens(settings.words) + prompts.tokens_at_most(_TAIL) + settings.tokens
        tails = 3 * max(map(prompts.tokens_at_most, (_TAIL, _OTHER_TAIL))) + 3 * settings.tokens
        lengths = (*settings.lengths, *((max(settings.lengths, default=64),) * 4))
        noises = noise.cost(settings.tokens, "") + whole
        return 6 * whole + noises + sum(3 * length + tails for length in lengths) + evict.cost(settings)

    def start(self, settings: Settings, failed: CheckResult, exchanges: Mapping[str, Exchange]) -> Size | None:
        """The warm prompt's words, and the tokens of its answer; a branch has the length it has."""
        if failed.check == "cache/warm":
            return Size(length=settings.words, tokens=settings.tokens)
        if failed.check == "cache/flushed":
            return Size(length=settings.words, tokens=settings.tokens)
        return Size(tokens=settings.tokens)

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
        if failed.check == "cache/evicted":
            # A try would cost the whole pool.
            return False
        first, then = self._small(settings, bench, failed, size, exchanges)
        cold = yield Wave((Ask(f"{place}/cold", hits.salted(then, prompts.nonce()), settings.timeout),))
        salt = prompts.nonce()
        yield Wave((Ask(f"{place}/first", hits.salted(first, salt), settings.timeout),))
        if failed.check == "cache/flushed":
            yield Wave((_flush(f"{place}/flush"),))
        warm = yield Wave((Ask(f"{place}/warm", hits.salted(then, salt), settings.timeout),))
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
            prompts.curl(hits.salted(one, "SALT" + end)) for one, end in ((then, "-cold"), (first, ""), (then, ""))
        )
        between = f"{fill} >/dev/null"
        if failed.check == "cache/flushed":
            between += f"; {prompts.curl(_flush('').request)}"
        if failed.check == "cache/evicted":
            between += f"; {evict.line(exchanges)}"
        # A salt of its own for each run of the line: what one run cached must not warm the next.
        return f"S=$(date +%s%N); {cold}; {between}; {warm}".replace("SALT", "'\"$S\"'")

    def _small(
        self,
        settings: Settings,
        bench: Bench,
        failed: CheckResult,
        size: Size,
        exchanges: Mapping[str, Exchange],
    ) -> tuple[Request, Request]:
        """What fills the cache, and what is asked behind it."""
        if failed.check == "cache/evicted":
            both = exchanges["cache/cold/0"].request
            return both, both
        if not failed.check.startswith("cache/branch-"):
            text = evict.KEPT + prompts.filler("prefix", size.length) + _TAIL
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
        request = self._request(settings, bench, prompt, salt)
        return (yield from hits.measured(f"cache/{place}", request, bench, settings.timeout))

    def _request(self, settings: Settings, bench: Bench, prompt: str | list[int], salt: str | None = None) -> Request:
        return prompts.complete(bench, prompt, settings.tokens, logprobs="logprobs" in bench.offers, salt=salt)

    def _branch(self, settings: Settings, bench: Bench, length: int) -> Waves:
        """A cold answer (a salt keeps it apart), the prefix with another end, then the prefix with the end of before."""
        first = prompts.filler(prompts.nonce(), length)
        ids: list[list[int]] = []
        for number, text in enumerate((first, _TAIL, _OTHER_TAIL)):
            ask = prompts.tokenize(f"cache/tokenize-{length}/{number}", bench, text, special=number == 0)
            (found,) = yield Wave((ask,))
            ids.append(prompts.token_ids(found))
        prefix, tail, other = ids[0][:length], ids[1], ids[2]
        if len(prefix) < length or not tail or not other or tail[0] == other[0]:
            return
        yield from self._measured(settings, bench, f"branch-{length}/cold", prefix + tail, salt=prompts.nonce())
        yield from self._measured(settings, bench, f"branch-{length}/base", prefix + other)
        yield from self._measured(settings, bench, f"branch-{length}/warm", prefix + tail)

    # --- judging ----------------------------------------------------------------------------------------------------

    def _warm(self, exchanges: Mapping[str, Exchange], bound: float | None) -> CheckResult:
        check = "cache/warm"
        judged = same(check, [Pair("cache/cold/0", "cache/warm/0", "warm is not cold")], exchanges, bound, value="warm")
        if judged.outcome != "passed":
            return judged
        hit, cold = hits.hit(exchanges, "cache/warm/0"), hits.hit(exchanges, "cache/cold/0")
        length = hits.prompt_tokens(exchanges["cache/warm/0"])
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
        self,
        length: int,
        page: int | None,
        bench: Bench,
        exchanges: Mapping[str, Exchange],
        bound: float | None,
    ) -> CheckResult:
        check = place = f"cache/branch-{length}"
        if prompts.chat_only(bench):
            return result(check, "unmeasured", "a prefix is cut in token ids, and the server has no /v1/completions")
        pair = Pair(f"{place}/cold", f"{place}/warm", f"behind a cached prefix of {length} tokens")
        judged = same(check, [pair], exchanges, bound, value=length)
        if judged.outcome != "passed":
            return judged
        hit, cold = hits.hit(exchanges, f"{place}/warm"), hits.hit(exchanges, f"{place}/cold")
        expected = length // (page or 1) * (page or 1)
        if hit is None:
            return result(check, "unmeasured", "the server does not tell whether its prefix cache was hit")
        if hit != expected or cold:
            return result(
                check, "unmeasured", f"{hit} prompt tokens were cached, {expected} should be, and {cold} when cold"
            )
        return result(check, "passed", f"{hit} prompt tokens cached; {judged.explanation}", value=judged.value)

    def _emptied(
        self, check: str, place: str, before: str, exchanges: Mapping[str, Exchange], bound: float | None
    ) -> CheckResult:
        """After a flush or an eviction: the answer is the cold one, and it was computed anew."""
        judged = same(
            f"cache/{check}", [Pair("cache/cold/0", place, f"{check} is not cold")], exchanges, bound, value=check
        )
        if judged.outcome != "passed":
            return judged
        was, hit = hits.hit(exchanges, before), hits.hit(exchanges, place)
        told = f" after {evict.filled(exchanges)} new tokens" if check == "evicted" else ""
        if not was or hit is None or hit >= was / 2:
            why = f"{hit} prompt tokens were cached, {was} before: it was not {check}{told}"
            return result(judged.check, "unmeasured", why)
        return result(
            judged.check, "passed", f"{hit} prompt tokens cached{told}; {judged.explanation}", value=judged.value
        )

    def _evicted(
        self, settings: Settings, pool: int | None, exchanges: Mapping[str, Exchange], bound: float | None
    ) -> CheckResult:
        if pool is None or pool > settings.evict:
            size = "the server does not tell the size of its KV pool"
            if pool is not None:
                size = f"the KV pool holds {pool} tokens, and only {settings.evict} may be spent to fill it"
            return result("cache/evicted", "unmeasured", size)
        return self._emptied("evicted", evict.last(exchanges), "cache/before-eviction/0", exchanges, bound)


def _flush(name: str) -> Ask:
    # A server refuses to flush while a request runs; the wait is its own.
    return Ask(name, Request(method="POST", path="/flush_cache?timeout=30"), timeout=60)


def _lengths(settings: Settings, told: about.About) -> tuple[int, ...]:
    page = told.page or 1
    return tuple(sorted({*settings.lengths, *(n for n in (page - 1, page, page + 1) if n > 0)}))
