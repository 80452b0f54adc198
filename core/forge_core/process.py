"""The one door for commands: a list, printed, logged per stage, with an environment from an allow list."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from forge_core.errors import EnvironmentFailure
from forge_core.redact import redact

# What a child may inherit: where programs and the user's settings are, proxies, private CAs, the engine's address.
# Everything else (PYTHONPATH, compiler flags, tokens) would make a build depend on who runs it.
_INHERITED = frozenset(
    {
        "PATH",
        "HOME",
        "LANG",
        "TERM",
        "TMPDIR",
        "USER",
        "XDG_CACHE_HOME",
        "XDG_CONFIG_HOME",
        "XDG_RUNTIME_DIR",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "ALL_PROXY",
        "all_proxy",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "REQUESTS_CA_BUNDLE",
        "CURL_CA_BUNDLE",
        "GIT_SSL_CAINFO",
        "DOCKER_HOST",
        "DOCKER_CONTEXT",
        "DOCKER_CONFIG",
        "DOCKER_CERT_PATH",
        "DOCKER_TLS_VERIFY",
        "BUILDX_CONFIG",
    }
)


@dataclass(frozen=True)
class Completed:
    """A finished command: its exit status and what it wrote (both streams merged when a log was given)."""

    argv: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    seconds: float


class CommandFailed(EnvironmentFailure):
    """A command ended with another status than 0; stages that know better raise their own error from it."""

    def __init__(self, completed: Completed, log: Path | None) -> None:
        tail = tuple((completed.stderr or completed.stdout).strip().splitlines()[-12:])
        super().__init__(f"`{shlex.join(completed.argv)}` ended with {completed.returncode}", log=log, details=tail)
        self.completed = completed


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment a child gets: the allow list from ours, then `extra`."""
    env = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    env.setdefault("LANG", "C.UTF-8")
    return env | dict(extra or {})


def run(
    argv: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
    log: Path | None = None,
    on_line: Callable[[str], None] | None = None,
    timeout: float | None = None,
    check: bool = True,
    secrets: Sequence[str] = (),
) -> Completed:
    """Run a command to its end.

    With `log` (appended to) or `on_line` the two streams are merged and read line by line, redacted; without, they are
    captured apart. `timeout` is in seconds. Raises CommandFailed on another status than 0 (unless `check` is false),
    EnvironmentFailure when the program is missing or the time is up. Whatever ends the call, the child's whole process
    group is gone after it.
    """
    args = tuple(str(a) for a in argv)
    began = time.monotonic()
    merged = log is not None or on_line is not None
    try:
        child = subprocess.Popen(
            args,
            cwd=cwd,
            env=environment(env),
            stdin=subprocess.PIPE if stdin is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
            start_new_session=True,
        )
    except FileNotFoundError as error:
        if cwd is not None and not cwd.is_dir():
            raise EnvironmentFailure(f"the folder {cwd} for `{args[0]}` does not exist") from error
        raise EnvironmentFailure(
            f"the program `{args[0]}` is not installed", hint="`nox -s engine` installs what the line needs"
        ) from error
    try:
        if merged:
            out, err = _follow(child, args, stdin, log, on_line, timeout, secrets), ""
        else:
            raw_out, raw_err = child.communicate(stdin, timeout)
            out, err = raw_out.decode(errors="replace"), raw_err.decode(errors="replace")
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFailure(f"`{shlex.join(args)}` did not end within {timeout:.0f} s", log=log) from error
    finally:
        _end_group(child)
    completed = Completed(args, child.returncode, out, err, time.monotonic() - began)
    if check and completed.returncode != 0:
        raise CommandFailed(completed, log)
    return completed


def _follow(
    child: subprocess.Popen[bytes],
    args: tuple[str, ...],
    stdin: bytes | None,
    log: Path | None,
    on_line: Callable[[str], None] | None,
    timeout: float | None,
    secrets: Sequence[str],
) -> str:
    """Read the merged stream to its end, writing the log as it grows; returns the last 400 lines."""
    assert child.stdout is not None
    deadline = None if timeout is None else time.monotonic() + timeout
    if stdin is not None and child.stdin is not None:
        child.stdin.write(stdin)
        child.stdin.close()
    kept: list[str] = []
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
    sink = log.open("a", encoding="utf-8") if log is not None else None
    try:
        if sink:
            sink.write(f"$ {redact(shlex.join(args), secrets)}\n")
        for raw in child.stdout:
            line = redact(raw.decode(errors="replace").rstrip("\n"), secrets)
            kept.append(line)
            if len(kept) > 800:
                del kept[:400]
            if sink:
                sink.write(line + "\n")
                sink.flush()
            if on_line:
                on_line(line)
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(args, timeout or 0)
        child.wait(None if deadline is None else max(0.1, deadline - time.monotonic()))
    finally:
        if sink:
            sink.close()
    return "\n".join(kept[-400:])


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End what is left of the child's process group: politely, then for good."""
    for stream in (child.stdin, child.stdout, child.stderr):
        if stream is not None:
            stream.close()
    if child.poll() is not None:
        return
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, sign)
            child.wait(10)
        except subprocess.TimeoutExpired:
            continue
        except ProcessLookupError:
            child.wait()
        return


def ended(process: psutil.Process, seconds: float) -> bool:
    """Wait up to `seconds` for a process that need not be our child; one that init has not reaped yet has ended."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
