"""Validation on a real engine and a real registry: every way a server can go wrong, and what must be left afterwards.

The image is the recorded one (`nox -s build -- --profile rehearsal`). Most tests run a stand-in for the server in it,
to reach in seconds what a real one shows only by luck; the real server is asked at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from forge_core import record, registry
from forge_core.cli import project_root
from forge_core.engine import Engine, connect
from forge_core.model import ImageRef, ModelRef
from forge_core.record import BuildRecord
from forge_validate import serving
from forge_validate.__main__ import main
from forge_validate.options import LABEL
from forge_validate.serving import Limits, Phase, Serving

STANDIN = Path(__file__).parents[1] / "testdata" / "standin" / "standin.py"
TAG_BEFORE = "before"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    found = connect(builds=False)
    with closing(found.client):
        yield found


@pytest.fixture
def line(built: BuildRecord, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    # Below the checkout: an engine in a chroot or a container sees only some folders.
    root = project_root() / "work" / f"test-validate-{tmp_path.name}"
    try:
        yield Line(root, built, engine, monkeypatch)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    assert engine.client.containers.list(all=True, filters={"label": LABEL}) == []


class Line:
    """A checkout of its own, with a record whose model folder is the stand-in."""

    def __init__(self, root: Path, built: BuildRecord, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.work = root / "work" / "rehearsal"
        self.model = self.work / "model"
        self.engine = engine
        self.model.mkdir(parents=True)
        root.chmod(0o755)
        shutil.copy(STANDIN, self.model / "standin.py")
        (self.model / "config.json").write_text("{}")
        monkeypatch.setenv("FORGE_ROOT", str(root))
        self._patch = monkeypatch
        self.image = built.image
        self._built = built
        self.record()

    def record(self, **changes: Any) -> None:
        """Seal a record of the model folder as it is now."""
        model = ModelRef.of_folder("SmolLM2-135M-Instruct", self.model)
        values = {"model": model, "deviations": ()} | changes
        record.save(self._built.model_copy(update=values), self.work / record.FILE_NAME)

    def serve(self, mode: str, **changes: Any) -> None:
        """Let the stand-in behave in this mode, from the next run on."""
        (self.model / "mode").write_text(mode)
        self.record()
        plan = stand_in_serving(**changes)
        self._patch.setattr(serving, "load", lambda profile: plan)

    def run(self, *arguments: str) -> int:
        return main(["validate", "--profile", "rehearsal", *arguments])

    def release(self) -> str | None:
        return registry.digest_of(self.image.repository, "release")

    def results(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.work / "results.json").read_text())
        return found


def stand_in_serving(**changes: Any) -> Serving:
    real = serving.data.load("serving", "rehearsal", Serving)
    short = tuple(Phase(name=p.name, until=p.until, deadline=20) for p in real.phases)
    values = {
        "command": ("python3", "/model/standin.py"),
        "flags": {"device": "cpu"},
        "limits": Limits(memory="128m", pids=64, shm="16m"),
        "phases": short,
        "stall": 2.0,
    }
    return real.model_copy(update=values | changes)


def test_a_good_server_moves_the_tag(line: Line, capsys: pytest.CaptureFixture[str]) -> None:
    line.serve("good")
    assert line.run("--json") == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["verdict"]["outcome"] == "passed"
    assert json.loads(out) == line.results()
    assert line.release() == line.image.digest
    promotion = json.loads((line.work / "promotion.json").read_text())
    assert promotion["image"]["digest"] == line.image.digest
    assert f"{line.image.repository}:release" in err
    assert {p.stem for p in (line.work / "exchanges").iterdir()} >= {"models", "known-answer"}


def test_garbage_is_refused_and_the_tag_stays(line: Line, capsys: pytest.CaptureFixture[str]) -> None:
    before = line.release()
    line.serve("garbage")
    assert line.run() == 1
    assert line.release() == before
    assert not (line.work / "promotion.json").exists()
    assert "!!!!" in capsys.readouterr().err
    failed = {r["check"] for r in line.results()["results"] if r["outcome"] == "failed"}
    assert {"known-answer/text", "known-answer/known", "logprobs/finite"} <= failed


@pytest.mark.parametrize(
    ("mode", "code", "cause"),
    [
        ("flag", 2, "unrecognized arguments: --nope"),
        ("weights", 2, "Cannot find any model weights"),
        ("dead", 1, "No NvFp4 MoE backend"),
        ("oom", 1, "out of memory, its limit is 128m"),
        ("impostor", 3, "not the one we started"),
    ],
)
def test_servers_that_never_get_ready(
    mode: str, code: int, cause: str, line: Line, capsys: pytest.CaptureFixture[str]
) -> None:
    line.serve(mode, flags={"device": "cpu", "nope": True})
    began = time.monotonic()
    assert line.run() == code
    assert time.monotonic() - began < 20
    errors = [text for text in capsys.readouterr().err.splitlines() if text.startswith("error:")]
    assert cause in errors[0]
    assert not (line.work / "results.json").exists()


@pytest.mark.parametrize(("mode", "phase"), [("hangs", "load"), ("stopped", "load"), ("unhealthy", "health")])
def test_a_hang_has_a_deadline_and_a_name(
    mode: str, phase: str, line: Line, capsys: pytest.CaptureFixture[str]
) -> None:
    phases = tuple(p.model_copy(update={"deadline": 5.0}) for p in stand_in_serving().phases)
    line.serve(mode, phases=phases)
    assert line.run() == 1
    err = capsys.readouterr().err
    assert f"the phase `{phase}` is not over after 5 s" in err
    assert "no line for" in err


def test_a_server_that_dies_while_answering_is_no_pass(line: Line, capsys: pytest.CaptureFixture[str]) -> None:
    line.serve("dies")
    assert line.run() == 1
    unmeasured = [r for r in line.results()["results"] if r["outcome"] == "unmeasured"]
    assert unmeasured and any("exit code 7" in r["explanation"] for r in unmeasured)
    assert not (line.work / "promotion.json").exists()


def test_secrets_are_in_no_file_and_no_output(line: Line, capsys: pytest.CaptureFixture[str]) -> None:
    line.serve("secret")
    line.run("--no-promote", "-v")
    assert "sk-leaked" not in "".join(capsys.readouterr())
    assert (line.work / "logs" / "server.log").stat().st_size > 0
    for path in line.work.rglob("*"):
        if path.is_file() and path.parent != line.model:
            assert "sk-leaked" not in path.read_text(errors="replace"), path


def test_keep_leaves_the_container(line: Line, capsys: pytest.CaptureFixture[str]) -> None:
    line.serve("dead")
    assert line.run("--keep") == 1
    (kept,) = line.engine.client.containers.list(all=True, filters={"label": LABEL})
    assert kept.name in capsys.readouterr().err
    kept.remove(force=True)


def test_no_privileges(line: Line) -> None:
    line.serve("dead")
    line.run("--keep")
    (kept,) = line.engine.client.containers.list(all=True, filters={"label": LABEL})
    host, config = kept.attrs["HostConfig"], kept.attrs["Config"]
    kept.remove(force=True)
    assert config["User"].split(":")[0] not in ("", "0", "root")
    assert host["CapDrop"] == ["ALL"] and host["ReadonlyRootfs"] and not host["Privileged"]
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert host["Memory"] == host["MemorySwap"] == 128 << 20
    assert [b["HostIp"] for b in host["PortBindings"]["30000/tcp"]] == ["127.0.0.1"]


def test_a_digest_that_is_not_in_staging(line: Line) -> None:
    line.serve("good")
    line.record(image=ImageRef(repository=line.image.repository, digest="sha256:" + "e" * 64))
    assert line.run() == 5


def test_staging_that_does_not_answer(line: Line) -> None:
    line.serve("good")
    line.record(image=ImageRef(repository="127.0.0.1:1/x", digest=line.image.digest))
    assert line.run() == 3


def test_another_model_is_judged_but_not_promoted(
    line: Line, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line.serve("good")
    other = line.work.parent / "other"
    shutil.copytree(line.model, other)
    (other / "extra.txt").write_text("x")
    before = line.release()
    assert line.run("--model", str(other)) == 1
    assert line.results()["verdict"]["outcome"] == "passed"
    assert "extra.txt is new" in capsys.readouterr().err
    assert line.release() == before
    assert line.run("--model", str(other), "--no-promote") == 0


def test_an_interrupt_leaves_nothing(line: Line) -> None:
    """Ctrl-C while it boots: 130, and no container (the fixture looks)."""
    line.serve("hangs")
    script = (
        "import sys; from forge_validate import serving; from forge_validate.__main__ import main;"
        "plan = serving.Serving.model_validate_json(sys.argv.pop()); serving.load = lambda profile: plan;"
        "sys.exit(main(sys.argv[1:]))"
    )
    plan = serving.load("rehearsal").model_dump_json(by_alias=True)
    command = [sys.executable, "-c", script, "validate", "--profile", "rehearsal", plan]
    child = subprocess.Popen(command, env=os.environ, stderr=subprocess.PIPE, start_new_session=True)
    try:
        log = line.work / "logs" / "server.log"
        until = time.monotonic() + 30
        while not (log.exists() and "server_args" in log.read_text()):
            assert time.monotonic() < until and child.poll() is None
            time.sleep(0.1)
        os.killpg(child.pid, signal.SIGINT)
        assert child.wait(20) == 130
    finally:
        child.kill()
        child.communicate()


def test_two_at_once_are_refused(line: Line, capsys: pytest.CaptureFixture[str]) -> None:
    from filelock import FileLock

    line.serve("good")
    with FileLock(line.work / "validate.lock"):
        assert line.run() == 3
    assert "another validation" in capsys.readouterr().err


# --- the real server ------------------------------------------------------------------------------------------------


def real_model() -> Path:
    return project_root() / "work" / "rehearsal" / "model"


@pytest.fixture
def elsewhere(built: BuildRecord, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A work folder of its own with the real record in it; returns the real model's folder."""
    model = real_model()
    root = project_root() / "work" / f"test-validate-{tmp_path.name}"
    (root / "work" / "rehearsal").mkdir(parents=True)
    root.chmod(0o755)
    record.save(built, root / "work" / "rehearsal" / record.FILE_NAME)
    monkeypatch.setenv("FORGE_ROOT", str(root))
    try:
        yield model
    finally:
        shutil.rmtree(root, ignore_errors=True)
    assert engine.client.containers.list(all=True, filters={"label": LABEL}) == []


