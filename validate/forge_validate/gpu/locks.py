"""One lock per GPU and host: two validations never share a GPU, whoever runs them and from whichever checkout."""

from __future__ import annotations

import getpass
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from forge_core.console import Console
from forge_core.errors import EnvironmentFailure
from forge_validate.gpu.inventory import Gpu

_FOLDER = "sm120-forge"


@contextmanager
def held(gpus: Sequence[Gpu], console: Console) -> Iterator[None]:
    """Hold every GPU's lock for the block; without GPUs nothing is locked.

    Raises EnvironmentFailure (3) at once, naming the holder, when another process holds one. The kernel frees the locks
    of a process that died.
    """
    if not gpus:
        yield
        return
    folder = lock_folder()
    with ExitStack() as stack:
        # Everyone takes them in one order, so two that want the same GPUs cannot each hold one of them.
        for gpu in sorted(gpus, key=lambda gpu: gpu.uuid):
            stack.enter_context(_one(folder, gpu))
        if console.verbose:
            console.say(f"holding {', '.join(map(str, gpus))}; locks in {folder}")
        yield


def lock_folder() -> Path:
    """Where the locks lie: FORGE_LOCKS, else one place that all users of the host agree on without asking.

    Raises EnvironmentFailure (3) when it cannot be made.
    """
    given = os.environ.get("FORGE_LOCKS")
    folder = Path(given) if given else _shared() / _FOLDER
    try:
        folder.mkdir(parents=bool(given))
        # As /tmp: everyone may add a lock, nobody may remove another's.
        folder.chmod(0o1777)
    except FileExistsError:
        if not folder.is_dir() or (not given and folder.is_symlink()):
            raise _no_locks(folder, "it is no folder") from None
    except OSError as error:
        raise _no_locks(folder, error.strerror or str(error)) from error
    return folder


def _shared() -> Path:
    """A rule about the host, never about the user: root and a user must not choose different places."""
    run = Path("/run/lock")
    with suppress(OSError):
        if run.stat().st_mode & stat.S_IWOTH:
            return run
    # Not TMPDIR, which may be a user's own.
    return Path("/tmp")  # noqa: S108


@contextmanager
def _one(folder: Path, gpu: Gpu) -> Iterator[None]:
    path = folder / f"{gpu.uuid}.lock"
    # Readable and writable for all: a lock file outlives its maker, and the next user must be able to open it.
    lock = FileLock(path, timeout=0, mode=0o666, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise EnvironmentFailure(
            f"{gpu} is in use by another validation: {_holder(path)}",
            hint="wait for it to end, or name other GPUs in the serving; a dead process holds no lock",
        ) from error
    except OSError as error:
        raise _no_locks(path, error.strerror or str(error)) from error
    try:
        _sign(path, f"process {os.getpid()} of {_user()} since {datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC")
        yield
    finally:
        _sign(path, "")
        lock.release()


def _sign(path: Path, text: str) -> None:
    """Write who holds the lock into its file, which only the holder writes. Nothing depends on it but a message."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)


def _holder(path: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        if text := path.read_text(encoding="utf-8").strip():
            return text
    return f"it has not said which; see {path}"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.geteuid()}"


def _no_locks(place: Path, why: str) -> EnvironmentFailure:
    return EnvironmentFailure(
        f"GPUs cannot be locked at {place}: {why}",
        hint="set FORGE_LOCKS to a folder that all who use the GPUs may write to",
    )
