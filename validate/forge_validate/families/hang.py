"""Hangs: more requests than the server computes at once, clients that hang up, silence; each with a deadline.

A server that hangs is healthy to its health endpoint. What counts is that every stream moves on, token by token, that
the places of those who hung up are given to others, and that the queue is empty at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from forge_core.model import Frozen
from forge_validate import reply
from forge_validate.checks.result import CheckResult
from forge_validate.exchange import Exchange
from forge_validate.families import about, overlap, prompts
from forge_validate.families.family import Ask, Wave, Waves, named, result
from forge_validate.families.shrink import Size, Tried

if TYPE_CHECKING:
    from forge_validate.judge import Bench

_POLL_S = 0.5
# Numbers that a counting prompt shows: short, since it is their number that counts here.
_SHOWN = 3
# A full queue may be told instead of waited in; these are whole answers.
_BUSY = (429, 503)


class Settings(Frozen):
    """The section `hang` of a suite."""

    burst: Annotated[int, Field(gt=1)]
    """Requests at one moment, where the server does not tell how many it computes at once."""
    times: Annotated[float, Field(gt=1)] = 2.0
    """Where it tells: so many times as many."""
    most: Annotated[int, Field(gt=1)]
    """Never more than this."""
    storm: Annotated[int, Field(gt=1)]
    """Requests whose clients hang up."""
    tokens: Annotated[int, Field(gt=0)]
    """Of each answer."""
    stall: Annotated[float, Field(gt=0)]
    """Seconds in which a stream that has begun must move on."""
    timeout: Annotated[float, Field(gt=0)]
    """Seconds for one answer, the wait in the queue included."""
    drain: Annotated[float, Field(gt=0)]
    """Seconds until nothing runs and nothing waits."""
    idle: Annotated[float, Field(ge=0)] = 0.0
    """Seconds of silence before the last question; 0: it is not asked."""


class Hang:
    """The family."""

    name = "hang"
    settings = Settings
    checks = "a burst past the largest batch, cancellations, an empty queue after them, an answer after silence"
    # Each try could cost the whole deadline, on a server that may never come back.
    tries = 0

    def waves(self, settings: Settings, bench: Bench) -> Waves:
        """One alone for the times, the burst, the storm, the queue, the silence."""
        recorded: dict[str, Exchange] = {}
        if asks := about.asks(self.name, bench):
            recorded.update((one.name, one) for one in (yield Wave(asks)))
        (alone,) = yield Wave((self._ask(settings, bench, "alone/0", 0),))
        size = _burst(settings, about.read(recorded, self.name))
        yield Wave(tuple(self._ask(settings, bench, f"burst/{index}", index) for index in range(size)))
        yield Wave(tuple(self._cut(settings, bench, index, alone.seconds) for index in range(settings.storm)))
        yield Wave((self._ask(settings, bench, "after-storm/0", 0),))
        for number in range(max(1, int(settings.drain / _POLL_S))):
            if not (polls := about.load_asks(f"hang/drain/{number}", bench)):
                break
            found = yield Wave(polls, pause=_POLL_S if number else 0.0)
            if about.load(found).idle is not False:
                break
        if settings.idle:
            yield Wave((self._ask(settings, bench, "idle/0", 0),), pause=settings.idle)

    def judge(self, settings: Settings, bench: Bench, exchanges: Mapping[str, Exchange]) -> tuple[CheckResult, ...]:
        """`burst`, `cancel-storm`, `drain` and, where it is asked, `idle`."""
        told = about.read(exchanges, self.name)
        found = [self._burst(settings, told, exchanges), self._storm(exchanges), self._drain(settings, exchanges)]
        if settings.idle:
            found.append(
                _answered("hang/idle", exchanges.get("hang/idle/0"), f"after {settings.idle:.0f} s of silence")
            )
        return tuple(found)

    def cost(self, settings: Settings) -> int:
        """As if the burst were the largest."""
        longest = prompts.tokens_at_most(prompts.counting(max(settings.most, settings.storm), _SHOWN))
        return (settings.most + settings.storm + 3) * (longest + settings.tokens)

    def start(self, settings: Settings, failed: CheckResult, exchanges: Mapping[str, Exchange]) -> Size | None:
        """The burst, as large as it was."""
        return Size(batch=int(failed.value or 1), tokens=settings.tokens) if failed.check == "hang/burst" else None

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
        found = yield Wave(
            tuple(replace(self._ask(settings, bench, "again", i), name=f"{place}/{i}") for i in range(size.batch))
        )
        return any(one.error is not None for one in found)

    def line(
        self,
        settings: Settings,
        bench: Bench,
        failed: CheckResult,
        size: Size,
        exchanges: Mapping[str, Exchange],
    ) -> str:
        """So many at one moment: each must come to its end."""
        return prompts.curl_at_once(exchanges["hang/burst/0"].request, size.batch)

    def _ask(self, settings: Settings, bench: Bench, place: str, index: int) -> Ask:
        request = prompts.complete(bench, prompts.counting(index, _SHOWN), settings.tokens, logprobs=False)
        return Ask(f"hang/{place}", request, settings.timeout, stall=settings.stall)

    def _cut(self, settings: Settings, bench: Bench, index: int, took: float) -> Ask:
        """A cancelled one: by turns in the midst of its answer, and early, in the queue or the prefill."""
        whole = self._ask(settings, bench, f"storm/{index}", index)
        if index % 2:
            return replace(whole, abort_after=max(0.01, took * 0.1 * (index % 8)))
        return replace(whole, abort_at=1 + index % max(1, settings.tokens // 2))

    def _burst(self, settings: Settings, told: about.About, exchanges: Mapping[str, Exchange]) -> CheckResult:
        check, size = "hang/burst", _burst(settings, told)
        sent = list(named(exchanges, "hang/burst/").values())
        if len(sent) < size:
            return result(check, "unmeasured", "was not asked")
        refused = [one for one in sent if one.status in _BUSY]
        stuck = [one for one in sent if one.error is not None]
        if stuck:
            what = f"{len(stuck)} of {size} requests at once got no whole answer; {stuck[0].name}: {stuck[0].error}"
            return result(check, "failed", what, value=size)
        for one in sent:
            if (why := None if one in refused else _broken(one)) is not None:
                return result(check, "failed", f"{one.name}: {why}", value=size)
        most = overlap.at_once(sent)
        if most >= size and not refused:
            return result(check, "unmeasured", f"all {size} were answered at one time: none had to wait")
        queued = f"{size} requests at once, {most} answered at one time, {len(refused)} told to come back"
        return result(check, "passed", f"{queued}; every stream moved on within {settings.stall:.0f} s", value=size)

    def _storm(self, exchanges: Mapping[str, Exchange]) -> CheckResult:
        check = "hang/cancel-storm"
        sent = list(named(exchanges, "hang/storm/").values())
        cancelled = [one for one in sent if one.aborted]
        answering = sum(1 for one in cancelled if one.first is not None)
        judged = _answered(check, exchanges.get("hang/after-storm/0"), f"after {len(cancelled)} cancelled requests")
        if judged.outcome == "passed" and not answering:
            return result(check, "unmeasured", f"no answer was cut: {len(cancelled)} of {len(sent)} were cancelled")
        return judged

    def _drain(self, settings: Settings, exchanges: Mapping[str, Exchange]) -> CheckResult:
        check = "hang/drain"
        polls = named(exchanges, "hang/drain/")
        if not polls:
            return result(check, "unmeasured", "the server offers nothing that tells whether its queue is empty")
        count = 1 + max(int(place.partition("/")[0]) for place in polls)
        last = about.load(named(exchanges, f"hang/drain/{count - 1}/").values())
        if last.idle is None:
            return result(check, "unmeasured", "the server does not tell how many requests run and wait")
        if not last.idle:
            left = f"{last.running:.0f} requests still run and {last.waiting:.0f} wait"
            return result(
                check, "failed", f"{left} {settings.drain:.0f} s after the last was asked", value=last.running
            )
        return result(check, "passed", f"nothing runs and nothing waits, seen at look {count}", value=count)


def _burst(settings: Settings, told: about.About) -> int:
    wanted = settings.burst if told.max_running is None else int(told.max_running * settings.times)
    return min(wanted, settings.most)


def _answered(check: str, one: Exchange | None, when: str) -> CheckResult:
    """A question must have been answered; no answer is the fault that is looked for here, not a lack of evidence."""
    if one is None:
        return result(check, "unmeasured", "was not asked")
    if one.error is not None and one.error.startswith("not asked"):
        return result(check, "unmeasured", one.error)
    if (why := one.error or _broken(one)) is not None:
        return result(check, "failed", f"{when}: {why}")
    return result(check, "passed", f"answered {when}, in {one.seconds:.1f} s", value=one.seconds)


def _broken(one: Exchange) -> str | None:
    """Why an exchange is no whole reply."""
    try:
        reply.read(one)
    except reply.NotAReply as error:
        return str(error)
    return None
