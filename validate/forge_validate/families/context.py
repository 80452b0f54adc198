"""Long context: prompts around the edges of the prefill's chunks and of the window, by needles and by equality.

Broken servers of the public record are right up to some length and write garbage, or forget, beyond it. Each long prompt is
prefilled cold in one go, which the server cuts into its chunks, and once more piece by piece behind its own cached
prefix, cut elsewhere; both must say the same. Each holds needles at several depths; a model that finds them in a short
text must find them in a long one.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from forge_core.model import Frozen
from forge_validate.checks.result import CheckResult
from forge_validate.exchange import Exchange, Request
from forge_validate.families import about, hits, long, noise, prompts
from forge_validate.families.family import Ask, Wave, Waves
from forge_validate.families.lengths import Seen, judge_length, too_long
from forge_validate.families.long import Edge, Length, Parts, price
from forge_validate.families.shrink import Size, Tried
from forge_validate.policy import Threshold

if TYPE_CHECKING:
    from forge_validate.judge import Bench

# Beyond what a server takes: more words than its window has tokens, since no word is less than one.
_BEYOND = 64
# Tokens of the short text in which the needles must be found first, beside the needles.
_SHORT = 64


class Settings(Frozen):
    """The section `context` of a suite."""

    edges: tuple[Edge, ...] = ("chunk-1", "chunk", "chunk+1", "2chunk+1", "sliding-1", "sliding", "sliding+1")
    """Which lengths that the server or the model tells of; `window`: the longest prompt that leaves room for the answer."""
    lengths: tuple[Annotated[int, Field(gt=0)], ...] = ()
    """Further lengths, in tokens."""
    depths: Annotated[tuple[Annotated[float, Field(ge=0, le=1)], ...], Field(min_length=1, max_length=len(long.CITIES))]
    """Where the needles stand, as shares of the text; which one is asked changes from length to length."""
    budget: Annotated[int, Field(gt=0)]
    """Tokens that all long prompts may cost; a length beyond it is not asked, and unmeasured."""
    reach: Threshold
    """Longest prompt in which a model that finds the needles in a short text must find them; longer ones are judged by
    equality alone."""
    tokens: Annotated[int, Field(ge=8)]
    """Of each answer: five digits and what stands around them."""
    margin: Threshold
    """The bound on differences is the measured noise times this."""
    timeout: Annotated[float, Field(gt=0)]
    """Seconds for one answer."""


class Context:
    """The family."""

    name = "context"
    settings = Settings
    checks = "needles and equality around chunk and window edges, a prompt beyond the window is refused"
    # The lengths are a ladder: the first that fails is the smallest.
    tries = 0

    def waves(self, settings: Settings, bench: Bench) -> Waves:
        """Sizes, noise, a prompt that is too long; then the short text and every length."""
        found = yield Wave((*about.asks(self.name, bench), about.models(f"{self.name}/about")))
        recorded = {one.name: one for one in found}
        told = about.read(recorded, self.name)
        if told.window is not None:
            text = prompts.filler(prompts.nonce(), told.window + _BEYOND)
            request = prompts.complete(bench, text, 1, stream=False, logprobs=False)
            yield Wave((Ask("context/too-long", request, settings.timeout),))
        if "tokenize" not in bench.offers or prompts.chat_only(bench):
            return
        counting = prompts.complete(bench, prompts.counting(5), settings.tokens, logprobs="logprobs" in bench.offers)
        (cold,) = yield Wave((Ask("context/cold/0", counting, settings.timeout),))
        yield from noise.waves(self.name, 0, cold, bench, settings.timeout)
        parts = yield from self._parts(settings, bench)
        if parts is None:
            return
        for index in range(len(settings.depths)):
            ids = long.compose(parts, parts.least + _SHORT, settings.depths, index, 0)
            yield Wave((Ask(f"context/short/{index}", self._request(settings, bench, ids), settings.timeout),))
        spent = 0
        for length in _asked(settings, told, long.sliding_window(bench.model)):
            if length.tokens is None or length.tokens < parts.least:
                continue
            spent += price(length.tokens, told.chunk, settings.tokens)
            if spent > settings.budget:
                return
            ids = long.compose(
                parts, length.tokens, settings.depths, length.tokens % len(settings.depths), length.tokens
            )
            yield from self._both_ways(settings, bench, length.name, ids, told.chunk)

    def judge(self, settings: Settings, bench: Bench, exchanges: Mapping[str, Exchange]) -> tuple[CheckResult, ...]:
        """`too-long`, and one check for each length."""
        told = about.read(exchanges, self.name)
        bound = noise.bound(exchanges, self.name, settings.margin)
        asked = _asked(settings, told, long.sliding_window(bench.model) or _sliding(exchanges))
        seen = Seen(settings, bench, told, exchanges, bound)
        return (too_long(seen), *(judge_length(seen, length) for length in asked))

    def cost(self, settings: Settings) -> int:
        """The budget, the short texts and the noise; what is too long is refused and costs nothing."""
        counting = prompts.counting(5)
        needles = sum(prompts.tokens_at_most(long.sentence(i)) for i in range(len(settings.depths)))
        short = len(settings.depths) * (2 * needles + _SHORT + settings.tokens)
        cold = prompts.tokens_at_most(counting) + settings.tokens
        return settings.budget + short + cold + noise.cost(settings.tokens, counting)

    def start(self, settings: Settings, failed: CheckResult, exchanges: Mapping[str, Exchange]) -> Size | None:
        """The first length that failed, as it is."""
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
        """Not asked (`tries`)."""
        found = yield Wave((Ask(f"{place}/again", exchanges[failed.check].request, settings.timeout),))
        return any(one.error is not None for one in found)

    def line(
        self,
        settings: Settings,
        bench: Bench,
        failed: CheckResult,
        size: Size,
        exchanges: Mapping[str, Exchange],
    ) -> str:
        """Cold, then piece by piece: they must be one, and say the number. So long a prompt stays in its recorded file."""
        if failed.check == "context/too-long":
            return prompts.curl_recorded(exchanges[failed.check])
        names = [name for name in exchanges if name.startswith(f"{failed.check}/piece-")]
        cold = prompts.curl_recorded(exchanges[f"{failed.check}/cold"], salt="cold")
        pieces = "; ".join(f"{prompts.curl_recorded(exchanges[name], salt='pieces')} >/dev/null" for name in names)
        again = prompts.curl_recorded(exchanges[f"{failed.check}/pieces"], salt="pieces")
        return f"S=$(date +%s%N); {cold}; {pieces}; {again}"

    # --- asking -----------------------------------------------------------------------------------------------------

    def _request(self, settings: Settings, bench: Bench, ids: list[int], salt: str | None = None) -> Request:
        return prompts.complete(bench, ids, settings.tokens, logprobs="logprobs" in bench.offers, salt=salt)

    def _parts(self, settings: Settings, bench: Bench) -> Generator[Wave, tuple[Exchange, ...], Parts | None]:
        """The token ids of all texts; none where one did not come."""
        count = len(settings.depths)
        texts = [long.plain(), *map(long.sentence, range(count)), *map(long.question, range(count))]
        asks = tuple(
            prompts.tokenize(f"context/tokenize/{place}", bench, text, special=False)
            for place, text in enumerate(texts)
        )
        ids = [tuple(prompts.token_ids(one)) for one in (yield Wave(asks))]
        return Parts(ids[0], tuple(ids[1 : count + 1]), tuple(ids[count + 1 :])) if all(ids) else None

    def _both_ways(self, settings: Settings, bench: Bench, name: str, ids: list[int], chunk: int | None) -> Waves:
        """Cold and whole; then piece by piece. Salts keep the two apart."""
        cold = self._request(settings, bench, ids, prompts.nonce())
        yield from hits.measured(f"context/{name}/cold", cold, bench, settings.timeout)
        salt = prompts.nonce()
        for number, end in enumerate(long.steps(len(ids), chunk)):
            request = prompts.complete(bench, ids[:end], 1, stream=False, logprobs=False, salt=salt)
            yield Wave((Ask(f"context/{name}/piece-{number}", request, settings.timeout),))
        again = self._request(settings, bench, ids, salt)
        yield from hits.measured(f"context/{name}/pieces", again, bench, settings.timeout)


def _asked(settings: Settings, told: about.About, sliding: int | None) -> tuple[Length, ...]:
    return long.lengths(settings.edges, settings.lengths, told, sliding, settings.tokens)


def _sliding(exchanges: Mapping[str, Exchange]) -> int | None:
    """The sliding window that recorded exchanges were about, where the model's folder is not here."""
    for step, edge in ((-1, "sliding-1"), (0, "sliding"), (1, "sliding+1")):
        if (one := exchanges.get(f"context/{edge}/cold")) is not None:
            return len(one.request.body["prompt"]) - step
    return None
