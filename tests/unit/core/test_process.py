"""The one door for commands: nothing hangs, nothing survives, nothing leaks."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from forge_core.errors import EnvironmentFailure, ExitCode
from forge_core.process import CommandFailed, environment, run


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_gone(pid: int) -> bool:
    end = time.monotonic() + 3
    while not gone(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return gone(pid)


def wait_text(path: Path) -> str:
    end = time.monotonic() + 5
    while time.monotonic() < end:
        if path.exists() and (text := path.read_text().strip()):
            return text
        time.sleep(0.02)
    raise AssertionError(f"{path} stayed empty")


def test_streams_apart_without_a_log() -> None:
    done = run(["sh", "-c", "echo out; echo err >&2"])
    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 0)


def test_streams_merged_in_the_log(tmp_path: Path) -> None:
    log, lines = tmp_path / "logs" / "x.log", list[str]()
    done = run(["sh", "-c", "echo one; echo two >&2; printf three"], log=log, on_line=lines.append)
    assert lines == ["one", "two", "three"] and done.stdout == "one\ntwo\nthree" and done.stderr == ""
    run(["echo", "again"], log=log)
    assert log.read_text().splitlines() == [
        "$ sh -c 'echo one; echo two >&2; printf three'",
        "one",
        "two",
        "three",
        "$ echo again",
        "again",
    ]


def test_failure_carries_status_and_tail(tmp_path: Path) -> None:
    with pytest.raises(CommandFailed, match=r"ended with 3") as caught:
        run(["sh", "-c", "seq 100; exit 3"], log=tmp_path / "x.log")
    assert caught.value.details == tuple(map(str, range(89, 101)))
    assert caught.value.log == tmp_path / "x.log" and caught.value.exit_code == ExitCode.ENVIRONMENT
    assert run(["sh", "-c", "exit 3"], check=False).returncode == 3
    assert run(["sh", "-c", "kill -9 $$"], check=False).returncode == -9


def test_what_cannot_be_run(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailure, match="`no-such-program` is not installed"):
        run(["no-such-program"])
    with pytest.raises(EnvironmentFailure, match=r"the folder .*gone"):
        run(["true"], cwd=tmp_path / "gone")
    (tmp_path / "file").write_text("x")
    with pytest.raises(EnvironmentFailure, match="cannot be run: Permission denied"):
        run([tmp_path / "file"])
    with pytest.raises(EnvironmentFailure, match="the folder"):
        run(["true"], cwd=tmp_path / "file")
    (tmp_path / "file").chmod(0o755)
    (tmp_path / "file").write_bytes(b"\x7fELF nonsense")
    with pytest.raises(EnvironmentFailure, match="cannot be run: Exec format"):
        run([tmp_path / "file"])


@pytest.mark.parametrize("merged", [False, True])
def test_large_input_and_output_do_not_block_each_other(tmp_path: Path, merged: bool) -> None:
    data = b"0123456789abcdef" * 64 * 1024 + b"\n"
    seen: list[str] = []
    done = run(["cat"], stdin=data, on_line=seen.append if merged else None, timeout=20)
    assert len("".join(seen) if merged else done.stdout.rstrip()) == len(data) - 1


@pytest.mark.parametrize("merged", [False, True])
def test_a_child_that_does_not_read_its_input(tmp_path: Path, merged: bool) -> None:
    log = tmp_path / "x.log" if merged else None
    assert (
        run(["sh", "-c", "exec <&-; echo done"], stdin=b"x" * 1_000_000, log=log, timeout=20).stdout.strip() == "done"
    )
    assert run(["cat"], stdin=b"", log=log, timeout=20).stdout == ""


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("script", ["sleep 60", "while :; do echo x; sleep 0.02; done", "exec >&- 2>&-; sleep 60"])
def test_time_limit_for_silent_and_talking_children(tmp_path: Path, merged: bool, script: str) -> None:
    pid = tmp_path / "pid"
    began = time.monotonic()
    with pytest.raises(EnvironmentFailure, match=r"did not end within 0\.3 s"):
        run(["sh", "-c", f"echo $$ >{pid}; {script}"], log=tmp_path / "x.log" if merged else None, timeout=0.3)
    assert time.monotonic() - began < 5
    assert gone(int(pid.read_text()))


@pytest.mark.parametrize("merged", [False, True])
def test_the_whole_group_is_gone_after_a_clean_end(tmp_path: Path, merged: bool) -> None:
    pid = tmp_path / "pid"
    began = time.monotonic()
    run(["sh", "-c", f"sleep 60 & echo $! >{pid}; exit 0"], log=tmp_path / "x.log" if merged else None)
    assert time.monotonic() - began < 5
    assert wait_gone(int(pid.read_text()))


def test_the_group_is_gone_even_if_it_ignores_sigterm(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    stubborn = f"(trap '' TERM; echo $(exec sh -c 'echo $PPID') >{pid}; sleep 60; sleep 60) & wait"
    with pytest.raises(EnvironmentFailure, match="did not end"):
        run(["sh", "-c", stubborn], timeout=0.5)
    assert wait_gone(int(pid.read_text()))


def test_a_child_may_clean_up_and_talk_on_sigterm(tmp_path: Path) -> None:
    mark = tmp_path / "clean"
    script = f"trap 'seq 50000; echo yes >{mark}; exit 1' TERM; echo ready; while :; do sleep 0.05; done"
    with pytest.raises(EnvironmentFailure):
        run(["bash", "-c", script], timeout=0.5)
    assert mark.read_text() == "yes\n"


@pytest.mark.parametrize("merged", [False, True])
def test_a_daemon_in_its_own_session_survives_and_does_not_hold_us(tmp_path: Path, merged: bool) -> None:
    pid = tmp_path / "pid"
    began = time.monotonic()
    run(
        ["setsid", "--fork", "sh", "-c", f"echo $$ >{pid}; exec sleep 60"],
        log=tmp_path / "x.log" if merged else None,
        timeout=20,
    )
    number = int(wait_text(pid))
    try:
        time.sleep(0.2)
        assert not gone(number)
        assert time.monotonic() - began < 5
    finally:
        os.kill(number, signal.SIGKILL)


def test_a_listener_that_raises_ends_the_child(tmp_path: Path) -> None:
    pid = tmp_path / "pid"

    def refuse(line: str) -> None:
        raise RuntimeError(line)

    with pytest.raises(RuntimeError, match="first"):
        run(["sh", "-c", f"echo $$ >{pid}; echo first; sleep 60"], on_line=refuse)
    assert gone(int(pid.read_text()))


@pytest.mark.parametrize("merged", [False, True])
def test_ctrl_c_ends_the_group(tmp_path: Path, merged: bool) -> None:
    """A real SIGINT to a real program; its child lives in another session and gets nothing from the terminal."""
    pid = tmp_path / "pid"
    log = f"Path({str(tmp_path / 'x.log')!r})" if merged else "None"
    code = f"""
