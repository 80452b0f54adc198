"""The verbs that need files only: `judge` and `promote`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from forge_validate.__main__ import main

from .conftest import WIRE

SMOKE = WIRE.parent / "exchanges" / "smoke"


def test_recorded_exchanges_pass_again(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["judge", "--profile", "rehearsal", "--json", str(SMOKE)]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["verdict"]["outcome"] == "passed" and len(found["results"]) == 25
    assert "opt   unknown-model/refused" in err


def test_a_changed_answer_is_judged_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "exchanges"
    shutil.copytree(SMOKE, folder)
    path = folder / "known-answer.json"
    path.write_text(path.read_text().replace("France is Paris.", "France is !!!!!!!!!!!!!!!!!!!!!!!!!!"))
    assert main(["judge", "--profile", "rehearsal", str(folder)]) == 1
    assert "failed (garbage)" in capsys.readouterr().err


def test_a_case_without_an_exchange_fails(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(path) for path in SMOKE.glob("*.json") if path.stem != "tool-call"]
    assert main(["judge", "--profile", "rehearsal", *files]) == 1
    assert "was not asked" in capsys.readouterr().err


def test_what_is_no_exchange_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judge = ["judge", "--profile", "rehearsal"]
    assert main([*judge, str(tmp_path)]) == 2
    assert main([*judge, str(tmp_path / "absent.json")]) == 2
    (tmp_path / "other.json").write_text("{}")
    assert main([*judge, str(tmp_path)]) == 2
    stranger = tmp_path / "other.json"
    stranger.write_text((SMOKE / "models.json").read_text().replace('"models"', '"stranger"', 1))
    assert main([*judge, str(stranger)]) == 2
    assert "'stranger' is no case" in capsys.readouterr().err
    assert main([*judge, str(SMOKE), str(SMOKE / "models.json")]) == 2
    assert "a second exchange" in capsys.readouterr().err


def test_promote_wants_a_whole_receipt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["promote", str(tmp_path / "results.json")]) == 2
    (tmp_path / "results.json").write_text("{}")
    assert main(["promote", str(tmp_path / "results.json")]) == 5
    assert "was changed after it was sealed" in capsys.readouterr().err


def test_a_profile_that_starts_nothing_judges_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model is the one that was asked for, and the suite the one that is named."""
    asked = tmp_path / "asked"
    asked.mkdir()
    for name in ("models", "known-answer", "streamed", "logprobs", "tool-call"):
        shutil.copy(SMOKE / f"{name}.json", asked)
    assert main(["judge", "--profile", "any", "--json", str(asked)]) == 0
    checks = {one["check"]: one["outcome"] for one in json.loads(capsys.readouterr().out)["results"]}
    assert checks["models/listed"] == checks["known-answer/known"] == "passed"
    assert main(["judge", "--profile", "any", str(SMOKE)]) == 2
    assert "no case and of no family of suites/any.yaml" in capsys.readouterr().err
    assert main(["judge", "--profile", "any", "--suite", "smoke", "--json", str(SMOKE)]) == 1
    failing = json.loads(capsys.readouterr().out)["verdict"]["failing"]
    # Nobody says how it should run, and that SGLang answers for any name is not excused here.
    assert failing == ["server-info/flags", "unknown-model/refused"]
    assert main(["judge", "--profile", "any", str(SMOKE / "models.json")]) == 2
    assert main(["judge", "--suite", "smoke", str(SMOKE)]) == 2
