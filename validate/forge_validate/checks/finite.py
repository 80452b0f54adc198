"""Logprobs are present and finite. NaN arrives as null, as the word `NaN`, or as an HTTP error."""

from __future__ import annotations

import math
import re
from typing import Any

from forge_validate import reply
from forge_validate.checks.result import CheckResult, Evidence
from forge_validate.exchange import Exchange
from forge_validate.reply import Reply

# What servers say when they cannot write a NaN as JSON: `Out of range float values are not JSON compliant: nan`.
_VLLM_MINUS_INFINITY = -9999.0
"""vLLM writes this for minus infinity: no token with it can have been chosen, unless a grammar forced it."""
_NAN = re.compile(r"(?i)\bnan\b|not JSON compliant|out of range float")


def finite(evidence: Evidence) -> CheckResult:
    """Every token has a logprob that is a number no greater than 0, and so has every alternative."""
    try:
        said = reply.read(evidence.exchange)
    except reply.NotAReply as error:
        # A value, unlike the other checks': a server that cannot tell its logprobs has told something about them.
        why = broken_numbers(evidence.exchange)
        return evidence.no_reply(error) if why is None else evidence.failed(why, value=evidence.exchange.status)
    if not said.logprobs:
        return evidence.failed("logprobs were asked for and none came")
    if (why := complain(said, evidence.exchange)) is not None:
        return evidence.failed(why, value="logprobs", answer=said.content)
    lowest = min(value for value in said.logprobs if value is not None)
    return evidence.passed(f"{len(said.logprobs)} finite logprobs", value=lowest)


def complain(said: Reply, exchange: Exchange) -> str | None:
    """What is wrong with the logprobs of a reply; none if nothing is, or if there are none."""
    # A grammar forbids tokens by minus infinity, which is null in JSON like NaN.
    bound = is_bound(exchange.request.body)
    lowest = -math.inf if bound else _VLLM_MINUS_INFINITY
    wrong = [
        value
        for value in said.logprobs or ()
        if value is None or not math.isfinite(value) or not lowest < value <= 1e-6
    ]
    if wrong:
        return f"{len(wrong)} of {len(said.logprobs or ())} logprobs are no log of a probability, the first is {_told(wrong[0])}"
    others = [
        value
        for value in said.alternatives
        if (value is None and not bound) or (value is not None and (math.isnan(value) or value > 1e-6))
    ]
    if others:
        return f"{len(others)} of {len(said.alternatives)} alternatives have no log of a probability, {_told(others[0])} is one"
    return None


def asked(exchange: Exchange) -> bool:
    """Whether the request asked for logprobs, in any of the shapes."""
    body = exchange.request.body
    if not isinstance(body, dict):
        return False
    named = (body.get("logprobs"), body.get("top_logprobs"), body.get("return_logprob"), body.get("prompt_logprobs"))
    # `logprobs: 0` of the completions endpoint asks for the chosen token's.
    return any(value is not None and value is not False for value in named)


def broken_numbers(exchange: Exchange) -> str | None:
    """Why an HTTP error speaks of broken numbers: its own words, or that it answers a request for logprobs."""
    if exchange.error is not None or exchange.status is None or exchange.status < 500:
        return None
    told = f"HTTP {exchange.status}: {reply.shown(exchange)}"
    if _NAN.search(told):
        return told
    # A gateway's errors and a server that starts up have nothing to do with what was asked.
    if asked(exchange) and exchange.status == 500:
        return f"a request for logprobs is answered by {told}"
    return None


def is_bound(body: Any) -> bool:
    """Whether a grammar binds the reply."""
    if not isinstance(body, dict):
        return False
    parameters = body.get("sampling_params")
    inner = parameters if isinstance(parameters, dict) else {}
    names = ("json_schema", "regex", "ebnf", "structural_tag", "guided_json", "guided_regex", "structured_outputs")
    kind = body.get("response_format")
    return (
        any(body.get(name) or inner.get(name) for name in names)
        or (isinstance(kind, dict) and kind.get("type") not in (None, "text"))
        or body.get("tool_choice") not in (None, "none", "auto")
    )


def _told(value: float | None) -> str:
    return "null (NaN)" if value is None else str(value)
