"""The machine that walks plans, on a stand-in server that can be made wrong: kills, escapes, restarts, the journal, the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from asking import MARGIN, bench
from fake_engine import FakeEngine

from forge_core.console import Console
from forge_core.errors import ExitCode
from forge_lab import executor, mutants, table
from forge_lab.executor import Ground
from forge_lab.journal import Entry, Journal
from forge_lab.mutants import Mutant
from forge_lab.plan import Dtype, Trial
from forge_lab.power import Wish, exit_code
from forge_validate.judge import Bench
from forge_validate.policy import Optional
from forge_validate.server import Server

SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "batch": {"sizes": [1, 3], "tokens": 8, "margin": MARGIN, "timeout": 5},
    "cache": {"words": 20, "tokens": 4, "margin": MARGIN, "timeout": 5},
}
REST = Optional(check="server-info/*", reason="the stand-in answers no case of a suite")


class Answering(FakeEngine):
    """The stand-in, with the little more that is asked of a server at first and at last."""

    def _told(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/chat/completions":
            token = {"token": "o", "logprob": -0.1, "top_logprobs": [{"token": "o", "logprob": -0.1}]}
            message = {"role": "assistant", "content": "ok" if "silent" not in self.faults else ""}
            choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": {"content": [token]}}
            usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
            return 200, {"choices": [choice], "usage": usage}
        if path == "/model_info":
            return 200, {}
        return super()._told(path, body)


class Bed:
    """The stand-in as a bed; `wrecks` names mutants after which it is not as it was."""

    def __init__(self) -> None:
        self.engine = Answering()
        self.dtype: Dtype | None = None
        self.starts = 0
        self.wrecks: set[str] = set()
        self._wrecked = False

    @property
    def server(self) -> Server:
        return Server(url=self.engine.url, served="m", memory=self.engine.memory)

    def start(self, dtype: Dtype) -> None:
        self.dtype, self._wrecked = dtype, False
        self.starts += 1

    def heal(self) -> str | None:
        self.engine.faults.clear()
        return "wrecked" if self._wrecked else None

    def empty(self) -> None:
        self.engine._cache.clear()

    @contextmanager
    def broken(self, mutant: Mutant) -> Iterator[tuple[Server, Callable[[], bool]]]:
        self.engine.faults.add(mutant.kind)
        try:
            yield self.server, lambda: mutant.kind != "nothing"
        finally:
            self.engine.faults.clear()
            self._wrecked = mutant.name in self.wrecks


@pytest.fixture
def bed() -> Iterator[Bed]:
    made = Bed()
    with made.engine:
        yield made


def asked(trial: Trial) -> Bench:
    made = bench(SECTIONS)
    (case,) = (case for case in made.suite.cases if case.name == "server-info")
    questions = made.suite.model_copy(update={"cases": (case,)})
    return executor.seeded(
        replace(made, suite=questions, policy=made.policy.model_copy(update={"optional": (REST,)})), trial
    )


def ground(folder: Path, code: str = "0" * 64) -> Ground:
    return Ground(image=None, model=None, code=code, bench=asked, work=folder)


def mutant(name: str, kind: str, of: str = "kv", *expects: str) -> Mutant:
    return Mutant.model_validate({"name": name, "class": of, "kind": kind, "expects": expects or ["batch"]})


def trial(one: Mutant, **changes: Any) -> Trial:
    return Trial.model_validate({"plan": "power", "name": one.name, "mutant": one.model_dump(by_alias=True), **changes})


BATCH, WARM = mutant("wrong-in-batches", "batch"), mutant("wrong-when-warm", "warm", "kv", "batch")
NOTHING = mutant("nothing-at-all", "nothing")


def walk(bed: Bed, folder: Path, *trials: Trial, **more: Any) -> tuple[tuple[Entry, ...], Journal]:
    book = Journal(folder / "journal.jsonl")
    return executor.run(trials, bed, ground(folder), book, Console(quiet=True), **more), book


def test_mutants_are_killed_and_named(bed: Bed, tmp_path: Path) -> None:
    entries, book = walk(bed, tmp_path, trial(BATCH), trial(WARM), trial(NOTHING))
    batch, warm, nothing = entries
    assert (batch.verdict, batch.kind, batch.killed_by) == ("failed", "batch", "batch/size-3")
    assert (warm.verdict, warm.kind) == ("failed", "cache")
    assert (nothing.verdict, nothing.kind, nothing.fired) == ("passed", None, False)
    assert table.right(batch) and not table.right(warm)
    assert bed.starts == 1 and [entry.restarted for entry in entries] == [True, False, False]
    assert all(entry.baseline is not None and entry.baseline.passed for entry in entries)
    # The stand-in's held-out answers are wrong in a batch of six, and right when prefilled and alone.
    assert batch.measured is not None and batch.measured.counts["together"].differing == 6
    assert batch.measured.counts["alone"].differing == 0
    assert nothing.measured is not None and nothing.measured.share == 0
    assert nothing.noise is not None and nothing.noise.share == 0 and nothing.noise.counts["prefill"].compared > 1000
    assert [d.kind for d in batch.deviations] == ["injected-fault"]
    assert batch.requests > batch.generating > 10 and batch.prompt_tokens > batch.reply_tokens > 0
    assert set(batch.families) == {"cases", "batch", "cache"}
    assert book.entries() == entries


def test_what_is_in_the_journal_is_not_done_again(bed: Bed, tmp_path: Path) -> None:
    first, book = walk(bed, tmp_path, trial(BATCH))
    assert walk(bed, tmp_path, trial(BATCH))[0] == ()
    # Other code, another seed, another way of asking: another trial.
    other = mutant("wrong-in-batches", "batch").model_copy(update={"seed": 9})
    assert len(executor.open_trials([trial(BATCH), trial(other)], ground(tmp_path), book)) == 1
    assert len(executor.open_trials([trial(BATCH)], ground(tmp_path, "1" * 64), book)) == 1
    assert len(executor.open_trials([trial(BATCH, checks="first")], ground(tmp_path), book)) == 1
    assert first[0].key == executor.key(trial(BATCH), first[0].subject)


def test_until_the_first_kill(bed: Bed, tmp_path: Path) -> None:
    (entry,), _ = walk(bed, tmp_path, trial(BATCH, checks="first"))
    assert entry.killed and "cache" not in entry.families
    # Killed already: nothing is looked at closer.
    assert entry.baseline is None and entry.measured is None and entry.noise is None
    (other,), _ = walk(bed, tmp_path, trial(NOTHING, checks="first"))
    assert other.measured is not None and other.measured.share == 0 and other.baseline is not None
    assert {one.check.partition("/")[0] for one in entry.checks} == {"server-info", "batch"}


def test_a_wrecked_server_is_started_anew(bed: Bed, tmp_path: Path) -> None:
    bed.wrecks = {"wrong-in-batches"}
    entries, _ = walk(bed, tmp_path, trial(BATCH), trial(NOTHING))
    assert bed.starts == 2 and entries[1].restarted and not entries[1].killed


def test_no_trial_is_begun_when_the_time_is_over(bed: Bed, tmp_path: Path) -> None:
    entries, book = walk(bed, tmp_path, trial(BATCH), within=-1.0)
    assert entries == () and book.entries() == () and bed.starts == 0


def test_clean_runs(bed: Bed, tmp_path: Path) -> None:
    styles = ("cold", "warm", "reversed")
    runs = [Trial(plan="clean", name=style, seed=number, style=style) for number, style in enumerate(styles)]
    last = Trial(plan="clean", name="other", seed=4, dtype="float32")
    entries, _ = walk(bed, tmp_path, *runs, last)
    assert [entry.verdict for entry in entries] == ["passed"] * 4
    assert list(entries[2].families) == ["cases", "cache", "batch"]
    assert bed.starts == 2 and entries[3].restarted
    assert all(entry.deviations == () and entry.fired is None for entry in entries)
    assert {body.get("seed") for body in bed.engine.asked} >= {0, 1, 2, 4}
    page = table.power(entries, mutants.hardness())
    assert "4 times, seeds 0 to 4: 0 false alarms" in page and "at most 52.71%" in page
    assert exit_code(Wish(plan="clean", runs=4), entries, 0) == ExitCode.PASSED


def test_alarms_are_counted_by_check(bed: Bed, tmp_path: Path) -> None:
    runs = [Trial(plan="clean", name=f"run-{number}", seed=number) for number in range(2)]
    bed.heal = lambda: None  # type: ignore[method-assign]
    bed.engine.faults.add("batch")
    entries, _ = walk(bed, tmp_path, *runs)
    page = table.power(entries, mutants.hardness())
    assert "2 false alarms" in page and "| batch/size-3 | 2 | 2 | 100.00% |" in page
    assert exit_code(Wish(plan="clean", runs=2), entries, 0) == ExitCode.REFUSED
