"""A few mutants in the real server: switched on and off in one boot, killed, named, and nothing left of them afterwards."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_core.cli import project_root, work_folder
from forge_core.engine import connect
from forge_core.record import FILE_NAME, BuildRecord
from forge_lab.__main__ import main
from forge_validate import receipt
from forge_validate.options import LABEL

MUTANTS = ("nan-always", "logits-rolled")


@pytest.fixture
def home(built: BuildRecord, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, Path]]:
    """The record and the model of the checkout, and a folder of its own for the journal."""
    place = work_folder("rehearsal")
    # Below the checkout: an engine in a chroot or a container sees only some folders.
    root = project_root() / "work" / "test-lab"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    monkeypatch.setenv("FORGE_ROOT", str(root))
    yield place / FILE_NAME, place / "model"
    shutil.rmtree(root, ignore_errors=True)


def test_mutants_in_one_boot(home: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    record, model = home
    arguments = ["power", "--first-kill", "--json", "--record", str(record), "--model", str(model), "--only", *MUTANTS]
    assert main(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    entries = {entry["trial"]["name"]: entry for entry in told["entries"]}
    assert told["left"] == 0 and entries.keys() == set(MUTANTS)
    for name, entry in entries.items():
        assert entry["verdict"] == "failed" and entry["fired"], name
        assert entry["kind"] in entry["trial"]["mutant"]["expects"], name
        assert [one["kind"] for one in entry["deviations"]] == ["injected-fault"]
        left = receipt.load(work_folder("lab") / "power" / name / receipt.FILE_NAME)
        assert "injected-fault" in {one.kind for one in left.deviations} and left.verdict.outcome == "failed"
    assert sum(entry["restarted"] for entry in entries.values()) == 1
    assert connect(builds=False).client.containers.list(all=True, filters={"label": LABEL}) == []
    # What is in the journal is not done again.
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out) == told
