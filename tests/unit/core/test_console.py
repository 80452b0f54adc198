"""What the user watches: everything on stderr, secrets masked, a failing step stands out."""

import re
import threading

import pytest

from forge_core.console import Console, duration, size
from forge_core.errors import Refused


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (0.42, "0.4 s"), (12.3, "12 s"), (59.4, "59 s"), (185, "3 min 05 s"), (3720, "1 h 02 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("amount", "text"), [(812, "812 B"), (3_400, "3 kB"), (3_400_000, "3.4 MB"), (1_260_000_000, "1.26 GB")]
)
def test_sizes(amount: int, text: str) -> None:
    assert size(amount) == text


def test_a_step_says_what_came_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    with Console().step("fetch", "3 files") as step:
        step.say("from the store [not markup]")
        step.detail("only with -v")
        step.result("3 verified")
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert lines[0] == "==> fetch: 3 files" and lines[1] == "    from the store [not markup]"
    assert re.fullmatch(r"    fetch done in \d\.\d s: 3 verified", lines[2]) and len(lines) == 3


@pytest.mark.parametrize(("error", "word"), [(RuntimeError, "FAILED"), (KeyboardInterrupt, "interrupted")])
def test_a_step_that_fails_stands_out(
    error: type[BaseException], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(error), Console().step("compile"):
        raise error
    assert f"compile {word} after" in capsys.readouterr().err


def test_failures_show_cause_details_hint_and_log_masked(capsys: pytest.CaptureFixture[str]) -> None:
    error = Refused("bad --api-key abc", hint="try HF_TOKEN=abc", details=("api_key='abc'", "[bold]kept[/bold]"))
    Console().failure(error)
    err = capsys.readouterr().err
    assert "abc" not in err and err.count("***") == 3
    assert err.index("error: bad") < err.index("[bold]kept[/bold]") < err.index("hint: try")


def test_nothing_is_said_when_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(quiet=True)
    with console.step("x") as step:
        step.progress(1, 2)
        console.say("y")
    assert capsys.readouterr().err == ""


def test_groups_where_the_ci_system_folds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    with Console().step("image"):
        pass
    err = capsys.readouterr().err
    assert err.startswith("::group::image\n") and err.endswith("::endgroup::\n")


def test_a_ticking_step_draws_while_the_block_waits() -> None:
    drawn = threading.Event()
    with Console().step("probe") as step:
        with step.ticking(drawn.set):
            assert drawn.wait(10)
        drawn.clear()
        assert not drawn.wait(0.5), "nothing is drawn after the block"
