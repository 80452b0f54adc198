"""Errors become exit codes in one place; options of one verb are refused by the others."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from forge_core import cli
from forge_core.cli import Parser, guarded, project_root
from forge_core.console import Console
from forge_core.errors import (
    EnvironmentFailure,
    ForgeError,
    Inconclusive,
    IntegrityError,
    Refused,
    UsageError,
)


def ending(error: BaseException | None) -> int:
    def action() -> None:
        if error is not None:
            raise error

    return int(guarded(action, Console()))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (Refused("no"), 1),
        (UsageError("no"), 2),
        (EnvironmentFailure("no"), 3),
        (Inconclusive("no"), 4),
        (IntegrityError("no"), 5),
        (KeyboardInterrupt(), 130),
        (OSError(errno.ENOSPC, "No space left on device", "/store/x"), 3),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 3),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 3),
        (RuntimeError("a defect"), 4),
    ],
)
def test_exit_codes(error: BaseException | None, code: int) -> None:
    assert ending(error) == code


def test_a_status_of_the_action_is_kept() -> None:
    assert guarded(lambda: 4, Console()) == 4
    assert guarded(lambda: None, Console()) == 0


def test_a_real_full_disk(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(lambda: Path("/dev/full").write_text("x" * 100_000) and None, Console()) == 3
    assert "no space left on a disk" in capsys.readouterr().err
    assert ending(OSError(errno.ENOSPC, "full", b"/store/x")) == 3
    assert "the disk of /store/x" in capsys.readouterr().err


def test_a_defect_is_never_mistaken_for_a_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    assert ending(ZeroDivisionError("division by zero")) == 4
    err = capsys.readouterr().err
    assert "Traceback" in err and "ZeroDivisionError: division by zero" in err and "report it" in err


def test_a_failing_clean_up_after_ctrl_c_is_still_an_interrupt() -> None:
    def action() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise EnvironmentFailure("the container does not go away")

    assert guarded(action, Console()) == 130


def test_system_exit_passes() -> None:
    with pytest.raises(SystemExit):
        ending(SystemExit(7))


def test_the_signal_handler_is_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    ending(None)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_clean_up_and_end_with_130(tmp_path: Path, number: signal.Signals) -> None:
    """A second SIGTERM during the clean-up does not break it off."""
    ready, clean = tmp_path / "ready", tmp_path / "clean"
    code = f"""
import os, signal, sys, time
from pathlib import Path
from forge_core.cli import guarded
from forge_core.console import Console
def action():
    try:
        Path({str(ready)!r}).touch()
        time.sleep(60)
    finally:
        if {int(number)} == signal.SIGTERM:
            os.kill(os.getpid(), signal.SIGTERM)
        Path({str(clean)!r}).touch()
sys.exit(guarded(action, Console()))
"""
    program = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    end = time.monotonic() + 10
    while not ready.exists() and time.monotonic() < end:
        time.sleep(0.02)
    program.send_signal(number)
    _, err = program.communicate(timeout=20)
    assert program.returncode == 130 and clean.exists() and b"interrupted" in err and b"Traceback" not in err


def parser() -> Parser:
    made = Parser("forge_test", "for tests")
    made.verb("one", lambda options, console: 0 if options.flag else 4, "first").add_argument(
        "--flag", action="store_true"
    )
    made.verb("two", lambda options, console: None, "second")
    return made


def test_verbs_take_the_walks_options_and_their_own() -> None:
    assert parser().main(["one", "--flag", "--profile", "x", "--offline", "--keep", "-v", "--json"]) == 0
    assert parser().main(["one"]) == 4
    assert parser().main(["two"]) == 0


@pytest.mark.parametrize(
    "argv", [[], ["three"], ["two", "--flag"], ["one", "--fl"], ["one", "--prof", "x"], ["one", "stray"]]
)
def test_wrong_command_lines_end_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parser().main(argv)
    assert caught.value.code == 2 and "usage:" in capsys.readouterr().err


def test_project_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORGE_ROOT", raising=False)
    (tmp_path / "a" / "b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "a" / "b")
    with pytest.raises(EnvironmentFailure, match=r"no Dockerfile\.sm120"):
        project_root()
    (tmp_path / "Dockerfile.sm120").touch()
    assert project_root() == Path(os.path.realpath(tmp_path))
    monkeypatch.setenv("FORGE_ROOT", str(tmp_path / "a"))
    assert project_root() == (tmp_path / "a").resolve()
    assert cli.work_folder("x") == (tmp_path / "a").resolve() / "work" / "x"


def test_verbose_shows_where_an_error_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    def action() -> None:
        raise UsageError("wrong")

    guarded(action, Console())
    assert "Traceback" not in capsys.readouterr().err
    guarded(action, Console(verbose=True))
    assert "Traceback" in capsys.readouterr().err
    assert issubclass(UsageError, ForgeError)
