"""What ends an answer: the budget and stop strings; and several answers to one request."""

from __future__ import annotations

import re

from forge_validate import reply
from forge_validate.checks.result import CheckResult
from forge_validate.exchange import Exchange
from forge_validate.families import pieces, prompts
from forge_validate.families.family import result
from forge_validate.families.pieces import Whole


def stop_string(exchange: Exchange) -> str | None:
    """A word of the answer's second half that does not stand before it; none when the answer is too short."""
    try:
        text = pieces.read(exchange).first.content
    except reply.NotAReply:
        return None
    for found in re.finditer(r"\w{2,}\W{0,2}", text):
        if found.start() >= len(text) // 2 and text.find(found.group()) == found.start():
            return found.group()
    return None


def judge_length(name: str, exchange: Exchange | None) -> CheckResult:
    """The budget ends the answer: the finish reason says so, and the usage is the budget."""
    said = _read(name, exchange)
    if isinstance(said, CheckResult) or exchange is None:
        return said if isinstance(said, CheckResult) else result(name, "unmeasured", "was not asked")
    budget, spent, finish = exchange.request.body["max_tokens"], said.usage.get("completion_tokens"), said.first.finish
    curl = prompts.curl(exchange.request)
    if isinstance(spent, int) and spent < budget and finish == "stop":
        return result(name, "unmeasured", f"the answer ended by itself after {spent} tokens", value=spent)
    if finish != "length":
        return result(name, "failed", f"the finish reason is {finish!r}, not 'length'", value=finish, reproduce=curl)
    if spent != budget:
        return result(
            name, "failed", f"the usage tells {spent} tokens, the budget was {budget}", value=spent, reproduce=curl
        )
    return result(name, "passed", f"ended by the budget of {budget} tokens", value=spent)


def judge_stop(name: str, exchange: Exchange | None, whole: Exchange | None) -> CheckResult:
    """The answer ends where the stop string would begin, and nothing of it is said."""
    said = _read(name, exchange)
    if isinstance(said, CheckResult):
        return said
    unstopped = _read(name, whole)
    if isinstance(unstopped, CheckResult) or exchange is None:
        return result(name, "unmeasured", "there is no whole answer to hold it against")
    stop, text = exchange.request.body["stop"][0], said.first.content
    expected = unstopped.first.content.partition(stop)[0]
    curl = prompts.curl(exchange.request)
    if stop in text:
        return result(name, "failed", f"the stop string {stop!r} is in the answer", answer=text, reproduce=curl)
    if text != expected:
        # Noise may flip a token; text that is cut elsewhere, or with a piece of the stop string, is no noise.
        cut = expected.startswith(text) or text.startswith(expected)
        why = f"the answer does not end where {stop!r} would begin"
        return result(name, "failed" if cut else "unmeasured", why, answer=text, reproduce=curl if cut else None)
    if said.first.finish != "stop":
        return result(name, "failed", f"the finish reason is {said.first.finish!r}, not 'stop'", reproduce=curl)
    return result(name, "passed", f"ended before {stop!r}", answer=text)


def judge_several(name: str, exchange: Exchange | None) -> CheckResult:
    """As many answers as were asked for, each with an index, a text and a finish reason."""
    said = _read(name, exchange)
    if isinstance(said, CheckResult) or exchange is None:
        return said if isinstance(said, CheckResult) else result(name, "unmeasured", "was not asked")
    wanted, curl = exchange.request.body["n"], prompts.curl(exchange.request)
    indices = sorted(choice.index for choice in said.choices)
    if indices != list(range(wanted)):
        return result(
            name, "failed", f"the answers have the indices {indices}, {wanted} were asked for", reproduce=curl
        )
    for choice in said.choices:
        if choice.finish is None or not choice.content:
            return result(name, "failed", f"answer {choice.index} is not whole", reproduce=curl)
    if "stream" in exchange.request.body and (complaint := pieces.disorder(exchange)) is not None:
        return result(name, "failed", complaint, reproduce=curl)
    return result(name, "passed", f"{wanted} answers", value=wanted)


def _read(name: str, exchange: Exchange | None) -> Whole | CheckResult:
    """The reply, or the result that there is none."""
    if exchange is None or exchange.error is not None:
        return result(name, "unmeasured", "was not asked" if exchange is None else str(exchange.error))
    try:
        return pieces.read(exchange)
    except reply.NotAReply as error:
        if exchange.status is not None and 400 <= exchange.status < 500:
            return result(name, "unmeasured", f"the server does not offer it: {error}")
        return result(name, "failed", str(error), reproduce=prompts.curl(exchange.request))
