"""`store gc`: drop what neither this checkout's locks name nor anybody used lately."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_core.store import Store
from forge_core.store.access import InUse, alone, writing
from forge_core.store.names import SHA256, Named, moves
from forge_core.store.verify import is_object, objects

_LOCK_OF_ONE_THING = re.compile(r"(?:[a-z-]+-)?(?:[0-9a-f]{40}|[0-9a-f]{64})\.lock")
_DAY_S = 86400


@dataclass(frozen=True)
class Collected:
    """What `collect` dropped, or would drop."""

    objects: int
    object_bytes: int
    entries: int
    """Derived entries and notes."""
    partials: int
    partial_bytes: int
    kept: int
    """Objects that stay."""
    kept_bytes: int

    @property
    def freed(self) -> int:
        """Bytes."""
        return self.object_bytes + self.partial_bytes


def collect(store: Store, named: Mapping[str, Named], *, older_than_days: float, dry_run: bool = False) -> Collected:
    """Drop objects that `named` does not hold and nobody used for so many days, what was derived to them, stale partials.

    Every use of an object touches it, so what another clone builds with stays for that long. Raises EnvironmentFailure
    when another process uses the store: its build may rely on what it has verified.
    """
    cutoff = time.time() - older_than_days * _DAY_S
    try:
        with alone(store.root), writing(store.root):
            return _collect(store, named, cutoff, dry_run=dry_run)
    except InUse:
        if not dry_run:
            raise
        return _collect(store, named, cutoff, dry_run=True, in_use=True)


def _collect(
    store: Store, named: Mapping[str, Named], cutoff: float, *, dry_run: bool, in_use: bool = False
) -> Collected:
    keep = set(named)
    notes_in_force = set()
    for note, pairs in moves(store).items():
        # What stands in for a locked package is needed as the package itself would be.
        if in_force := [now.sha256 for locked, now in pairs if locked.sha256 in named]:
            keep.update(in_force)
            notes_in_force.add(note)

    dropped, kept = _Tally(), _Tally()
    gone: set[str] = set()
    for path in list(objects(store)):
        if is_object(path):
            state = path.stat()
            if path.name in keep or state.st_mtime > cutoff:
                kept.add(state.st_size)
                continue
            gone.add(path.name)
        dropped.add(_drop([path], dry_run))

    stale = []
    for entry in (store.root / "derived").glob("*/*"):
        sha256 = _object_of(entry)
        if entry in notes_in_force or (sha256 is None and entry.suffix == ".json" and entry.stat().st_mtime > cutoff):
            continue
        if sha256 is None or sha256 in gone or not store.has(sha256):
            stale.append(entry)
    _drop(stale, dry_run)

    # With nobody else here, a scratch folder was left by a build that was killed. A download may be resumed.
    partials = [
        path
        for path in (store.root / "partial").iterdir()
        if not (in_use or (SHA256.fullmatch(path.name) and (path.name in keep or path.stat().st_mtime > cutoff)))
    ]
    partial_bytes = _drop(partials, dry_run)
    if not dry_run:
        for lock in (store.root / "locks").iterdir():
            if _LOCK_OF_ONE_THING.fullmatch(lock.name):
                lock.unlink()
        for folder in (store.root / "objects").iterdir():
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
    return Collected(dropped.count, dropped.size, len(stale), len(partials), partial_bytes, kept.count, kept.size)


class _Tally:
    def __init__(self) -> None:
        self.count = self.size = 0

    def add(self, size: int) -> None:
        self.count += 1
        self.size += size


def _object_of(entry: Path) -> str | None:
    """The sha256 that an entry leads to; none for a note or something unreadable."""
    try:
        data = json.loads(entry.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data["sha256"] if isinstance(data, dict) and isinstance(data.get("sha256"), str) else None


def _drop(paths: Sequence[Path], dry_run: bool) -> int:
    """Delete files and folders; returns their bytes."""
    total = 0
    for path in paths:
        folder = path.is_dir() and not path.is_symlink()
        files = [path, *path.rglob("*")] if folder else [path]
        total += sum(file.lstat().st_size for file in files if file.is_symlink() or not file.is_dir())
        if not dry_run:
            if folder:
                shutil.rmtree(path)
            else:
                path.unlink()
    return total
