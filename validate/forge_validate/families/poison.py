"""Poisoning: the first questions again after load.

In the public record one bad request, or one that was cancelled, left NaN in the KV pool, and every later request answered
`!!!!`. The load is mixed on purpose: long prompts, sampling, logprobs, clients that hang up, a request that is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from forge_core.model import Frozen
from forge_validate.checks.result import CheckResult
from forge_validate.exchange import Exchange
from forge_validate.families import noise, overlap, prompts
from forge_validate.families.family import Ask, Wave, Waves, named, result
from forge_validate.families.judging import Pair, same
from forge_validate.families.shrink import Size, Tried
from forge_validate.policy import Threshold

if TYPE_CHECKING:
    from forge_validate.judge import Bench

# Prompts of their own, so that no other family has them in the cache.
_FIRST = 300


class Settings(Frozen):
    """The section `poison` of a suite."""

    questions: Annotated[int, Field(gt=0)]
    rounds: Annotated[int, Field(gt=0)]
    """Waves of load between the first and the second asking."""
    at_once: Annotated[int, Field(ge=4)]
    """Requests in each of these waves."""
    words: Annotated[int, Field(gt=0)]
    """Of each long prompt in the load."""
    tokens: Annotated[int, Field(gt=0)]
    """Of each answer."""
    margin: Threshold
    """The bound on differences is the measured noise times this."""
    timeout: Annotated[float, Field(gt=0)]
    """Seconds for one answer."""


class Poison:
    """The family."""

    name = "poison"
    settings = Settings
    checks = "the first questions again after mixed load with cancelled and refused requests"
    tries = 6

    def waves(self, settings: Settings, bench: Bench) -> Waves:
        """The questions cold and warm, the load, the questions again."""
        took = 1.0
        for index in range(settings.questions):
            (cold,) = yield Wave((self._ask(settings, bench, "cold", index),))
            if index == 0:
                yield from noise.waves(self.name, index, cold, bench, settings.timeout)
            (before,) = yield Wave((self._ask(settings, bench, "before", index),))
            took = before.seconds
        for number in range(settings.rounds):
            yield Wave(self._load(settings, bench, number, took))
        for index in range(settings.questions):
            yield Wave((self._ask(settings, bench, "after", index),))

    def judge(self, settings: Settings, bench: Bench, exchanges: Mapping[str, Exchange]) -> tuple[CheckResult, ...]:
        """One check."""
        check = "poison/after-load"
        pairs = [
            Pair(f"poison/before/{i}", f"poison/after/{i}", f"question {i} is not answered as before")
            for i in range(settings.questions)
        ]
        judged = same(check, pairs, exchanges, noise.bound(exchanges, self.name, settings.margin), value="after load")
        if judged.outcome != "passed":
            return (judged,)
        load = named(exchanges, "poison/load-")
        cancelled = sum(1 for one in load.values() if one.aborted)
        # Wave by wave: each has a clock of its own.
        waves = (named(exchanges, f"poison/load-{number}/").values() for number in range(settings.rounds))
        at_once = max(map(overlap.at_once, waves))
        # Two may seem to overlap where the client is slow to read.
        if not cancelled or at_once < 3:
            what = f"{cancelled} requests were cancelled, and {at_once} were answered at one time"
            return (result(check, "unmeasured", f"the load was none: {what}"),)
        told = f"{len(load)} requests of load, {cancelled} of them cancelled; {judged.explanation}"
        return (result(check, "passed", told, value=judged.value),)

    def cost(self, settings: Settings) -> int:
        """The questions three times and once more prefilled, the load."""
        last = _FIRST + settings.questions
        longest = max((prompts.counting(index) for index in range(_FIRST, last)), key=len)
        load = settings.rounds * settings.at_once * (prompts.filler_tokens(settings.words) + settings.tokens)
        answers = 3 * settings.questions * (prompts.tokens_at_most(longest) + settings.tokens)
        return answers + noise.cost(settings.tokens, longest) + load

    def start(self, settings: Settings, failed: CheckResult, exchanges: Mapping[str, Exchange]) -> Size | None:
        """One wave of the load."""
        return Size(batch=settings.at_once, tokens=settings.tokens)

    def again(
        self,
        settings: Settings,
        bench: Bench,
        failed: CheckResult,
        size: Size,
        exchanges: Mapping[str, Exchange],
        place: str,
    ) -> Tried:
        """The question, less load, the question. On a server that has not recovered nothing smaller can be shown."""
        number, short = self._spoilt(settings, exchanges), place.removeprefix("poison/")
        bound = noise.bound(exchanges, self.name, settings.margin)
        yield Wave((self._ask(settings, bench, f"{short}/cold", number),))
        (before,) = yield Wave((self._ask(settings, bench, f"{short}/before", number),))
        asked = {before.name: before, **exchanges}
        if (
            same("poison/smaller", [Pair(f"poison/before/{number}", before.name, place)], asked, bound).outcome
            != "passed"
        ):
            return False
        kinds = (self._one(settings, bench, f"{short}/load/{i}", i + 2, 0, before.seconds) for i in range(size.batch))
        yield Wave(tuple(kinds))
        (after,) = yield Wave((self._ask(settings, bench, f"{short}/after", number),))
        pair = Pair(before.name, after.name, place)
        return same("poison/smaller", [pair], {before.name: before, after.name: after}, bound).outcome == "failed"

    def line(
        self,
        settings: Settings,
        bench: Bench,
        failed: CheckResult,
        size: Size,
        exchanges: Mapping[str, Exchange],
    ) -> str:
        """The question, the load, the question: the answers must be one."""
        before = exchanges[f"poison/before/{self._spoilt(settings, exchanges)}"]
        question = prompts.curl(before.request)
        load = (self._one(settings, bench, "", index + 2, 0, before.seconds) for index in range(size.batch))
        return f"{question}; {' '.join(prompts.curl_load(one, before.seconds) for one in load)} wait; {question}"

    def _spoilt(self, settings: Settings, exchanges: Mapping[str, Exchange]) -> int:
        """The first question that was answered otherwise."""
        bound = noise.bound(exchanges, self.name, settings.margin)
        for index in range(settings.questions):
            pair = Pair(f"poison/before/{index}", f"poison/after/{index}", "")
            if same("poison/after-load", [pair], exchanges, bound).outcome == "failed":
                return index
        return 0

    def _ask(self, settings: Settings, bench: Bench, place: str, index: int) -> Ask:
        text = prompts.counting(_FIRST + index)
        request = prompts.complete(bench, text, settings.tokens, logprobs="logprobs" in bench.offers)
        return Ask(f"poison/{place}/{index}", request, settings.timeout)

    def _load(self, settings: Settings, bench: Bench, number: int, took: float) -> tuple[Ask, ...]:
        """One wave of load."""
        return tuple(
            self._one(settings, bench, f"load-{number}/{index}", index, number, took)
            for index in range(settings.at_once)
        )

    def _one(self, settings: Settings, bench: Bench, place: str, index: int, number: int, took: float) -> Ask:
        """A request of one of four kinds, in turn; `took` seconds was the time of one answer alone."""
        text = prompts.filler(prompts.nonce(), settings.words)
        kind, cut, at = index % 4, None, None
        if kind == 0:
            request = prompts.complete(bench, text, settings.tokens, logprobs="logprobs" in bench.offers)
        elif kind == 1:
            request = prompts.complete(bench, text, settings.tokens, logprobs=False, temperature=1.0, top_p=0.9)
        elif kind == 2:
            request = prompts.complete(bench, text, settings.tokens, logprobs=False)
            # By turns early, in the queue or the prefill, and in the midst of the answer.
            cut, at = (took * 0.2, None) if number % 2 else (None, max(1, settings.tokens // 2))
        else:
            request = prompts.complete(bench, text, 1, stream=False, logprobs=False, temperature=-1)
        return Ask(f"poison/{place}", request, settings.timeout, abort_after=cut, abort_at=at)
