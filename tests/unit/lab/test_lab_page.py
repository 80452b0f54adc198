"""The journal as a file, and the page that is made of it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from forge_core.errors import ExitCode, UsageError
from forge_core.model import canonical_sha256
from forge_lab import journal, mutants, table
from forge_lab.bed import deviations
from forge_lab.journal import Baseline, Checked, Count, Entry, Journal, Measured, Subject
from forge_lab.mutants import Mutant
from forge_lab.plan import Trial
from forge_lab.power import Wish, exit_code

SUBJECT = Subject(image=None, model=None, suite="1" * 64, answers="2" * 64, policy="3" * 64, code="4" * 64)


def mutant(name: str, *expects: str, promise: str | None = None, **parameters: Any) -> Mutant:
    told = {"name": name, "class": "kv", "kind": "kv", "expects": expects or ("batch",), "promise": promise}
    return Mutant.model_validate(told | {"parameters": parameters})


def entry(trial: Trial, *failed: str, kind: str | None = None, share: float = 0.0, **changes: Any) -> Entry:
    """A trial in which these checks failed, of four that were asked."""
    asked = ("known-answer/known", "batch/size-3", "batch/size-8", "cache/warm")
    values: dict[str, Any] = {
        "key": canonical_sha256(trial.model_dump(mode="json")),
        "trial": trial,
        "subject": SUBJECT,
        "when": datetime(2026, 11, 30, tzinfo=UTC),
        "verdict": "failed" if failed else "passed",
        "kind": kind,
        "cause": "why",
        "checks": tuple(
            Checked(check=check, outcome="failed" if check in failed else "passed", required=True) for check in asked
        ),
        "killed_by": failed[0] if failed else None,
        "baseline": Baseline(passed=True, why="answered") if trial.mutant else None,
        "measured": Measured(counts={"alone": Count(compared=100, differing=int(100 * share))})
        if trial.mutant
        else None,
        "noise": Measured(counts={"alone": Count(compared=100, differing=1)}),
        "fired": True if trial.mutant else None,
        "deviations": deviations(trial.mutant),
        "requests": 40,
        "generating": 30,
        "prompt_tokens": 500,
        "reply_tokens": 100,
        "seconds": 10.0,
        "families": {"cases": 2.0, "batch": 5.0, "cache": 3.0},
    }
    return Entry.model_validate(values | changes)


def trial(one: Mutant, **changes: Any) -> Trial:
    return Trial.model_validate({"plan": "power", "name": one.name, "mutant": one.model_dump(by_alias=True), **changes})


POWER = [
    entry(trial(mutant("named-right")), "batch/size-3", "batch/size-8", kind="batch", share=0.5),
    entry(trial(mutant("named-wrong")), "cache/warm", "batch/size-3", kind="cache", share=0.01),
    entry(trial(mutant("mild")), share=0.01),
    entry(trial(mutant("hidden", promise="a promise that is broken")), fired=False),
]


def test_the_page() -> None:
    rule = mutants.hardness()
    page = table.power(POWER, rule)
    assert table.power(POWER, rule) == page
    assert "| hard | 2 | 1 | 1 (100%) | 1 | 0 |" in page and "| mild | 2 | 1 | 0 (0%) | 1 | 0 |" in page
    assert "| kv | `named-right` | yes | 50.0% | killed | batch | yes | . | 2 | . | passed |" in page
    assert "| kv | `named-wrong` |  | 1.0% | killed | cache | no | . | 1 | 1 | passed |" in page
    assert "| kv | `hidden` | yes | 0.0% | **escaped**, idle |" in page
    assert "| batch | `named-right` | 1 | 5.0 |" in page and "| cache | none | 0 | 3.0 |" in page
    assert "at most 1.0% of the tokens" in page
    assert "No mutant was run." in table.power([], rule)


def test_exit_codes() -> None:
    assert [one.trial.name for one in table.escapes(POWER, mutants.hardness())] == ["hidden"]
    assert exit_code(Wish(), POWER[:3], 0) == ExitCode.PASSED
    assert exit_code(Wish(), POWER[:3], 2) == ExitCode.INCONCLUSIVE
    assert exit_code(Wish(), POWER, 0) == ExitCode.REFUSED
    run = entry(Trial(plan="clean", name="run", seed=1), "batch/size-3", kind="batch")
    assert exit_code(Wish(plan="clean", runs=1), [run], 0) == ExitCode.REFUSED
    assert exit_code(Wish(plan="rare", runs=1), [POWER[3]], 0) == ExitCode.PASSED


def test_clean_runs_and_rates() -> None:
    runs = [entry(Trial(plan="clean", name=f"run-{seed}", seed=seed)) for seed in range(19)]
    wrong = entry(Trial(plan="clean", name="run-19", seed=19, style="warm"), "batch/size-3", kind="batch")
    page = table.power([*runs, wrong], mutants.hardness())
    assert "20 times, seeds 0 to 19: 1 false alarm." in page and "at most 21.61%" in page
    assert "| bfloat16 | warm | 1 | 1 |" in page and "| batch/size-3 | 20 | 1 | 21.61% |" in page
    assert "4 required checks, 80 times asked, 1 without a pass." in page
    rare = [
        entry(trial(mutant(f"rare-{number}", one_in=16), plan="rare"), *(("cache/warm",) if number else ()))
        for number in range(4)
    ]
    assert "| 16 | 4 | 3 | 0.75, 0.19 to 0.99 | 0.86 | 30 |" in table.power(rare, mutants.hardness())


def test_a_journal_survives_what_was_half_written(tmp_path: Path) -> None:
    book = Journal(tmp_path / "lab" / "journal.jsonl")
    assert book.entries() == ()
    book.append(POWER[0])
    with book.path.open("a") as stream:
        stream.write('{"key": "half')
    assert book.entries() == (POWER[0],)
    again = POWER[0].model_copy(update={"cause": "again"})
    book.append(POWER[1])
    book.append(again)
    assert book.entries() == (POWER[1], again)
    book.path.write_text("nonsense\n" + book.path.read_text())
    with pytest.raises(UsageError, match=r"journal.jsonl:1"):
        book.entries()
    journal.save(POWER, tmp_path / "copy.jsonl")
    assert Journal(tmp_path / "copy.jsonl").entries() == tuple(POWER)


def test_a_verdict_on_a_mutant_says_so() -> None:
    (found,) = deviations(mutant("sick", do="fp8"))
    assert found.kind == "injected-fault" and found.subject == "sick" and '"do": "fp8"' in found.detail
    assert deviations(None) == ()
