"""`validate --url`: any server, no engine, no tag; and what may be wrong with an address."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peer import Peer, serving

from forge_core.errors import EnvironmentFailure, ForgeError, UsageError
from forge_validate import attached, junit
from forge_validate import receipt as receipts
from forge_validate.__main__ import main
from forge_validate.judge import Bench
from forge_validate.receipt import Receipt, ServerSubject
from forge_validate.server import Server
from forge_validate.target.address import attach

SMOL = ("SmolLM2-135M-Instruct",)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("FORGE_ROOT", str(tmp_path))
    yield tmp_path


def validate(url: str, *more: str) -> int:
    return main(["validate", "--url", url, *more])


def receipt(root: Path, profile: str = "any") -> Receipt:
    return receipts.load(root / "work" / profile / "url" / "results.json")


def outcomes(done: Receipt) -> dict[str, str]:
    return {result.check: result.outcome for result in done.results}


@pytest.mark.parametrize("flavour", ["sglang", "vllm"])
def test_a_server_whose_answers_are_known(flavour: Any, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Peer(flavour, models=SMOL)) as peer:
        assert validate(peer.url + "/v1/", "--json") == 0
    out, err = capsys.readouterr()
    done = receipt(root)
    assert json.loads(out) == json.loads((root / "work/any/url/results.json").read_text())
    assert set(outcomes(done).values()) == {"passed"} and done.deviations == ()
    subject = done.subject
    assert isinstance(subject, ServerSubject)
    assert (done.target, done.kind, done.record, done.engine, subject.url) == ("url", None, None, None, peer.url)
    assert subject.software == {"sglang": "sglang 0.5.23", "vllm": "vllm 0.32.0"}[flavour]
    assert "answers SmolLM2-135M-Instruct" in err and "never promoted" in err
    assert not (root / "work/any/url/promotion.json").exists()
    assert {one.name for one in done.offers} >= {"native", "tools", "reasoning"}


def test_a_model_nobody_knows_is_judged_by_what_needs_no_knowledge(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(Peer("plain", models=("who-knows",))) as peer:
        assert validate(peer.url) == 0
    done = receipt(root)
    unmeasured = {"known-answer/known", "logprobs/text", "logprobs/finite", "tool-call/text", "tool-call/tool-call"}
    assert {check for check, outcome in outcomes(done).items() if outcome == "unmeasured"} == unmeasured
    assert outcomes(done)["streamed/same"] == "passed"
    assert set(done.verdict.waived) == unmeasured == {d.subject for d in done.deviations}
    assert {d.kind for d in done.deviations} == {"waived-check"}
    assert "5 not measured and waived" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("peer", "kind", "check"),
    [
        (Peer("plain", says="!" * 40), "garbage", "known-answer/text"),
        (Peer("vllm", logprob=None), "numbers", "logprobs/finite"),
        (Peer("vllm", logprob="broken"), "numbers", "logprobs/finite"),
        (Peer("vllm", models=SMOL, says="The capital of France is Rome."), "answers", "known-answer/known"),
    ],
)
def test_what_is_wrong_is_never_waived(peer: Peer, kind: str, check: str, root: Path) -> None:
    with serving(peer):
        assert validate(peer.url) == 1
    done = receipt(root)
    assert (done.verdict.outcome, done.verdict.kind) == ("failed", kind) and check in done.verdict.failing
    assert "<failure" in (root / "work/any/url/junit.xml").read_text()


def test_a_policy_of_a_profile_and_its_suite(root: Path) -> None:
    """The smoke suite asks for what SGLang alone has; that policy waives nothing."""
    with serving(Peer("vllm", models=SMOL)) as peer:
        assert validate(peer.url, "--profile", "rehearsal") == 1
    done = receipt(root, "rehearsal")
    lacking = {r.check for r in done.results if r.lacks == "native"}
    assert lacking == {"model-info/model-info", "server-info/flags"} and lacking <= set(done.verdict.failing)
    assert not (root / "work/rehearsal/results.json").exists()


def test_suite_and_answers_may_be_chosen(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Peer("vllm", models=("mine",))) as peer:
        assert validate(peer.url, "--answers", "SmolLM2-135M-Instruct", "--suite", "any") == 0
        assert receipt(root).deviations == ()
        assert validate(peer.url, "--answers", "nope") == 2
        assert validate(peer.url, "--suite", "nope") == 2
    assert "smoke" in capsys.readouterr().err


def test_a_receipt_of_a_server_is_never_promoted(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Peer("vllm", models=SMOL)) as peer:
        assert validate(peer.url) == 0
    assert main(["promote", str(root / "work/any/url/results.json")]) == 1
    assert "no build record" in capsys.readouterr().err


def test_junit_names_the_server(root: Path) -> None:
    with serving(Peer("vllm", models=("who-knows",))) as peer:
        validate(peer.url)
    text = junit.render(receipt(root))
    assert f'name="server" value="{peer.url}"' in text and 'name="software" value="vllm 0.32.0"' in text
    assert "waived by the policy" in text and "<failure" not in text and "<error" not in text
    assert "image digest" not in text


def test_the_key_is_in_no_file_and_no_output(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MY_KEY", "only-for-this-test-0123")
    with serving(Peer("sglang", models=SMOL, key="only-for-this-test-0123")) as peer:
        assert validate(peer.url, "--api-key-env", "MY_KEY", "-v", "--json") == 0
    written = [path for path in root.rglob("*") if path.is_file()]
    assert len(written) > 8
    for text in (*capsys.readouterr(), *(path.read_text() for path in written)):
        assert "only-for-this-test" not in text


def test_no_engine_is_imported_nor_asked(root: Path) -> None:
    """Where docker cannot even be imported."""
    script = (
        "import sys; sys.modules['docker'] = None; sys.modules['forge_core.engine'] = None;"
        "from forge_validate.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    environment = os.environ | {"DOCKER_HOST": "unix:///nonexistent"}
    with serving(Peer("vllm", models=SMOL)) as peer:
        command = [sys.executable, "-c", script, "validate", "--url", peer.url]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def refusal(url: str, **more: Any) -> ForgeError:
    values: dict[str, Any] = {"profile": "any", "served": None, "key_variable": None}
    with pytest.raises(ForgeError) as caught:
        attach(url, **(values | more))
    return caught.value


def test_nobody_listens() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        error = refusal(f"http://127.0.0.1:{reserved.getsockname()[1]}")
    assert isinstance(error, EnvironmentFailure) and "no server answers" in error.message


@pytest.mark.parametrize(
    ("statuses", "says"),
    [
        ({"/v1/models": 404}, "no OpenAI-compatible server: GET /v1/models gives HTTP 404"),
        ({"/v1/models": 503}, "there and not ready"),
        ({"/v1/chat/completions": 404}, "no OpenAI-compatible server: POST /v1/chat/completions gives HTTP 404"),
    ],
)
def test_what_does_not_speak_the_openai_way(statuses: dict[str, int], says: str) -> None:
    with serving(Peer("plain", statuses=statuses)) as peer:
        error = refusal(peer.url)
    assert isinstance(error, EnvironmentFailure) and says in error.message and error.hint


def test_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOD", " right\n")
    monkeypatch.setenv("BAD", "wrong")
    monkeypatch.setenv("ODD", "né")
    monkeypatch.delenv("UNSET", raising=False)
    with serving(Peer("vllm", key="right")) as peer:
        assert attach(peer.url, profile="any", served=None, key_variable="GOOD")[1].api_key == "right"
        without, wrong = refusal(peer.url), refusal(peer.url, key_variable="BAD")
    assert isinstance(without, EnvironmentFailure) and "--api-key-env" in str(without.hint)
    assert isinstance(wrong, EnvironmentFailure) and "BAD" in str(wrong.hint) and "wrong" not in wrong.message
    for name in ("UNSET", "ODD"):
        assert isinstance(refusal("http://127.0.0.1:1", key_variable=name), UsageError)


def test_which_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Peer("vllm", models=("base", "adapter"))) as peer:
        several = refusal(peer.url)
        assert isinstance(several, UsageError) and "--served" in str(several.hint)
        assert several.details == ("base", "adapter")
        assert isinstance(refusal(peer.url, served="other"), UsageError)
        assert attach(peer.url, profile="any", served="adapter", key_variable=None)[0].served == "adapter"


@pytest.mark.parametrize(
    "url", ["", "localhost:30000", "ftp://x", "http://", "http://x:99999", "http://x/?a=1", "http://me:pw-0815@x"]
)
def test_what_is_no_address(url: str) -> None:
    error = refusal(url)
    assert isinstance(error, UsageError) and "pw-0815" not in error.message + str(error.hint)


def test_options_that_do_not_go_together(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        validate("http://127.0.0.1:1", "--image", "x")
    assert caught.value.code == 2
    for more in (("--record", "x"), ("--model", "x"), ("--keep",), ("--profile", "nope")):
        assert validate("http://127.0.0.1:1", *more) == 2
    for more in (("--served", "x"), ("--api-key-env", "X")):
        assert main(["validate", "--profile", "rehearsal", *more]) == 2
    assert main(["validate"]) == 2
    capsys.readouterr()
    assert validate("http://me:pw-0815@127.0.0.1:1") == 2
    assert "pw-0815" not in capsys.readouterr().err


def test_a_model_folder_that_the_server_is_said_to_serve(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are rendered from it, and a golden is held to its bytes."""
    (tmp_path / "tokenizer.json").write_text("{}")
    seen: list[Bench] = []

    def examine(server: Server, judged: Bench, *more: object) -> None:
        seen.append(judged)
        raise EnvironmentFailure("that was to be seen")

    monkeypatch.setattr(attached, "examine", examine)
    with serving(Peer("vllm", models=SMOL)) as peer:
        assert validate(peer.url, "--model", str(tmp_path / "missing")) == 2
        assert validate(peer.url, "--model", str(tmp_path)) == 3
    (judged,) = seen
    assert judged.model == tmp_path and judged.identity is not None
    assert [file.path for file in judged.identity.files if file.path.endswith(".json")] == ["tokenizer.json"]


def test_offline_means_this_machine(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(Peer("vllm", models=SMOL)) as peer:
        assert validate(peer.url, "--offline") == 0
        assert validate(peer.url.replace("127.0.0.1", "localhost"), "--offline") == 0
    assert isinstance(refusal("http://192.0.2.1:1", offline=True), UsageError)
