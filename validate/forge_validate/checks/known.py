"""Known answers: by value, as a whole, never by substring."""

from __future__ import annotations

from forge_validate import reply
from forge_validate.checks.result import CheckResult, Evidence
from forge_validate.checks.tokens import tags


def known(evidence: Evidence) -> CheckResult:
    """The answer is the known one: the content, or the reasoning where the answers allow the content to be empty."""
    question = evidence.question
    if question is None or question.content is None:
        return evidence.unmeasured(f"no answer to {evidence.case.question!r} is known for this model")
    try:
        said = reply.read(evidence.exchange)
    except reply.NotAReply as error:
        return evidence.no_reply(error)
    if said.content.strip():
        met = question.content.met_by(said.content)
        # Raw completions have no end of their own: there the budget cuts right answers and wrong ones alike.
        if not met and said.finish == "length" and evidence.case.endpoint == "chat":
            return evidence.failed(
                f"the token budget of {evidence.budget} ran out in the middle of the answer",
                value=said.finish,
                answer=said.content,
            )
        return _compare(evidence, "content", said.content, str(question.content), met)
    if said.finish == "length":
        return evidence.failed(
            f"the token budget of {evidence.budget} ran out before there was any content",
            value=said.finish,
            answer=said.reasoning,
        )
    if not said.reasoning.strip():
        return evidence.failed("neither content nor reasoning", value=said.finish, answer="")
    if question.reasoning is None:
        return evidence.failed(
            "the content is empty and all of the answer lies in the reasoning: parser, template or thinking switch",
            value=said.finish,
            answer=said.reasoning,
        )
    met = question.reasoning.met_by(said.reasoning)
    return _compare(evidence, "reasoning", said.reasoning, str(question.reasoning), met)


def thinking(evidence: Evidence) -> CheckResult:
    """The model's thinking is where the case says: in the reasoning field, or nowhere; no tags in the content."""
    try:
        said = reply.read(evidence.exchange)
    except reply.NotAReply as error:
        return evidence.no_reply(error)
    if (tag := tags.thinking(said.content)) is not None:
        return evidence.failed(f"{tag} leaks into the content", answer=said.content)
    if evidence.case.thinking is False and said.reasoning.strip():
        return evidence.failed("thinking is switched off, yet there is reasoning", answer=said.reasoning)
    if evidence.case.thinking is not False and not said.reasoning.strip():
        return evidence.failed("thinking is on, yet there is no reasoning", answer=said.content)
    return evidence.passed("thinking is where it belongs", value=len(said.reasoning), answer=said.reasoning or None)


def _compare(evidence: Evidence, place: str, text: str, expected: str, met: bool) -> CheckResult:
    if met:
        return evidence.passed(f"the {place} is the known answer", value=place, answer=text.strip())
    return evidence.failed(f"the {place} is not {expected}", value=place, answer=text)