from pathlib import Path
from forge_core.process import run
run(["sh", "-c", "sleep 60 & echo $! >{pid}; wait"], log={log})
"""
    program = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    number = int(wait_text(pid))
    program.send_signal(signal.SIGINT)
    _, err = program.communicate(timeout=20)
    assert b"KeyboardInterrupt" in err
    assert wait_gone(number)


def test_secrets_stay_out_of_log_listener_and_errors(tmp_path: Path) -> None:
    log, lines = tmp_path / "x.log", list[str]()
    secret = "tr0ub4dor"
    with pytest.raises(CommandFailed) as caught:
        run(
            ["sh", "-c", f"echo says {secret} '--api-key sk-1'; exit 1"],
            log=log,
            on_line=lines.append,
            secrets=[secret],
        )
    everything = log.read_text() + "".join(lines) + caught.value.message + "".join(caught.value.details)
    assert secret not in everything and "sk-1" not in everything and "says ***" in everything
    with pytest.raises(CommandFailed) as caught:
        run(["sh", "-c", f"echo {secret} >&2; exit 1"], secrets=[secret])
    assert secret not in caught.value.message + "".join(caught.value.details)
    with pytest.raises(EnvironmentFailure) as late:
        run(["sh", "-c", f"echo {secret}; sleep 60"], secrets=[secret], timeout=0.3)
    assert secret not in late.value.message + "".join(late.value.details)


def test_bytes_that_are_no_text_and_lines_without_end(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    done = run(["sh", "-c", r"printf 'a\377b\r\nlast \303\251'"], log=log)
    assert done.stdout == "a�b\nlast é" and log.read_text(encoding="utf-8").endswith("a�b\nlast é\n")


def test_memory_stays_bounded_but_the_log_is_whole(tmp_path: Path) -> None:
    done = run(["seq", "5000"], log=tmp_path / "x.log")
    assert done.stdout.splitlines() == [str(n) for n in range(4601, 5001)]
    assert len((tmp_path / "x.log").read_text().splitlines()) == 5001
    assert len(run(["seq", "5000"]).stdout.splitlines()) == 5000


def test_only_the_allowed_environment_is_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/evil")
    monkeypatch.setenv("HF_TOKEN", "x")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    assert "PYTHONPATH" not in environment() and "HF_TOKEN" not in environment()
    assert environment()["HTTPS_PROXY"] == "http://proxy:3128"
    out = run(["env"], env={"SOURCE_DATE_EPOCH": "1"}).stdout
    assert "SOURCE_DATE_EPOCH=1" in out and "HF_TOKEN" not in out and "LANG=" in out


def test_commands_run_in_threads_at_once() -> None:
    results: list[str] = []
    threads = [threading.Thread(target=lambda n=n: results.append(run(["echo", str(n)]).stdout)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [f"{n}\n" for n in range(8)]
