"""The verb, from both sides: a finding or none is told with 0, what cannot be read with 2."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from logs import healthy, joined

from forge_core.__main__ import main as core
from forge_core.explain import cli
from forge_validate.__main__ import main as validate

IMA = "RuntimeError: CUDA error: an illegal memory access was encountered"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "server.log"
    lines = healthy(300)
    path.write_bytes(
        joined([*lines[:200], f"[2026-11-30 14:12:19 TP1] {IMA}, --api-key s3cr3tV4lue of 10.1.2.3", *lines[200:]])
    )
    return path


@pytest.mark.parametrize("main", [core, validate])
def test_a_finding_is_told(main: object, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(main) and main(["explain", str(log)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("illegal_memory (error, confidence high): line 201, TP1, phase serving\n")
    assert "remedy: " in out and IMA in out and "s3cr3tV4lue" not in out


def test_none_is_told_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "healthy.log"
    path.write_bytes(joined(healthy(300)))
    assert core(["explain", str(path)]) == 0
    assert capsys.readouterr().out == "no finding in 300 lines, the last phase is serving\n"
    path.write_bytes(b"")
    assert core(["explain", "--json", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["finding"] is None


def test_from_stdin_as_json(log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(log.read_bytes())))
    assert core(["explain", "-", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["finding"]["kind"], told["finding"]["line"], told["lines"]) == ("illegal_memory", 201, 301)
    assert told["phase"] == "serving" and told["ranks"] == ["TP1"]


def test_what_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert core(["explain", str(tmp_path / "nothing.log")]) == 2
    assert core(["explain", str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err
    events = tmp_path / "memory.events"
    events.write_text("low 0\n")
    (tmp_path / "a.log").write_text("x\n")
    assert core(["explain", str(tmp_path / "a.log"), "--memory-events", str(events)]) == 3


def test_evidence_from_beside_the_log(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = log.parent / "memory.events"
    events.write_text("low 0\nhigh 0\nmax 12\noom 2\noom_kill 2\noom_group_kill 0\n")
    assert core(["explain", str(log), "--stage", "boot", "--memory-events", str(events), "--json"]) == 0
    finding = json.loads(capsys.readouterr().out)["finding"]
    assert finding["kind"] == "oom_host" and "cgroup memory.events: oom_kill 2" in finding["evidence"]


def test_a_bundle_is_redacted_and_whole(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out" / "report.json"
    assert core(["explain", str(log), "--bundle", str(target)]) == 0
    text = target.read_text()
    report = json.loads(text)
    assert report["reading"]["finding"]["kind"] == "illegal_memory"
    assert len(report["around"]) == 41 and report["around"][20].startswith("201: ")
    assert len(report["last"]) == 40
    assert "s3cr3tV4lue" not in text and "10.1.2.3" not in text and "ADDRESS" in text
    assert [path.name for path in target.parent.iterdir()] == ["report.json"]


def test_a_bundle_of_what_nobody_knows(tmp_path: Path) -> None:
    log = tmp_path / "odd.log"
    log.write_bytes(b"x" * 3_000_000 + b"\nwhat.Nobody: knows /home/someone/x of a@b.example\n")
    target = tmp_path / "report.json"
    assert core(["explain", str(log), "--exit-code", "1", "--bundle", str(target)]) == 0
    report = json.loads(target.read_text())
    assert report["reading"]["finding"]["kind"] == "unclassified"
    assert "someone" not in target.read_text() and "a@b" not in target.read_text()


def test_a_big_log_shows_how_far_it_is(
    log: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_BIG", 1000)
    assert core(["explain", str(log)]) == 0
    told = capsys.readouterr()
    assert "explain done in" in told.err and told.out.startswith("illegal_memory")
