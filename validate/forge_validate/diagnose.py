"""What kind of wrong it is: from the results of all checks, and from nothing else.

The order is the order of dependence: a kernel that computes wrong spoils all that follows, numbers that are not finite
make every answer wrong, a tokenizer every prompt, a template every chat; what lies too far from a trusted run is asked alone
and past the cache, so it comes before both; what is right alone and wrong with a warm cache or in a batch is no matter of the
answer; only then does a wrong answer say something about the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from forge_core.model import Frozen
from forge_validate.checks import CheckResult
from forge_validate.checks.result import NO_REPLY
from forge_validate.checks.tokens import LEAK
from forge_validate.families import FAMILIES
from forge_validate.families.golden import LACKS as GOLDEN

Kind = Literal[
    "kernels",
    "wrong-server",
    "numbers",
    "tokenizer",
    "template",
    "garbage",
    "wrong-golden",
    "golden",
    "cache",
    "batch",
    "context",
    "poison",
    "hang",
    "leak",
    "budget",
    "parser",
    "stream",
    "answers",
    "no-answer",
    "no-golden",
    "not-exercised",
    "not-offered",
]


class Diagnosis(Frozen):
    """The kind of wrong, and what to do about it."""

    kind: Kind
    check: str
    """The `case/check` that shows it best."""
    meaning: str
    next_step: str


@dataclass(frozen=True)
class _Rule:
    kind: Kind
    shows: Callable[[CheckResult], bool]
    meaning: str
    next_step: str


def _failed(*checks: str) -> Callable[[CheckResult], bool]:
    return lambda result: (
        result.outcome == "failed" and result.check.partition("/")[2] in checks and result.value != NO_REPLY
    )


def _leaks(result: CheckResult) -> bool:
    return _failed("text")(result) and result.value == LEAK


def _unanswered(result: CheckResult) -> bool:
    if result.outcome == "unmeasured":
        return result.lacks is None
    return result.outcome == "failed" and result.value == NO_REPLY


def _out_of_budget(result: CheckResult) -> bool:
    asked = _failed("known", "tool-call")(result) or _family("parsers")(result)
    return asked and result.value == "length"


def _family(name: str) -> Callable[[CheckResult], bool]:
    return lambda result: result.outcome == "failed" and result.check.startswith(f"{name}/")


def _any(*shows: Callable[[CheckResult], bool]) -> Callable[[CheckResult], bool]:
    return lambda result: any(one(result) for one in shows)


def _not_exercised(result: CheckResult) -> bool:
    return result.outcome == "unmeasured" and result.check.partition("/")[0] in FAMILIES


def _numeric(outcome: str) -> Callable[[CheckResult], bool]:
    return lambda result: result.outcome == outcome and result.check.startswith("numeric/")


_RULES = (
    _Rule(
        "kernels",
        _numeric("failed"),
        "a kernel of the image computes wrong numbers",
        "the weights were not loaded: try another backend, or look at how this kernel was built",
    ),
    _Rule(
        "kernels",
        _numeric("unmeasured"),
        "a kernel that the policy demands could not be asked",
        "the weights were not loaded: look whether the image has this kernel for this GPU",
    ),
    _Rule(
        "wrong-server",
        _failed("served-model", "model-info", "flags"),
        "this is not the server that was asked for",
        "compare the serving's flags with what the server tells of itself",
    ),
    _Rule(
        "numbers",
        _failed("finite"),
        "the engine's numbers are broken (NaN or infinity)",
        "suspect kernels or weights: try another backend in the serving, compare the model's sha256",
    ),
    _Rule(
        "tokenizer",
        _failed("token-ids"),
        "the tokenizer is not the model's",
        "compare tokenizer.json and tokenizer_config.json with the model's own",
    ),
    _Rule(
        "template",
        _any(_failed("prompt-tokens"), _family("template")),
        "the chat template is not the model's",
        "compare the chat template (and a --chat-template flag) with the model's own",
    ),
    _Rule(
        "garbage",
        lambda result: _failed("text")(result) and not _leaks(result),
        "the model says garbage, with finite numbers",
        "suspect kernels, weights or scales: try another backend in the serving, compare the model's sha256",
    ),
    _Rule(
        "wrong-golden",
        lambda result: result.outcome == "failed" and result.check == "golden/subject",
        "the golden file is of another model or tokenizer, so nothing can be held against it",
        "look which model is served; if that is meant, record its golden from a trusted run",
    ),
    _Rule(
        "golden",
        _family("golden"),
        "what the model finds likely is not what the trusted run found likely, or not what it decodes itself",
        "compare number formats, scales and backends with the golden's subject; if `re-prefill` alone fails, suspect decoding",
    ),
    _Rule(
        "cache",
        _family("cache"),
        "the answer behind a cached prefix is another one",
        "suspect the attention backend with a prefix, the page size or the KV format; --disable-radix-cache must cure it",
    ),
    _Rule(
        "batch",
        _family("batch"),
        "the answer in a batch is not the one said alone",
        "suspect kernels that are chosen by batch size and captured graphs; --disable-cuda-graph tells which",
    ),
    _Rule(
        "context",
        _family("context"),
        "a long prompt is not read as it should be",
        "suspect chunked prefill and the attention backend at this length; --chunked-prefill-size -1 tells which",
    ),
    _Rule(
        "poison",
        _family("poison"),
        "the server answers otherwise after load than before",
        "one request spoils later ones: look for NaN left in the KV pool or a request's state that outlives it",
    ),
    _Rule(
        "hang",
        _family("hang"),
        "the server stops answering",
        "read the end of the server's log; take a stack trace of its scheduler while it hangs",
    ),
    _Rule(
        "leak",
        _family("leak"),
        "requests leave something behind",
        "compare what is left with the kinds of request of the load: ended, aborted, refused",
    ),
    _Rule(
        "budget",
        _out_of_budget,
        "the token budget ran out before the answer",
        "raise the case's `max_tokens`, or find out why the model thinks for so long",
    ),
    _Rule(
        "parser",
        lambda result: _any(_failed("thinking", "tool-call", "same"), _family("parsers"))(result) or _leaks(result),
        "the answer is not where it belongs",
        "compare --reasoning-parser and --tool-call-parser with what the model's template writes",
    ),
    _Rule(
        "stream",
        _family("stream"),
        "the streamed answer is not the buffered one, or not in the protocol's order",
        "compare the two exchanges; look for a proxy in between, and at what the detokenizer and the parsers hold back",
    ),
    _Rule(
        "answers",
        lambda result: result.outcome == "failed" and not _unanswered(result),
        "the model speaks, and its answer is wrong",
        "weights, number formats or scales differ from those of the known answers: compare the exchange",
    ),
    _Rule(
        "no-answer",
        lambda result: _unanswered(result) and not _not_exercised(result),
        "the server gave no answer",
        "read the end of the server's log",
    ),
    _Rule(
        "no-golden",
        lambda result: result.outcome == "unmeasured" and result.lacks == GOLDEN,
        "there is no golden file to hold the server against",
        "record one from a trusted run (`python -m forge_validate golden`); without any, see `bootstrap` in docs/golden.md",
    ),
    _Rule(
        "not-exercised",
        _not_exercised,
        "a check did not come to what it is about",
        "give the server what the explanation names, or change the suite",
    ),
    _Rule(
        "not-offered",
        lambda result: result.outcome == "unmeasured",
        "the server does not offer what a required check needs",
        "start the server with it, or name the check with a reason in `waived` of the policy",
    ),
)


def diagnose(failing: Sequence[CheckResult]) -> Diagnosis | None:
    """Name the kind of wrong that the failing required checks show; none without any."""
    for rule in _RULES:
        if (found := next((result for result in failing if rule.shows(result)), None)) is not None:
            return Diagnosis(kind=rule.kind, check=found.check, meaning=rule.meaning, next_step=rule.next_step)
    return None
