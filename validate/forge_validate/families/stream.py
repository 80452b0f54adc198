"""The stream: it says what the buffered answer says, in the order of the protocol, and counts the same.

Each probe is asked once for the cache, then buffered and streamed under the same conditions; where the two differ it is
asked buffered once more, because a server that does not repeat itself cannot be judged by equality. The probes are in
stream.yaml; a stop string is taken from what the model said, so that it is met whatever the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from forge_core.model import Frozen
from forge_validate import data, reply
from forge_validate.checks.result import CheckResult
from forge_validate.checks.tools import parsed
from forge_validate.exchange import Exchange, Request
from forge_validate.families import pieces, prompts
from forge_validate.families.family import Ask, Wave, Waves, result
from forge_validate.families.lacking import refused_for_parser
from forge_validate.families.pieces import Whole
from forge_validate.families.stopping import judge_length, judge_several, judge_stop, stop_string
from forge_validate.suite import Name

if TYPE_CHECKING:
    from forge_validate.judge import Bench

_TEMPLATE_TOKENS = 512
# The probe whose answer goes on for long, so that a budget and a stop string cut it; and what stands in where it is a chat only.
_CUT = ("completion", "chat")


class Probe(Frozen):
    """One request, asked both ways."""

    name: Name
    path: Literal["/v1/completions", "/v1/chat/completions"]
    body: dict[str, Any]


class Probes(Frozen):
    """stream.yaml."""

    schema_version: Literal[1] = Field(alias="schema")
    probes: Annotated[tuple[Probe, ...], Field(min_length=1)]


class Settings(Frozen):
    """The section `stream` of a suite."""

    tokens: Annotated[int, Field(ge=8)]
    """Of each answer at most."""
    short: Annotated[int, Field(gt=0)]
    """The budget that must run out."""
    several: Annotated[int, Field(ge=2)] = 2
    """Answers to one request (`n`)."""
    timeout: Annotated[float, Field(gt=0)]
    """Seconds for one answer."""


class Stream:
    """The family."""

    name = "stream"
    settings = Settings
    checks = "stream = buffered, order of the pieces, usage, finish reasons, n, stop strings"

    def waves(self, settings: Settings, bench: Bench) -> Waves:
        """Every probe for the cache, buffered, streamed; then the budget, the stop string and several answers."""
        cut, last = None, _cut(bench)
        for probe in _asked(bench):
            yield Wave((self._ask(settings, bench, probe, "first", max_tokens=1),))
            (buffered,) = yield Wave((self._ask(settings, bench, probe, "buffered"),))
            (streamed,) = yield Wave((self._ask(settings, bench, probe, "streamed", **_STREAMED),))
            if _difference(buffered, streamed) is not None:
                yield Wave((self._ask(settings, bench, probe, "again"),))
            if probe == last:
                cut = stop_string(buffered)
        probe = last
        for way, more in (("buffered", {}), ("streamed", _STREAMED)):
            yield Wave((self._ask(settings, bench, probe, f"length/{way}", **more, max_tokens=settings.short),))
            several = {"n": settings.several, "temperature": 1.0}
            yield Wave((self._ask(settings, bench, probe, f"n/{way}", **more, **several),))
            if cut is not None:
                yield Wave((self._ask(settings, bench, probe, f"stop/{way}", **more, stop=[cut]),))

    def judge(self, settings: Settings, bench: Bench, exchanges: Mapping[str, Exchange]) -> tuple[CheckResult, ...]:
        """For each probe: equal, in order, counted; then what ends an answer, and several of them."""
        found, cut = [], _cut(bench).name
        for probe in probes().probes:
            found += self._probe(probe, exchanges, probe in _asked(bench))
        for way in ("buffered", "streamed"):
            length, stop, several = (exchanges.get(f"stream/{cut}/{what}/{way}") for what in ("length", "stop", "n"))
            whole = exchanges.get(f"stream/{cut}/buffered")
            found.append(judge_length(f"stream/length-{way}", length))
            found.append(judge_stop(f"stream/stop-{way}", stop, whole))
            found.append(judge_several(f"stream/n-{way}", several))
        return tuple(found)

    def cost(self, settings: Settings) -> int:
        """As if each byte were a token and no answer were repeated by the server."""
        asked = probes().probes
        texts = sum(len(probe.model_dump_json().encode()) + _TEMPLATE_TOKENS for probe in asked)
        longest = max(len(probe.model_dump_json()) for probe in asked if probe.name in _CUT)
        cut = longest + settings.tokens
        budgets = sum(3 * int(probe.body.get("max_tokens", settings.tokens)) + 1 for probe in asked)
        return 4 * texts + budgets + 2 * (3 + settings.several) * cut

    def _ask(self, settings: Settings, bench: Bench, probe: Probe, place: str, **more: Any) -> Ask:
        body = {
            "model": bench.served,
            "max_tokens": settings.tokens,
            "temperature": 0,
            "seed": bench.suite.seed,
            **probe.body,
            **more,
        }
        request = Request(method="POST", path=probe.path, body=body)
        return Ask(f"stream/{probe.name}/{place}", request, settings.timeout)

    def _probe(self, probe: Probe, exchanges: Mapping[str, Exchange], offered: bool) -> list[CheckResult]:
        names = [f"stream/{probe.name}-{what}" for what in ("same", "order", "usage")]
        if not offered:
            return [result(name, "unmeasured", f"the server has no {probe.path}") for name in names]
        buffered, streamed = (exchanges.get(f"stream/{probe.name}/{way}") for way in ("buffered", "streamed"))
        for one in (buffered, streamed):
            if one is None or one.error is not None:
                why = "was not asked" if one is None else str(one.error)
                return [result(name, "unmeasured", why) for name in names]
            if refused_for_parser(one):
                return [result(name, "unmeasured", "the server refuses tools: no tool parser") for name in names]
        assert buffered is not None and streamed is not None
        try:
            theirs = pieces.read(buffered)
        except reply.NotAReply as error:
            return [result(name, "unmeasured", f"the buffered answer: {error}") for name in names]
        again = exchanges.get(f"stream/{probe.name}/again")
        order = pieces.disorder(streamed)
        return [
            _same(names[0], buffered, streamed, again),
            result(
                names[1],
                "passed" if order is None else "failed",
                order or "the pieces come in order",
                reproduce=None if order is None else prompts.curl(streamed.request),
            ),
            _usage(names[2], theirs, streamed),
        ]


_STREAMED: Mapping[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


@cache
def probes() -> Probes:
    """The probes of this package; raises UsageError for a mistake in the file."""
    return data.load("families", "stream", Probes)


def _asked(bench: Bench) -> tuple[Probe, ...]:
    """The probes for which the server has an endpoint."""
    return tuple(probe for probe in probes().probes if probe.path != prompts.PATH or not prompts.chat_only(bench))


def _cut(bench: Bench) -> Probe:
    return next(probe for name in _CUT for probe in _asked(bench) if probe.name == name)


def _same(name: str, buffered: Exchange, streamed: Exchange, again: Exchange | None) -> CheckResult:
    complaint = _difference(buffered, streamed)
    if complaint is None:
        return result(name, "passed", "the stream says what the buffered answer says")
    if _cut_call(buffered, streamed):
        return result(name, "unmeasured", f"the budget ran out around a call: {complaint}")
    if again is None or again.error is not None:
        return result(name, "unmeasured", f"{complaint}, and there is no third answer to tell whose it is")
    if _difference(buffered, again) is not None:
        if _difference(again, streamed) is None:
            return result(name, "passed", "the stream says what the second buffered answer says")
        return result(name, "unmeasured", f"{complaint}, but the server does not repeat its buffered answer either")
    return result(name, "failed", complaint, reproduce=prompts.curl(streamed.request))


def _cut_call(buffered: Exchange, streamed: Exchange) -> bool:
    """Whether a call was not whole when both answers ended: a stream shows its pieces, a buffered answer none of it."""
    try:
        ends = [pieces.read(one).first for one in (buffered, streamed)]
    except reply.NotAReply:
        return False
    return all(end.finish == "length" for end in ends) and len({len(end.calls) for end in ends}) > 1


def _difference(buffered: Exchange, streamed: Exchange) -> str | None:
    """The first thing in which two answers are not the same; none if they are."""
    try:
        theirs = _compared(pieces.read(buffered))
        mine = _compared(pieces.read(streamed))
    except reply.NotAReply as error:
        return str(error)
    for name, value in mine.items():
        if value != theirs[name]:
            return f"the {name} is {str(value)[:120]!r}, buffered it is {str(theirs[name])[:120]!r}"
    return None


def _compared(said: Whole) -> dict[str, object]:
    first = said.first
    return {
        "reasoning": first.reasoning,
        "calls": [(call.name, parsed(call.arguments) or call.arguments) for call in first.calls],
        # What stands around a call is nobody's text: SGLang 0.5.23 streams it and drops it when buffered.
        "content": "" if first.calls else first.content,
        "finish reason": first.finish,
    }


def _usage(name: str, theirs: Whole, streamed: Exchange) -> CheckResult:
    try:
        said = pieces.read(streamed)
    except reply.NotAReply as error:
        return result(name, "unmeasured", f"the streamed answer: {error}")
    mine, other = said.usage, theirs.usage
    same_text = _compared(said) == _compared(theirs)
    for field in ("prompt_tokens", "completion_tokens", "total_tokens"):
        if not isinstance(mine.get(field), int) or not isinstance(other.get(field), int):
            return result(name, "failed", f"`{field}` is not told both ways", value=field)
        if mine[field] != other[field] and (same_text or field == "prompt_tokens"):
            return result(
                name, "failed", f"`{field}` is {mine[field]}, buffered it is {other[field]}", value=mine[field]
            )
    for usage in (mine, other):
        if usage["prompt_tokens"] + usage["completion_tokens"] != usage["total_tokens"]:
            return result(name, "failed", f"the tokens do not add up: {dict(usage)}")
    if not same_text:
        return result(name, "unmeasured", "the two answers differ, so the tokens of the answer cannot be compared")
    return result(name, "passed", f"{mine['total_tokens']} tokens both ways", value=mine["total_tokens"])
