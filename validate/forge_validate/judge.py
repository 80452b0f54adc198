"""Judging: pure, no server. Recorded exchanges go the same way as live ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from forge_core.errors import UsageError
from forge_core.model import Frozen, ModelRef
from forge_validate import families, reply
from forge_validate.checks import CHECKS, CheckResult, Evidence, finite
from forge_validate.exchange import Exchange
from forge_validate.families import Family
from forge_validate.golden.document import Golden
from forge_validate.offers import UNSEEN, Offers
from forge_validate.offers.see import see
from forge_validate.policy import Bootstrap, Policy
from forge_validate.suite import GENERATES, Answers, Case, Suite


@dataclass(frozen=True)
class Bench:
    """All that judging needs beside the exchanges."""

    suite: Suite
    answers: Answers
    policy: Policy
    served: str
    """The name the server was told to serve the model under."""
    flags: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    """What the serving wants the server to run with."""
    offers: Offers = UNSEEN
    """What the server offers; empty: `judge` reads it from the exchanges."""
    model: Path | None = None
    """The model's folder, for what is rendered offline; none: it is not here."""
    identity: ModelRef | None = None
    """That folder by its bytes; none: it is not here."""
    golden: Golden | None = None
    """What a trusted run of this model said; none: there is no such file, or the suite has no use for it."""
    bootstrap: Bootstrap | None = None
    """The policy's rule, where it holds for what is judged (see `bootstrap`)."""
    families: tuple[tuple[Family, Frozen], ...] = field(init=False)
    """The suite's families with their settings."""

    def __post_init__(self) -> None:
        """Raise UsageError for a check or a family that no code stands behind, and for settings it does not know."""
        unknown = tuple(f"{c.name}: {name}" for c in self.suite.cases for name in c.checks if name not in CHECKS)
        if unknown:
            raise UsageError(
                f"suites/{self.suite.suite}.yaml names unknown checks",
                details=unknown,
                hint=f"there are: {', '.join(sorted(CHECKS))}",
            )
        object.__setattr__(self, "families", families.chosen(self.suite.suite, self.suite.families))

    def judge(self, exchanges: Iterable[Exchange]) -> tuple[CheckResult, ...]:
        """Every check of every case and family; what has no response is unmeasured, never passed."""
        recorded = {exchange.name: exchange for exchange in exchanges}
        knowing = self if self.offers.seen else replace(self, offers=see(recorded))
        results = [result for case in self.suite.cases for result in knowing.judge_case(case, recorded)]
        for family, settings in knowing.families:
            results += family.judge(settings, knowing, recorded)
        return tuple(results)

    def judge_case(self, case: Case, recorded: Mapping[str, Exchange]) -> tuple[CheckResult, ...]:
        """Every check of one case, from the exchanges so far, by case."""
        exchange = recorded.get(case.name)
        question = self.answers.questions.get(case.question) if case.question else None
        lacks = self.offers.lacking(case.needs)
        results = []
        for name in (*case.checks, *_unasked(case, exchange)):
            label = f"{case.name}/{name}"
            if lacks is not None:
                told = self.offers.refusal(lacks)
                results.append(CheckResult(check=label, outcome="unmeasured", explanation=told, lacks=lacks))
                continue
            if exchange is None or exchange.error is not None:
                why = "was not asked" if exchange is None else exchange.error
                results.append(CheckResult(check=label, outcome="unmeasured", explanation=str(why)))
                continue
            evidence = Evidence(label, case, exchange, question, self.served, self.policy, self.flags, recorded)
            results.append(CHECKS[name](evidence))
        return tuple(results)


def _unasked(case: Case, exchange: Exchange | None) -> tuple[str, ...]:
    """Checks that every exchange gets, named or not: logprobs are finite wherever there are some."""
    if "finite" in case.checks or exchange is None or exchange.error is not None or case.endpoint not in GENERATES:
        return ()
    try:
        told = reply.read(exchange).logprobs is not None
    except reply.NotAReply:
        told = finite.broken_numbers(exchange) is not None
    return ("finite",) if told else ()
