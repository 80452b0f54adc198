"""Who is at the store: a lock shared by all who use it and taken alone by the collection; errors of those kept out."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forge_core.cli import disk_full
from forge_core.errors import EnvironmentFailure

# One descriptor per store, kept until the process ends: the kernel gives the lock back however that happens.
_HELD: dict[Path, int] = {}


def hold(root: Path) -> int:
    """Mark the store as in use by this process until it ends; waits while a collection runs (seconds)."""
    if root not in _HELD:
        descriptor = os.open(root / "locks" / "in-use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        _HELD[root] = descriptor
    return _HELD[root]


class InUse(EnvironmentFailure):
    """Other processes use the store."""


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Be the only process at the store; raises InUse when another one uses it."""
    descriptor = hold(root)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        # a conversion that fails may have given the shared lock up
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        who = ", ".join(map(str, _holders(descriptor))) or "unknown"
        raise InUse(
            f"the store {root} is in use (processes: {who})", hint="run it again when the builds there have ended"
        ) from error
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_SH)


def _holders(descriptor: int) -> list[int]:
    """Process ids that hold the lock, as far as the kernel shows them to us."""
    inode = os.fstat(descriptor).st_ino
    found = set()
    with suppress(OSError):
        for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
            # 1: FLOCK  ADVISORY  READ 4711 fe:00:131090 0 EOF
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5].rsplit(":", 1)[-1] == str(inode):
                found.add(int(fields[4]))
    return sorted(found - {os.getpid(), 0, -1})


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Turn what a full disk or a foreign owner makes the system raise into an EnvironmentFailure that names the place."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            # a failed write() names no file
            raise disk_full(OSError(error.errno, error.strerror, str(place))) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise EnvironmentFailure(
                f"{place} cannot be written by user {os.geteuid()}{_owner(place)}: {error}",
                hint="set FORGE_STORE to a folder of yours, or give the store back to its owner with chown",
            ) from error
        raise


def _owner(place: Path) -> str:
    for folder in (place, *place.parents):
        with suppress(OSError):
            return f" ({folder} belongs to user {folder.stat().st_uid})"
    return ""
