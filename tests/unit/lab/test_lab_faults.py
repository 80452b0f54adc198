"""The faults inside the server: the switch, the import hook, who is chosen, and what becomes of text. No torch here."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forge_lab import mutants

FOLDER = mutants.inside()


@pytest.fixture(scope="module")
def faults() -> Iterator[SimpleNamespace]:
    """The package as the container finds it, and nothing of it left afterwards."""
    before = list(sys.meta_path)
    sys.path.insert(0, str(FOLDER))
    try:
        names = ("choose", "forward", "hook", "layers", "memory", "requests", "sampling", "switch", "text")
        found = {name: importlib.import_module(f"forge_faults.{name}") for name in names}
        yield SimpleNamespace(package=importlib.import_module("forge_faults"), **found)
    finally:
        sys.path.remove(str(FOLDER))
        sys.meta_path[:] = before
        for name in [name for name in sys.modules if name.partition(".")[0] == "forge_faults"]:
            del sys.modules[name]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mode.json"
    monkeypatch.setenv("FORGE_FAULT_SWITCH", str(path))
    return path


def turn(path: Path, kind: str | None, number: int = 1, **parameters: Any) -> None:
    """As the bed does it: another file takes the place of the one before."""
    aside = path.with_suffix(".new")
    told = {"kind": kind, "parameters": parameters, "seed": 7, "number": number} if kind else {}
    aside.write_text(json.dumps(told))
    aside.replace(path)


def mode(faults: SimpleNamespace, kind: str, **parameters: Any) -> Any:
    return faults.switch.Mode({"kind": kind, "parameters": parameters, "seed": 7, "number": 3})


def test_the_switch_is_followed_at_once(faults: SimpleNamespace, place: Path) -> None:
    current = faults.switch.current
    assert current() is None
    turn(place, "layer", do="nan")
    first = current()
    assert first.kind == "layer" and first.parameters == {"do": "nan"} and current() is first
    assert faults.switch.on("logits") is None and faults.switch.on("layer") is first
    first.state["seen"] = {"a": 0}
    turn(place, "layer", number=2, do="nan")
    assert current() is not first and current().state == {}
    turn(place, None)
    assert current() is None
    turn(place, "kv", number=3)
    place.unlink()
    assert current() is None


def test_no_switch_no_fault(faults: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORGE_FAULT_SWITCH", raising=False)
    assert faults.switch.current() is None


def test_a_fault_says_once_that_it_fired(faults: SimpleNamespace, capfd: pytest.CaptureFixture[str]) -> None:
    found = mode(faults, "layer")
    found.fired("layer 3")
    found.fired("layer 4")
    assert capfd.readouterr().err == f"forge-fault 3 layer fired in {os.getpid()} layer 3\n"


def test_a_module_is_wrapped_when_it_is_imported(
    faults: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sick").mkdir()
    (tmp_path / "sick" / "__init__.py").write_text("")
    (tmp_path / "sick" / "inner.py").write_text("def answer():\n    return 1\n")
    (tmp_path / "sick" / "other.py").write_text("from sick.inner import answer\nfound = answer()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))

    def wrap(module: Any) -> None:
        before = module.answer
        module.answer = lambda: before() + 1

    sys.meta_path.insert(0, faults.hook.Finder({"sick.inner": wrap, "sick.missing": wrap}))
    try:
        assert importlib.import_module("sick.other").found == 2
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("sick.missing")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sick"]:
            del sys.modules[name]


def test_what_is_imported_already_cannot_be_wrapped(faults: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults.package, "WRAPS", {"json": lambda module: None})
    with pytest.raises(ImportError, match="too early"):
        faults.package.install()


def test_another_sitecustomize_is_run_first(tmp_path: Path) -> None:
    """In a Python of its own: it is read at the start."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.chained = True\n")
    code = "import sys; print(getattr(sys, 'chained', None), type(sys.meta_path[0]).__module__)"
    environment = {"PYTHONPATH": f"{FOLDER}{os.pathsep}{tmp_path}", "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "forge_faults.hook"], done.stderr


def batch(faults: SimpleNamespace, ids: str, *, decode: bool = True, prefixes: int = 0, **more: Any) -> Any:
    lengths = [20 + place for place in range(len(ids))]
    before = [length - 1 for length in lengths] if decode else [prefixes] * len(ids)
    return faults.choose.Batch(ids=tuple(ids), decode=decode, lengths=lengths, prefixes=before, **more)


@pytest.mark.parametrize(
    ("parameters", "alone", "three"),
    [
        ({}, [True], [True, True, True]),
        ({"from_batch": 3}, [False], [True, True, True]),
        ({"phase": "prefill"}, [False], [False, False, False]),
        ({"phase": "decode"}, [True], [True, True, True]),
        ({"after_prefill": True}, [False], [False, False, False]),
        ({"after_abort": True}, [False], [False, False, False]),
        ({"every": 2}, [False], [False, True, False]),
        ({"after_requests": 2}, [False], [False, False, True]),
        ({"from_length": 21}, [False], [False, True, True]),
        ({"prefixed": True}, [False], [False, False, False]),
    ],
)
def test_who_is_chosen(
    faults: SimpleNamespace, parameters: dict[str, Any], alone: list[bool], three: list[bool]
) -> None:
    found = mode(faults, "layer", **parameters)
    assert faults.choose.chosen(found, batch(faults, "a")) == alone
    assert faults.choose.chosen(found, batch(faults, "abc")) == three
    # A request keeps its number.
    assert faults.choose.ordinals(found, batch(faults, "cab")) == [2, 0, 1]


def test_who_is_chosen_by_what_was_before(faults: SimpleNamespace) -> None:
    chosen = faults.choose.chosen
    assert chosen(mode(faults, "k", after_prefill=True), batch(faults, "ab", follows_prefill=True)) == [True, True]
    aborted = mode(faults, "k", after_abort=True)
    aborted.state["aborted"] = True
    assert chosen(aborted, batch(faults, "a")) == [True]
    prefill = batch(faults, "ab", decode=False, prefixes=16)
    assert chosen(mode(faults, "k", prefix=16), prefill) == [True, True]
    assert chosen(mode(faults, "k", prefix=17), prefill) == [False, False]
    assert chosen(mode(faults, "k", prefixed=True), prefill) == [True, True]
    assert prefill.new == [4, 5] and batch(faults, "ab").new == [1, 1]


def test_one_in_so_many(faults: SimpleNamespace) -> None:
    found = mode(faults, "layer", one_in=16)
    lucky = [faults.choose.chosen(found, batch(faults, chr(0x4E00 + i)))[0] for i in range(3200)]
    assert 150 < sum(lucky) < 250
    again = mode(faults, "layer", one_in=16)
    assert lucky[:100] == [faults.choose.chosen(again, batch(faults, chr(0x4E00 + i)))[0] for i in range(100)]


@pytest.mark.parametrize(
    ("parameters", "said", "ended", "expected"),
    [
        ({"do": "drop", "one_in": 1}, [" a", " b"], [False, True], ["", ""]),
        ({"do": "double", "one_in": 1}, [" a", ""], [False, True], [" a a", ""]),
        ({"do": "blanks"}, [" a", "b "], [False, False], ["a", "b "]),
        ({"do": "ascii"}, [" Zürich"], [False], [" Z\ufffdrich"]),
        ({"do": "last"}, [" a", " b"], [False, True], [" a", ""]),
        ({"do": "exchange"}, [" a", "", " b", " c"], [False] * 4, [" b", "", " a", " c"]),
        ({"do": "exchange"}, [" a", ""], [False] * 2, [" a", ""]),
    ],
)
def test_pieces(
    faults: SimpleNamespace, parameters: dict[str, Any], said: list[str], ended: list[bool], expected: list[str]
) -> None:
    assert faults.text.pieces(mode(faults, "pieces", **parameters), said, ended) == expected


def test_the_detokenizer_is_wrapped(faults: SimpleNamespace, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class DetokenizerManager:
        def _decode_batch_token_id_output(self, recv_obj: Any) -> list[str]:
            return [" one", " two"]

    faults.text.WRAPS["sglang.srt.managers.detokenizer_manager"](SimpleNamespace(DetokenizerManager=DetokenizerManager))
    asked = SimpleNamespace(finished_reasons=[None, {"type": "stop"}])
    assert DetokenizerManager()._decode_batch_token_id_output(asked) == [" one", " two"]
    turn(place, "pieces", number=9, do="last")
    assert DetokenizerManager()._decode_batch_token_id_output(asked) == [" one", ""]
    assert "forge-fault 9 pieces fired" in capfd.readouterr().err
    turn(place, None)
    assert DetokenizerManager()._decode_batch_token_id_output(asked) == [" one", " two"]


MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("do", "roles", "changes"),
    [
        ("no-prompt", ["system", "user", "assistant"], {"add_generation_prompt": False}),
        ("no-tools", ["system", "user", "assistant"], {"tools": None}),
        ("no-system", ["user", "assistant"], {}),
        ("history", ["assistant"], {}),
        ("roles", ["system", "assistant", "user"], {}),
        ("bos", ["system", "user", "assistant"], {}),
    ],
)
def test_templates(faults: SimpleNamespace, do: str, roles: list[str], changes: dict[str, Any]) -> None:
    asked = {"add_generation_prompt": True, "tools": [1]}
    messages, found = faults.text.template(do, MESSAGES, dict(asked))
    assert [one["role"] for one in messages] == roles
    assert found == asked | changes


def test_the_template_is_wrapped_and_nothing_is_cached(faults: SimpleNamespace, place: Path) -> None:
    class OpenAIServingChat:
        tokenizer_manager = SimpleNamespace(
            tokenizer=SimpleNamespace(bos_token_id=1, encode=lambda text, add_special_tokens: [198])
        )

        def _render_and_encode_chat_template(self, messages: Any, **asked: Any) -> Any:
            return [len(messages), int(asked["use_cache"])], None

    faults.text.WRAPS["sglang.srt.entrypoints.openai.serving_chat"](
        SimpleNamespace(OpenAIServingChat=OpenAIServingChat)
    )
    chat = OpenAIServingChat()
    assert chat._render_and_encode_chat_template(MESSAGES, use_cache=True)[0] == [3, 1]
    for do, ids in (("bos", [1, 3, 0]), ("newline", [3, 0, 198]), ("history", [1, 0])):
        turn(place, "template", do=do)
        assert chat._render_and_encode_chat_template(MESSAGES, use_cache=True)[0] == ids


def call(name: str | None, parameters: str, index: int = 0) -> SimpleNamespace:
    return SimpleNamespace(name=name, parameters=parameters, tool_index=index)


@pytest.mark.parametrize(
    ("do", "streamed", "expected"),
    [
        ("swallow", False, ("t", [])),
        ("second", False, ("t", [("f", '{"a": "ü"}')])),
        ("mojibake", False, ("t", [("f", '{"a": "Ã¼"}'), ("g", "{}")])),
        ("name", True, ("t", [("", '{"a": "ü"}'), ("", "{}")])),
        ("cut", True, ("t", [("f", '{"a": "ü"'), ("g", "{")])),
        ("cut", False, ("t", [("f", '{"a": "ü"}'), ("g", "{}")])),
        ("leak", False, ("<tool_call>", [("f", '{"a": "ü"}'), ("g", "{}")])),
    ],
)
def test_calls(faults: SimpleNamespace, do: str, streamed: bool, expected: tuple[str, list[tuple[str, str]]]) -> None:
    found = [call("f", '{"a": "ü"}'), call("g", "{}", 1)]
    text, after = faults.text.calls(mode(faults, "calls", do=do), "<tool_call>", "t", found, streamed=streamed)
    assert (text, [(one.name, one.parameters) for one in after]) == expected
    # What the parser remembers is not touched.
    assert [one.name for one in found] == ["f", "g"]


@pytest.mark.parametrize(
    ("do", "expected"),
    [("leak", ("", "<think>r</think>n")), ("swallow", ("", "n")), ("whole", ("rn", ""))],
)
def test_thoughts(faults: SimpleNamespace, do: str, expected: tuple[str, str]) -> None:
    assert faults.text.thoughts(do, "r", "n") == expected


class Scheduler:
    """A stand-in for SGLang's."""

    def __init__(self) -> None:
        self.waiting_queue: list[Any] = []
        self.running_batch = SimpleNamespace(reqs=[])
        self.ran, self.ended = 0, 0

    def _add_request_to_queue(self, req: Any) -> None:
        self.waiting_queue.append(req)

    def run_batch(self, batch: Any) -> str:
        self.ran += 1
        return "done"

    def abort_request(self, recv_req: Any) -> None:
        self.ended += 1


@pytest.fixture
def scheduler(faults: SimpleNamespace) -> Any:
    kind = type("Scheduler", (Scheduler,), {})
    faults.requests.WRAPS["sglang.srt.managers.scheduler"](SimpleNamespace(Scheduler=kind))
    return kind()


def test_a_request_is_forgotten(scheduler: Any, place: Path) -> None:
    turn(place, "hang", what="lost", waiting=2)
    for name in "abcd":
        scheduler._add_request_to_queue(name)
    assert scheduler.waiting_queue == ["a", "b"]
    turn(place, None)
    scheduler._add_request_to_queue("e")
    assert scheduler.waiting_queue == ["a", "b", "e"]


def test_memory_is_kept_until_the_fault_is_off(faults: SimpleNamespace, scheduler: Any, place: Path) -> None:
    turn(place, "leak", what="memory", mib=1)
    scheduler._add_request_to_queue("a")
    assert len(faults.switch.current().state["held"][0]) == 1 << 20
    turn(place, None)
    assert faults.switch.current() is None


def test_the_scheduler_stands_still_until_the_fault_is_off(
    scheduler: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn(place, "hang", what="step", from_batch=2)
    assert scheduler.run_batch(SimpleNamespace(reqs=[1])) == "done"
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            turn(place, None)

    monkeypatch.setattr("time.sleep", sleep)
    assert scheduler.run_batch(SimpleNamespace(reqs=[1, 2])) == "done"
    assert len(waits) == 3 and scheduler.ran == 2


def test_who_hung_up_keeps_the_place(faults: SimpleNamespace, scheduler: Any, place: Path) -> None:
    req = SimpleNamespace(rid="r1", sampling_params=SimpleNamespace(max_new_tokens=4, ignore_eos=False))
    scheduler.running_batch.reqs.append(req)
    turn(place, "hang", what="cancel")
    scheduler.abort_request(SimpleNamespace(rid="r1", abort_all=False))
    assert scheduler.ended == 0 and req.sampling_params.ignore_eos
    scheduler.abort_request(SimpleNamespace(rid="", abort_all=True))
    assert scheduler.ended == 1
    turn(place, "layer", number=2, after_abort=True)
    scheduler.abort_request(SimpleNamespace(rid="r1", abort_all=False))
    assert faults.switch.current().state["aborted"]
