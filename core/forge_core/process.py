"""The one door for commands: a list, printed, logged per stage, with an environment from an allow list."""

from __future__ import annotations

import os
import selectors
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

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


# How long a child may take to end itself after SIGTERM before SIGKILL.
_GRACE_S = 10.0
# How long others of its group may outlive a child: `setsid --fork` needs a moment between its fork and its setsid.
_OUTLIVE_S = 0.5
# How long a pipe is read on after the child's end, when something that outlived it keeps the pipe open.
_DRAIN_S = 2.0
_TICK_S = 0.5
_KEPT_LINES = 400


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

    def __init__(self, completed: Completed, log: Path | None, *, secrets: Sequence[str] = ()) -> None:
        said = redact((completed.stderr or completed.stdout).strip(), secrets)
        command = redact(shlex.join(completed.argv), secrets)
        super().__init__(
            f"`{command}` ended with {completed.returncode}", log=log, details=tuple(said.splitlines()[-12:])
        )
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

    With `log` (appended to) or `on_line` the two streams are merged and read line by line, redacted, and the last 400
    lines returned; without, they are captured apart, whole and as they are. `timeout` is in seconds. Raises
    CommandFailed on another status than 0 (unless `check` is false), EnvironmentFailure when the program cannot be run or
    the time is up. Whatever ends the call, the child's whole process group is gone after it; a daemon must leave the
    group (`setsid --fork`) and must not keep our pipes.
    """
    args = tuple(str(a) for a in argv)
    command = redact(shlex.join(args), secrets)
    began = time.monotonic()
    merged = log is not None or on_line is not None
    with ExitStack() as stack:
        lines = stack.enter_context(_Lines(command, log, on_line, secrets)) if merged else None
        child = _start(args, cwd, env, stdin is not None, merged)
        out, err = bytearray(), bytearray()
        sinks: dict[IO[bytes], Callable[[bytes], object]] = {}
        assert child.stdout is not None
        sinks[child.stdout] = lines.feed if lines else out.extend
        if child.stderr is not None:
            sinks[child.stderr] = err.extend
        try:
            _pump(child, stdin, sinks, None if timeout is None else began + timeout)
        except TimeoutError as error:
            if lines:
                lines.end()
            said = redact("\n".join(lines.kept[-12:]) if lines else (err or out).decode(errors="replace"), secrets)
            raise EnvironmentFailure(
                f"`{command}` did not end within {timeout:g} s", log=log, details=tuple(said.strip().splitlines()[-12:])
            ) from error
        finally:
            _end_group(child)
        if lines:
            lines.end()
    text = "\n".join(lines.kept[-_KEPT_LINES:]) if lines else out.decode(errors="replace")
    completed = Completed(args, child.returncode, text, err.decode(errors="replace"), time.monotonic() - began)
    if check and completed.returncode != 0:
        raise CommandFailed(completed, log, secrets=secrets)
    return completed


def _start(
    args: tuple[str, ...], cwd: Path | None, env: Mapping[str, str] | None, fed: bool, merged: bool
) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            args,
            bufsize=0,
            cwd=cwd,
            env=environment(env),
            stdin=subprocess.PIPE if fed else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as error:
        if cwd is not None and not cwd.is_dir():
            raise EnvironmentFailure(f"the folder {cwd} for `{args[0]}` does not exist") from error
        if isinstance(error, FileNotFoundError):
            raise EnvironmentFailure(
                f"the program `{args[0]}` is not installed", hint="`nox -s engine` installs what the line needs"
            ) from error
        raise EnvironmentFailure(f"the program `{args[0]}` cannot be run: {error.strerror}") from error


def _pump(
    child: subprocess.Popen[bytes],
    stdin: bytes | None,
    sinks: Mapping[IO[bytes], Callable[[bytes], object]],
    deadline: float | None,
) -> None:
    """Feed the child and read it, both at once, until it has ended; raises TimeoutError at the deadline.

    A silent child runs into the deadline as a talking one does, and one that does not read its input is not waited for.
    """
    unsent = memoryview(stdin or b"")
    ended: float | None = None
    with selectors.DefaultSelector() as selector:
        for stream in sinks:
            selector.register(stream, selectors.EVENT_READ)
        if child.stdin is not None:
            os.set_blocking(child.stdin.fileno(), False)
            selector.register(child.stdin, selectors.EVENT_WRITE)
        while selector.get_map():
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                raise TimeoutError
            if ended is None and child.poll() is not None:
                ended = now
            ready = selector.select(_TICK_S if deadline is None else min(_TICK_S, deadline - now))
            if ended is not None and (not ready or now - ended > _DRAIN_S):
                return
            for key, _ in ready:
                if key.fileobj is child.stdin:
                    try:
                        unsent = unsent[os.write(key.fd, unsent[:65536]) :]
                    except BrokenPipeError:
                        unsent = unsent[:0]
                    if not unsent:
                        selector.unregister(child.stdin)
                        child.stdin.close()
                elif data := os.read(key.fd, 65536):
                    sinks[key.fileobj](data)  # type: ignore[index]
                else:
                    selector.unregister(key.fileobj)
    try:
        child.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired as error:
        raise TimeoutError from error


class _Lines:
    """The merged stream as lines, redacted, on their way to the log and the listener."""

    def __init__(
        self, command: str, log: Path | None, on_line: Callable[[str], None] | None, secrets: Sequence[str]
    ) -> None:
        self.kept: list[str] = []
        self._on_line = on_line
        self._secrets = secrets
        self._rest = b""
        self._sink = None
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            self._sink = log.open("a", encoding="utf-8")
            self._sink.write(f"$ {command}\n")
            self._sink.flush()

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        if self._sink:
            self._sink.close()

    def feed(self, data: bytes) -> None:
        """Take a piece of the stream; a line is passed on when it is whole."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        for raw in whole:
            self._line(raw)

    def end(self) -> None:
        """Pass on a last line without an end."""
        rest, self._rest = self._rest, b""
        if rest:
            self._line(rest)

    def _line(self, raw: bytes) -> None:
        line = redact(raw.decode(errors="replace").rstrip("\r"), self._secrets)
        self.kept.append(line)
        if len(self.kept) > 2 * _KEPT_LINES:
            del self.kept[:_KEPT_LINES]
        if self._sink:
            self._sink.write(line + "\n")
            self._sink.flush()
        if self._on_line:
            self._on_line(line)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End what is left of the child's process group: politely, then for good, even if interrupted again meanwhile."""
    try:
        if child.poll() is None:
            _signal(child, signal.SIGTERM)
            _drain(child, _GRACE_S, lambda: child.poll() is not None)
        _drain(child, _OUTLIVE_S, lambda: not _signal(child, 0))
    finally:
        _signal(child, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
        for stream in (child.stdin, child.stdout, child.stderr):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


def _drain(child: subprocess.Popen[bytes], seconds: float, done: Callable[[], bool]) -> None:
    """Wait, throwing away what is still printed: a child must not hang, or die of a closed pipe, while it cleans up."""
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        for stream in (child.stdout, child.stderr):
            if stream is not None and not stream.closed:
                os.set_blocking(stream.fileno(), False)
                with suppress(BlockingIOError):
                    os.read(stream.fileno(), 65536)
        time.sleep(0.01)


def _signal(child: subprocess.Popen[bytes], number: int) -> bool:
    """Signal the group; false when nobody is left in it."""
    try:
        os.killpg(child.pid, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        # It runs as another user by now (sudo); its end is out of our hands.
        return False
    return True


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
