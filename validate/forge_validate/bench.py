"""Which suite and which answers belong to a profile, and what the user chose instead."""

from __future__ import annotations

from forge_core.errors import UsageError
from forge_core.model import Deviation
from forge_validate import data, policy, serving, suite
from forge_validate.families.golden import GoldenFamily
from forge_validate.golden import document
from forge_validate.golden.document import Golden
from forge_validate.judge import Bench
from forge_validate.policy import Policy
from forge_validate.suite import Answers, Suite

ANY = "any"
"""The profile, the suite and the answers for a server of which nothing is known."""


def known_profile(name: str | None, *, boots: bool = True) -> str:
    """The profile, if it has a policy, and a serving where something is to be started; raises UsageError."""
    known = set(data.names("policies")) & set(data.names("serving") if boots else data.names("policies"))
    hint = f"profiles: {', '.join(sorted(known))}; e.g. `-- --profile rehearsal`"
    if name is None:
        raise UsageError("no --profile given", hint=hint)
    if name not in known:
        what = "a serving and a policy" if boots else "a policy"
        raise UsageError(f"no profile {name!r} with {what}", hint=hint)
    return name


def bench(profile: str, *, suite_name: str | None = None, answers: str | None = None) -> Bench:
    """The suite, answers, policy and flags of a profile that is started; raises UsageError."""
    rules, plan = policy.load(profile), serving.load(profile)
    questions, known = suite.load(suite_name or rules.suite, answers or plan.model)
    return Bench(questions, known, rules, plan.model, plan.intended(), golden=_golden(questions, known))


def bench_of_others(profile: str, served: str, *, suite_name: str | None = None, answers: str | None = None) -> Bench:
    """The same for a server that somebody else started, under the name it serves.

    A profile with a serving says how it should run and which model's answers it should give. Without one its flags are
    its own business, and the answers (unless named) those of a model of the served name, else those of any.
    """
    rules = policy.load(profile)
    plan = serving.load(profile) if profile in data.names("serving") else None
    usual = plan.model if plan else _answers(served)
    questions, known = suite.load(suite_name or rules.suite, answers or usual)
    flags = plan.intended() if plan else {}
    return Bench(questions, known, rules, served, flags, golden=_golden(questions, known))


def chosen(rules: Policy, model: str, *, suite_name: str | None, answers: str | None) -> tuple[Deviation, ...]:
    """The deviations of a run that asks another suite, or knows other answers, than its profile says."""
    found = []
    if suite_name not in (None, rules.suite):
        detail = f"the policy {rules.profile} demands {rules.suite}"
        found.append(Deviation(kind="other-suite", subject=str(suite_name), detail=detail))
    if answers not in (None, model):
        detail = f"the serving {rules.profile} serves {model}"
        found.append(Deviation(kind="other-answers", subject=str(answers), detail=detail))
    return tuple(found)


def rules_of(judged: Bench) -> dict[str, str]:
    """Sha256 of what a verdict rests on beside the server, by the names a receipt's subject has for it."""
    return ({} if judged.golden is None else {"golden": judged.golden.content_sha256()}) | {
        "suite": judged.suite.content_sha256(),
        "answers": judged.answers.content_sha256(),
        "policy": judged.policy.content_sha256(),
    }


def _golden(questions: Suite, known: Answers) -> Golden | None:
    """The golden file of these answers, where the suite asks for one; raises as `document.load`."""
    return document.find(known.golden_of) if GoldenFamily.name in questions.families else None


def _answers(served: str) -> str:
    known = data.names("answers")
    return next((name for name in (served, served.rpartition("/")[2]) if name in known), ANY)
