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
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from secrets import token_bytes, token_hex
from typing import Any

import docker.errors
import httpx
import pytest
from filelock import FileLock
from pytest_httpserver import HTTPServer

from forge_core import record, registry
from forge_core.cli import project_root, work_folder
from forge_core.console import Console
from forge_core.engine import Engine, connect
from forge_core.model import ImageRef, ModelRef
from forge_core.record import BuildRecord
from forge_validate import policy, serving, suite
from forge_validate.__main__ import main
from forge_validate.boot import boot
from forge_validate.options import LABEL
from forge_validate.serving import Limits, Phase, Serving
from forge_validate.target import Recorded
from forge_validate.target.pull import pull

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
        demand_nothing_left(engine, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def demand_nothing_left(engine: Engine, root: Path) -> None:
    """No container, no volume, no lock of a validation."""
    assert engine.client.containers.list(all=True, filters={"label": LABEL}) == []
    assert engine.client.volumes.list(filters={"label": LABEL}) == []
    for lock in root.rglob("*.lock"):
        with FileLock(lock, timeout=0):
            pass


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
        "tells": {},
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


@pytest.mark.parametrize("mode", ["secret", "dead", "dies"])
def test_secrets_are_in_no_file_and_no_output(
    mode: str, line: Line, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stand-in prints its arguments, the key among them, and tells them in /server_info, as SGLang does."""
    made = token_hex(24)
    monkeypatch.setattr("secrets.token_hex", lambda size: made if size == 24 else token_bytes(size).hex())
    line.serve(mode)
    assert line.run("--no-promote", "-v", "--json") == (0 if mode == "secret" else 1)
    outputs = capsys.readouterr()
    log = (line.work / "logs" / "server.log").read_text()
    assert "'--api-key', '***'" in log
    written = [p for p in line.work.rglob("*") if p.is_file() and p.parent != line.model]
    assert len(written) > (10 if mode != "dead" else 1)
    for text in (*outputs, *(path.read_text(errors="replace") for path in written)):
        assert "sk-leaked" not in text and made not in text


def test_the_key_is_demanded(line: Line, capsys: pytest.CaptureFixture[str]) -> None:
    line.serve("open")
    assert line.run() == 3
    assert "answers without the API key" in capsys.readouterr().err


def test_a_port_that_another_healthy_server_holds(
    line: Line, httpserver: HTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would answer every question; it is asked none."""
    httpserver.expect_request("/health").respond_with_json({})
    line.serve("good", host_port=httpserver.port)
    assert line.run() == 3
    assert f"another server holds port {httpserver.port}" in capsys.readouterr().err
    assert httpserver.log == []
    assert not (line.work / "results.json").exists()


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


@pytest.mark.parametrize(("mode", "sign"), [("hangs", "server_args"), ("mute", "asked, and silent")])
def test_an_interrupt_leaves_nothing(mode: str, sign: str, line: Line) -> None:
    """Ctrl-C while it boots and while it answers: 130, and nothing left (the fixture looks)."""
    line.serve(mode)
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
        until = time.monotonic() + 60
        while not (log.exists() and sign in log.read_text()):
            assert time.monotonic() < until and child.poll() is None
            time.sleep(0.1)
        os.killpg(child.pid, signal.SIGINT)
        assert child.wait(30) == 130
    finally:
        child.kill()
        child.communicate()
    assert not (line.work / "results.json").exists()


def test_two_at_once_are_refused(line: Line, capsys: pytest.CaptureFixture[str]) -> None:
    line.serve("good")
    with FileLock(line.work / "validate.lock"):
        assert line.run() == 3
    assert "another validation" in capsys.readouterr().err


# --- images without a record ------------------------------------------------------------------------------------------


def run_as_root(engine: Engine, image: ImageRef, tag: str) -> ImageRef:
    """The image as most are published: run by root, with a shell as its entry point; pushed under a tag."""
    repository = f"{image.repository}-as-root"
    made = engine.client.containers.create(str(image), command=["true"])
    try:
        made.commit(repository=repository, tag=tag, changes=["USER 0", 'ENTRYPOINT ["/bin/sh"]'])
    finally:
        made.remove(force=True)
    told = list(engine.client.images.push(repository, tag=tag, stream=True, decode=True))
    assert not [line for line in told if "error" in line], told
    digest = registry.digest_of(repository, tag)
    assert digest is not None
    return ImageRef(repository=repository, digest=digest)


@pytest.fixture
def foreign(built: BuildRecord, engine: Engine) -> Iterator[ImageRef]:
    tag = f"test-{token_hex(4)}"
    found = run_as_root(engine, built.image, tag)
    yield found
    for name in (f"{found.repository}:{tag}", str(found)):
        with suppress(docker.errors.ImageNotFound):
            engine.client.images.remove(name, force=True)
    address = f"http://{found.registry}/v2/{found.repository.partition('/')[2]}/manifests/{found.digest}"
    assert httpx.delete(address, trust_env=False).status_code == 202


def image_results(line: Line) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((line.work / "image" / "results.json").read_text())
    return found


def test_an_image_without_a_record_is_judged_and_never_promoted(line: Line, capsys: pytest.CaptureFixture[str]) -> None:
    registry.tag(line.image, TAG_BEFORE, line.work / "tag.log")
    line.serve("good")
    (line.work / record.FILE_NAME).unlink()
    before = line.release()
    # By tag: what it names now is what is judged.
    assert line.run("--image", f"{line.image.repository}:{TAG_BEFORE}") == 0
    found = image_results(line)
    assert (found["target"], found["record"], found["kind"]) == ("image", None, None)
    assert found["subject"]["image"] == line.image.model_dump()
    assert found["verdict"]["outcome"] == "passed" and "never promoted" in capsys.readouterr().err
    assert line.release() == before and not list(line.work.rglob("promotion.json"))
    assert main(["promote", str(line.work / "image" / "results.json")]) == 1
    line.serve("garbage")
    assert line.run("--image", str(line.image)) == 1
    assert image_results(line)["verdict"]["kind"] == "numbers"


def test_images_that_are_not_there(line: Line, capsys: pytest.CaptureFixture[str]) -> None:
    line.serve("good")
    assert line.run("--image", f"{line.image.repository}:no-such-tag") == 2
    assert line.run("--image", f"{line.image.repository}@sha256:{'e' * 64}") == 2
    assert line.run("--image", "127.0.0.1:1/x:1") == 3
    assert line.run("--image", "127.0.0.1:1/x:1", "--record", "x") == 2
    assert not (line.work / "image" / "results.json").exists()


# --- the real server ------------------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere(built: BuildRecord, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A work folder of its own with the real record in it, and a copy of the real model; returns the copy."""
    root = project_root() / "work" / f"test-validate-{tmp_path.name}"
    (root / "work" / "rehearsal").mkdir(parents=True)
    root.chmod(0o755)
    record.save(built, root / "work" / "rehearsal" / record.FILE_NAME)
    shutil.copytree(work_folder("rehearsal") / "model", root / "model")
    monkeypatch.setenv("FORGE_ROOT", str(root))
    try:
        yield root / "model"
        demand_nothing_left(engine, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def damaged_tensor(model: Path) -> None:
    """One NaN in a tensor (a safetensors file is 8 bytes of length, a JSON header, the data)."""
    with (model / "model.safetensors").open("r+b") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        entry = json.loads(stream.read(length))["model.norm.weight"]
        nan = {"F32": b"\x00\x00\xc0\x7f", "BF16": b"\xc0\x7f", "F16": b"\x00\x7e"}[entry["dtype"]]
        stream.seek(8 + length + entry["data_offsets"][0])
        stream.write(nan)


def wrong_tokenizer(model: Path) -> None:
    """Every word has the id of the next: the counts stay, the words do not."""
    path = model / "tokenizer.json"
    whole = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = whole["model"]["vocab"]
    words = sorted(
        word for word in vocabulary if word[0] == "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}" and len(word) > 2
    )
    ids = [vocabulary[word] for word in words]
    vocabulary.update(zip(words, [*ids[1:], ids[0]], strict=True))
    path.write_text(json.dumps(whole, ensure_ascii=False), encoding="utf-8")


def wrong_template(model: Path) -> None:
    """The form of another family of models."""
    template = "{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"
    (model / "chat_template.jinja").write_text(template, encoding="utf-8")


@pytest.mark.parametrize(
    ("spoil", "kind", "shown"),
    [
        (damaged_tensor, "numbers", "!!!!"),
        (wrong_tokenizer, "tokenizer", "tokenize/token-ids"),
        (wrong_template, "template", "known-answer/prompt-tokens"),
    ],
)
def test_a_real_server_on_a_model_gone_wrong(
    spoil: Callable[[Path], None],
    kind: str,
    shown: str,
    elsewhere: Path,
    built: BuildRecord,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(elsewhere)
    before = registry.digest_of(built.image.repository, "release")
    assert main(["validate", "--profile", "rehearsal", "--model", str(elsewhere)]) == 1
    err = capsys.readouterr().err
    assert f"verdict    failed ({kind})" in err and shown in err
    assert registry.digest_of(built.image.repository, "release") == before


def test_a_real_image_that_was_not_made_for_this(elsewhere: Path, foreign: ImageRef) -> None:
    """Run by nobody instead of root, with SGLang's own launcher instead of a shell: judged like a recorded one."""
    assert main(["validate", "--profile", "rehearsal", "--image", str(foreign), "--model", str(elsewhere)]) == 0
    found = json.loads((work_folder("rehearsal") / "image" / "results.json").read_text())
    assert found["arguments"][:3] == ["python3", "-m", "sglang.launch_server"]
    assert found["verdict"]["outcome"] == "passed" and found["deviations"] == []


def test_a_real_server_at_an_address(
    elsewhere: Path,
    built: BuildRecord,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Asked twice: as any server, and as one that should run like the rehearsal. With its key, and without."""
    plan = serving.load("rehearsal")
    model = ModelRef.of_folder(plan.model, elsewhere)
    log = work_folder("rehearsal") / "server.log"
    pull(engine, recorded_target(built, model))
    with boot(engine, str(built.image), plan, model, elsewhere, log=log, console=Console()) as server:
        monkeypatch.setenv("ITS_KEY", str(server.api_key))
        command = ["validate", "--url", server.url, "--api-key-env", "ITS_KEY"]
        assert main(["validate", "--url", server.url]) == 3
        assert "wants an API key" in capsys.readouterr().err
        # first, since it leaves no results behind
        assert main([*command, "--served", "other"]) == 2
        assert main(command) == 0
        assert main([*command, "--profile", "rehearsal"]) == 0
    for profile in ("any", "rehearsal"):
        found = json.loads((work_folder(profile) / "url" / "results.json").read_text())
        assert found["subject"]["software"] == "sglang 0.5.23" and found["subject"]["url"] == server.url
        assert {r["outcome"] for r in found["results"] if r["check"] != "unknown-model/refused"} == {"passed"}
        cases = suite.load(policy.load(profile).suite, plan.model)[0].cases
        assert {f"{case.name}/{check}" for case in cases for check in case.checks} <= {
            r["check"] for r in found["results"]
        }
        assert found["deviations"] == []
        states = {one["name"]: one["state"] for one in found["offers"]}
        # flush_cache was looked at, not called
        assert set(states.values()) == {"offered"}, found["offers"]
    assert "GET /flush_cache" not in log.read_text() and "POST /flush_cache" not in log.read_text()


def recorded_target(built: BuildRecord, model: ModelRef) -> Recorded:
    return Recorded(
        profile="rehearsal",
        kind=built.kind,
        record=built.sha256,
        image=built.image,
        image_config=built.image_config,
        architectures=built.architectures,
        model=model,
        deviations=(),
    )


def test_a_real_server_without_weights_does_not_start(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (elsewhere / "model.safetensors").unlink()
    assert main(["validate", "--profile", "rehearsal", "--model", str(elsewhere)]) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert "weights" in error
