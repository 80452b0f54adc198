"""The lab's data and plans: mutants, the rule of hardness, what is asked, in which order."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from forge_core.errors import UsageError
from forge_lab import mutants, plan
from forge_lab.baseline import Seeds
from forge_lab.held_out import HeldOut, compare, hard
from forge_lab.journal import Count, Measured
from forge_lab.mutants import Mutant, Mutants
from forge_lab.power import Wish, trials
from forge_validate import policy, suite
from forge_validate.families.said import Said
from forge_validate.judge import Bench


def test_there_are_enough_mutants_of_every_class() -> None:
    found = mutants.mutants()
    classes = {mutant.of for mutant in found}
    assert len(found) >= 60 and len(classes) == 14
    assert {mutant.of for mutant in found if mutant.sample} >= classes - {"drift"}
    # A small run must end within twelve minutes, a boot included.
    assert 10 <= sum(mutant.sample for mutant in found) <= 18
    assert all(mutant.promise for mutant in found if mutant.of in ("protocol", "parser", "template", "detokenizer"))


def test_the_rule_of_hardness_is_the_committed_one() -> None:
    rule = mutants.hardness()
    assert rule.share.value == 0.02
    numeric = Mutant.model_validate({"name": "m", "class": "nan", "kind": "layer", "expects": ["numbers"]})
    alone = {"alone": Count(compared=1000, differing=19)}
    clean = Measured(counts=alone)
    assert not hard(numeric, clean, rule) and not hard(numeric, None, rule)
    assert hard(numeric, Measured(counts={"alone": Count(compared=1000, differing=20)}), rule)
    # A fault of batches does not show alone.
    assert hard(numeric, Measured(counts={**alone, "together": Count(compared=50, differing=1)}), rule)
    assert hard(numeric, clean.model_copy(update={"nonfinite": 1}), rule)
    assert hard(numeric, clean.model_copy(update={"unanswered": 1}), rule)
    promised = numeric.model_copy(update={"promise": "every request is answered"})
    assert hard(promised, None, rule)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"where": "proxy", "kind": "nonsense", "promise": "every request is answered"}, "knows no fault"),
        ({"where": "proxy", "kind": "drop"}, "names the promise"),
        ({"expects": []}, "at least 1"),
        ({"class": "other"}, "class"),
    ],
)
def test_a_mutant_that_cannot_be(changes: dict[str, object], why: str) -> None:
    whole = {"name": "m", "class": "protocol", "kind": "layer", "expects": ["stream"]}
    with pytest.raises(ValidationError, match=why):
        Mutant.model_validate(whole | changes)


def test_a_name_twice() -> None:
    one = {"name": "m", "class": "nan", "kind": "layer", "expects": ["numbers"]}
    with pytest.raises(ValidationError, match="named twice: m"):
        Mutants.model_validate({"schema": 1, "mutants": [one, one]})


def test_mutants_by_name_and_class() -> None:
    assert {mutant.of for mutant in mutants.named(("kv",))} == {"kv"}
    assert [mutant.name for mutant in mutants.named(("nan-always", "rare-64"))] == ["nan-always", "rare-64"]
    with pytest.raises(UsageError, match="no mutant or class 'nope'"):
        mutants.named(("nan-always", "nope"))


def test_what_is_asked_is_whole() -> None:
    assert len(mutants.load("held_out", HeldOut).texts) >= 4
    assert len(mutants.load("seeds", Seeds).questions) == 4
    cases, answers = suite.load(plan.SUITE, "SmolLM2-135M-Instruct")
    asked = Bench(cases, answers, policy.load(plan.POLICY), "m")
    assert asked.families[0][0].name == "template"
    # No held-out text is asked by a suite.
    texts = mutants.load("held_out", HeldOut).texts
    assert not any(text[:40] in cases.model_dump_json() for text in texts)


def test_the_sample_is_the_same_each_time() -> None:
    first, second = plan.power(sample=True, checks="first"), plan.power(sample=True, checks="first")
    assert first == second and 0 < len(first) < len(plan.power())
    assert {trial.checks for trial in first} == {"first"}


def test_clean_runs_differ_in_seed_style_and_number_format() -> None:
    found = plan.clean(200)
    assert len(found) == 200 == len({trial.name for trial in found}) == len({trial.seed for trial in found})
    assert {(trial.dtype, trial.style) for trial in found} == {(d, s) for d in plan.DTYPES for s in plan.STYLES}
    # A number format is a server of its own: one after the other.
    assert [trial.dtype for trial in found] == sorted(trial.dtype for trial in found)
    assert all(trial.mutant is None for trial in found)


def test_rates_of_corruption() -> None:
    found = plan.rare(3)
    assert len(found) == 9 == len({trial.name for trial in found})
    assert {trial.mutant.parameters["one_in"] for trial in found if trial.mutant} == set(plan.RARE)
    assert len({(trial.mutant.name, trial.mutant.seed) for trial in found if trial.mutant}) == 9


@pytest.mark.parametrize(
    "wish",
    [
        Wish(plan="clean"),
        Wish(plan="clean", runs=3, sample=True),
        Wish(plan="rare", runs=3, only=("kv",)),
        Wish(runs=3),
    ],
)
def test_wishes_that_do_not_go_together(wish: Wish) -> None:
    with pytest.raises(UsageError):
        trials(wish)


def test_wishes() -> None:
    assert {trial.checks for trial in trials(Wish(sample=True))} == {"first"}
    assert {trial.checks for trial in trials(Wish(only=("nan",)))} == {"all"}
    assert {trial.checks for trial in trials(Wish(only=("nan",), checks="first"))} == {"first"}


def said(*tokens: str, logprob: float | None = -0.1, top: bool = False) -> Said:
    alternatives = tuple({token: -0.1, "other": -2.0} if top else {} for token in tokens)
    return Said("".join(tokens), tokens, (logprob,) * len(tokens), alternatives, "length", 4, len(tokens), None)


def test_an_answer_is_compared_up_to_its_first_other_token() -> None:
    healthy = {"alone/0": said("a", "b", "c", "d")}
    assert compare(healthy, healthy) == Measured(counts={"alone": Count(compared=4, differing=0)})
    one = compare(healthy, {"alone/0": said("a", "x", "y", "z")})
    assert one == Measured(counts={"alone": Count(compared=2, differing=1)}) and one.share == 0.5
    assert compare(healthy, {"alone/0": said("a", "b")}).counts["alone"] == Count(compared=3, differing=1)
    assert compare(healthy, {"alone/0": None}) == Measured(counts={}, unanswered=1)
    assert compare(healthy, {"alone/0": said("a", "b", "c", "d", logprob=None)}).nonfinite == 4


def test_a_prompt_is_compared_at_every_place() -> None:
    healthy = {"prefill/0": said("a", "b", "c", "d", top=True)}
    other = said("a", "x", "c", "y", top=True)
    assert compare(healthy, {"prefill/0": other}) == Measured(counts={"prefill": Count(compared=3, differing=2)})