def test_a_real_healthy_server_is_promoted(elsewhere: Path, built: BuildRecord) -> None:
    assert main(["validate", "--profile", "rehearsal", "--model", str(elsewhere)]) == 0
    assert registry.digest_of(built.image.repository, "release") == built.image.digest


def test_a_real_server_on_a_damaged_tensor_is_refused(
    elsewhere: Path, built: BuildRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged = project_root() / "damaged"
    shutil.copytree(elsewhere, damaged)
    damage(damaged / "model.safetensors", "model.norm.weight")
    before = registry.digest_of(built.image.repository, "release")
    assert main(["validate", "--profile", "rehearsal", "--model", str(damaged)]) == 1
    assert "!!!!" in capsys.readouterr().err
    assert registry.digest_of(built.image.repository, "release") == before


def damage(weights: Path, tensor: str) -> None:
    """Write one NaN into a tensor of a safetensors file (8 bytes of length, a JSON header, the data)."""
    with weights.open("r+b") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        entry = json.loads(stream.read(length))[tensor]
        nan = {"F32": b"\x00\x00\xc0\x7f", "BF16": b"\xc0\x7f", "F16": b"\x00\x7e"}[entry["dtype"]]
        stream.seek(8 + length + entry["data_offsets"][0])
        stream.write(nan)
