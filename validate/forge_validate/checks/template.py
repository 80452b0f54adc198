"""What the model is really given: token ids of a plain prompt, and the length of a templated one."""

from __future__ import annotations

from forge_validate import reply
from forge_validate.checks.result import CheckResult, Evidence


def token_ids(evidence: Evidence) -> CheckResult:
    """`/v1/tokenize` gives the ids that the model's own tokenizer gives: no template and no kernel is in between."""
    known = evidence.question.tokens if evidence.question else ()
    if not known:
        return evidence.unmeasured(f"no token ids of {evidence.case.question!r} are known for this model")
    body = evidence.exchange.response
    told = body.get("tokens") if isinstance(body, dict) else None
    if evidence.exchange.status != 200 or not isinstance(told, list):
        return evidence.failed(f"HTTP {evidence.exchange.status}, no token ids")
    text = " ".join(map(str, told))
    if tuple(told) != known:
        return evidence.failed(f"the prompt became the tokens {text}, not {' '.join(map(str, known))}", value=text)
    return evidence.passed(f"the prompt became the {len(known)} tokens it should", value=text)


def prompt_tokens(evidence: Evidence) -> CheckResult:
    """The prompt is as long as the model's own template makes it."""
    known = evidence.question.prompt_tokens if evidence.question else None
    if known is None:
        return evidence.unmeasured(f"no prompt length of {evidence.case.question!r} is known for this model")
    try:
        said = reply.read(evidence.exchange)
    except reply.NotAReply as error:
        return evidence.no_reply(error)
    if said.prompt_tokens is None:
        return evidence.failed("the reply does not say how long the prompt was")
    if said.prompt_tokens != known:
        return evidence.failed(
            f"the prompt was {said.prompt_tokens} tokens long, the model's own template makes {known}",
            value=said.prompt_tokens,
        )
    return evidence.passed(f"the prompt was {known} tokens long, as it should", value=known)
