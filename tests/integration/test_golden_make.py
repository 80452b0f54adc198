"""The verb `golden` against the stand-in engine at an address: what it writes, adds and refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import FakeEngine

from forge_core.model import ModelRef
from forge_validate.__main__ import main
from forge_validate.golden import document


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEngine]:
    (tmp_path / "Dockerfile.sm120").touch()
    monkeypatch.setenv("FORGE_ROOT", str(tmp_path))
    with FakeEngine() as started:
        yield started


def golden(engine: FakeEngine, out: Path, *more: str, suite: str = "cpu-standard") -> int:
    words = ["golden", "--url", engine.url, "--suite", suite, "--out", str(out), "--why", "the stand-in is healthy"]
    return main([*words, *more])


def test_a_golden_is_recorded_and_a_restart_added(engine: FakeEngine, tmp_path: Path) -> None:
    model_folder = tmp_path / "model"
    model_folder.mkdir()
    out, of = tmp_path / "golden.json", ("--answers", "SmolLM2-135M-Instruct")
    (model_folder / "config.json").write_text('{"model_type": "llama", "torch_dtype": "bfloat16"}')
    (model_folder / "tokenizer.json").write_text("{}")
    assert golden(engine, out, *of, "--model", str(model_folder)) == 0
    found = document.load(out)
    subject = found.subject
    assert (subject.model, subject.software, subject.image) == ("SmolLM2-135M-Instruct", "sglang 0", None)
    assert subject.revision == ModelRef.of_folder("x", model_folder).revision and subject.tokenizer is not None
    assert subject.formats == {"config.dtype": "bfloat16"}
    assert [one.bucket for one in found.prompts] == [64] * 4 + [256] * 2 + [512]
    assert {one.path for one in found.noise} == {"decoded", "repeated", "at-once", "decoded-at-once"}
    assert golden(engine, out, *of, "--add") == 0
    more = document.load(out)
    assert more.prompts == found.prompts and more.subject == found.subject and len(more.noise) == 2 * len(found.noise)
    assert list((tmp_path / "work" / "any" / "golden" / "exchanges").glob("golden__restart-*.json"))


def test_what_is_refused_leaves_no_file(engine: FakeEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, of = tmp_path / "golden.json", ("--answers", "SmolLM2-135M-Instruct")
    assert golden(engine, out) == 2
    assert "--answers MODEL" in capsys.readouterr().err
    assert golden(engine, out, *of, suite="smoke") == 2
    assert "no section `golden`" in capsys.readouterr().err
    assert golden(engine, out, *of, "--add") == 2
    engine.faults.add("null")
    assert golden(engine, out, *of) == 1
    engine.faults = {"no-input-logprobs"}
    assert golden(engine, out, *of) == 4
    assert not out.exists()
