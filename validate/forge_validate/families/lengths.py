"""What came of one long prompt: read one way as the other, the needle found, and really as long as it should be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_validate import reply
from forge_validate.checks.result import CheckResult
from forge_validate.exchange import Exchange
from forge_validate.families import hits, long, prompts
from forge_validate.families.about import About
from forge_validate.families.family import result
from forge_validate.families.judging import Pair, same
from forge_validate.families.long import Length

if TYPE_CHECKING:
    from forge_validate.families.context import Settings
    from forge_validate.judge import Bench


@dataclass(frozen=True)
class Seen:
    """All that the judgement rests on."""

    settings: Settings
    bench: Bench
    told: About
    exchanges: Mapping[str, Exchange]
    bound: float | None


def too_long(seen: Seen) -> CheckResult:
    """A prompt beyond the window is refused; neither silence nor a cut one will do."""
    check, window, one = "context/too-long", seen.told.window, seen.exchanges.get("context/too-long")
    if window is None:
        return result(check, "unmeasured", "the server does not tell the length of its window")
    if one is None or (one.error is not None and one.error.startswith("not asked")):
        return result(check, "unmeasured", "was not asked" if one is None else str(one.error))
    what = f"more than the {window} tokens of the window"
    if one.error is not None:
        return result(check, "failed", f"{what}: not refused: {one.error}", value=window)
    if one.status is not None and 400 <= one.status < 500:
        return result(check, "passed", f"{what}: HTTP {one.status}", value=window)
    if one.status == 200:
        read = hits.prompt_tokens(one)
        return result(check, "failed", f"{what} are answered, as if they were {read}", value=window, answer=_text(one))
    return result(check, "failed", f"{what}: HTTP {one.status}: {reply.shown(one)}", value=window)


def judge_length(seen: Seen, length: Length) -> CheckResult:
    """The check of a length."""
    check = f"context/{length.name}"
    cold = seen.exchanges.get(f"{check}/cold")
    if length.tokens is None or cold is None:
        return result(check, "unmeasured", _unasked(seen, length))
    if cold.status is not None and 400 <= cold.status < 500:
        why = f"{length.tokens} tokens, which fit: HTTP {cold.status}: {reply.shown(cold)}"
        return result(check, "failed", why, value=length.tokens)
    pair = Pair(f"{check}/cold", f"{check}/pieces", f"{length.tokens} tokens read in other pieces")
    judged = same(check, [pair], seen.exchanges, seen.bound, value=length.tokens)
    if judged.outcome == "failed":
        return judged
    lost, sought = _needle(seen, length.tokens, cold)
    if lost:
        return result(check, "failed", sought, value=length.tokens, answer=_text(cold))
    if judged.outcome != "passed":
        return judged
    if (idle := _unexercised(seen, check, length, cold)) is not None:
        return result(check, "unmeasured", idle)
    return result(check, "passed", f"{length.tokens} tokens; {sought}; {judged.explanation}", value=judged.value)


def _unasked(seen: Seen, length: Length) -> str:
    """Why there is no answer to a length."""
    if length.tokens is None:
        return "the server does not tell where this edge lies"
    if prompts.chat_only(seen.bench):
        return "so exact a prompt is one of token ids, and the server has no /v1/completions to take them"
    if not any(name.startswith("context/tokenize/") for name in seen.exchanges):
        return "so exact a prompt is one of token ids, and the server offers nothing that makes them"
    return (
        f"{length.tokens} tokens: too few for the needles, or beyond the {seen.settings.budget} of the suite's budget"
    )


def _needle(seen: Seen, tokens: int, cold: Exchange) -> tuple[bool, str]:
    """Whether the needle is lost, and what came of looking for it."""
    settings = seen.settings
    index = tokens % len(settings.depths)
    wanted, found = long.number(index), long.answer(_text(cold))
    if found == wanted:
        return False, f"the needle at {settings.depths[index]:.0%} is found"
    if tokens > settings.reach.value:
        return False, f"no needle is demanded beyond {settings.reach.value:.0f} tokens"
    if long.answer(_text(seen.exchanges.get(f"context/short/{index}"))) != wanted:
        return False, "the model finds no needle in a short text either"
    lost = f"the needle at {settings.depths[index]:.0%} of {tokens} tokens is lost"
    return True, f"{lost}: {found or 'no number'} instead of {wanted}, which a short text gives"


def _unexercised(seen: Seen, check: str, length: Length, cold: Exchange) -> str | None:
    """Why an answer that is right says nothing: another length, or not read in other pieces."""
    told = hits.prompt_tokens(cold)
    if told != length.tokens:
        return f"the prompt had {told} tokens, not {length.tokens}"
    already, hit = hits.hit(seen.exchanges, f"{check}/cold"), hits.hit(seen.exchanges, f"{check}/pieces")
    if length.over is not None and told - (already or 0) <= length.over:
        return f"{already} of {told} tokens were cached, so the rest was no longer than {length.over}"
    cut = long.steps(told, seen.told.chunk)[-1]
    if hit is None:
        return "the server does not tell whether its prefix cache was hit, so nothing shows that it was read in pieces"
    # A page may be rounded off, and the one token said after a piece may be the next of the prompt; more than that would be the
    # whole prompt, cached by the other way.
    if not cut - (seen.told.page or 1) < hit <= cut + 1:
        return f"{hit} tokens were cached where {cut} had been read before: it was not read in other pieces"
    return None


def _text(one: Exchange | None) -> str:
    try:
        return reply.read(one).content if one is not None else ""
    except reply.NotAReply:
        return ""
