"""The store: inputs by sha256 and what we made of them by key, in the user's cache folder, shared by all clones.

Layout below the root:
    objects/ab/abcd...      read-only files named by their sha256; placed by rename, so a name there is a whole file
    derived/KIND/KEY.json   {sha256, meta}: an object that was made here from what KEY hashes; or a note: facts alone
    partial/                downloads under way and scratch folders, never taken for whole
    locks/                  one lock file per object, and `in-use`, which every process that opened the store shares
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import platformdirs
from filelock import FileLock, Timeout

from forge_core.errors import EnvironmentFailure, IntegrityError
from forge_core.files import write_text
from forge_core.model import file_sha256
from forge_core.store.access import hold, writing

APPLICATION = "sm120-forge"
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Derived:
    """Something made here: an object and what is known about it."""

    path: Path
    sha256: str
    meta: dict[str, Any]


@dataclass(frozen=True)
class Store:
    """A content-addressed store below `root`. Safe for concurrent builds: objects appear whole or not at all."""

    root: Path

    @classmethod
    def open(cls) -> Self:
        """The store of `FORGE_STORE`, else of the user's cache folder; held as in use until the process ends.

        Raises EnvironmentFailure if it cannot be written.
        """
        root = Path(os.environ.get("FORGE_STORE") or platformdirs.user_cache_path(APPLICATION)).expanduser().absolute()
        try:
            with writing(root):
                for name in ("objects", "derived", "partial", "locks"):
                    (root / name).mkdir(parents=True, exist_ok=True)
                hold(root)
        except (FileExistsError, NotADirectoryError) as error:
            raise EnvironmentFailure(
                f"the store {root} is no folder: {error}", hint="set FORGE_STORE to a folder of yours"
            ) from error
        return cls(root)

    def path(self, sha256: str) -> Path:
        """Where the object lies or would lie."""
        return self.root / "objects" / sha256[:2] / sha256

    def has(self, sha256: str) -> bool:
        """Whether a whole file is there under that name; its bytes are not verified."""
        return self.path(sha256).is_file()

    def get(self, sha256: str, name: str = "", *, touch: bool = True) -> Path:
        """The object's path after its bytes were hashed again.

        Raises EnvironmentFailure when it is missing, IntegrityError when its bytes changed (it is deleted then).
        `touch` marks it as used now, for the collection.
        """
        path = self.path(sha256)
        label = f"{name} ({sha256[:12]})" if name else sha256
        try:
            found = _readable_sha256(path)
            if found != sha256:
                # Under the lock, and once more: another process may just have put the right bytes there.
                with self.lock(sha256):
                    found = _readable_sha256(path)
                    if found != sha256:
                        with writing(path):
                            path.unlink()
            if found == sha256 and touch:
                # Reading alone does not move a time stamp on most mounts. Not ours to touch: then not ours to collect.
                with suppress(PermissionError):
                    os.utime(path)
        except FileNotFoundError as error:
            raise EnvironmentFailure(
                f"{label} is not in the store {self.root}",
                hint="run once online, or `python -m forge_core store import`",
            ) from error
        if found != sha256:
            raise IntegrityError(
                f"stored {label} has other bytes: sha256 {found}; it was deleted before anything used it",
                hint="the next run fetches or makes it again; a disk that changes bytes wants attention",
            )
        return path

    def add_file(self, source: Path, *, sha256: str | None = None, move: bool = False, name: str = "") -> str:
        """Place a copy of (or move) `source`; returns its sha256.

        Raises IntegrityError when `sha256` is given and differs (`source` is then left alone), EnvironmentFailure when
        the disk is full or the store is not ours to write.
        """
        with writing(self.root):
            if move and not source.is_symlink() and source.stat().st_dev == self.root.stat().st_dev:
                found = file_sha256(source)
                _same(found, sha256, name or source.name)
                self._place(source, found)
                return found
            handle, aside = tempfile.mkstemp(dir=self.root / "partial", prefix="add-")
            try:
                # Hashed as copied: the source may change between one reading and another.
                hasher = hashlib.sha256()
                with source.open("rb") as reader, os.fdopen(handle, "wb") as writer:
                    while chunk := reader.read(_CHUNK):
                        hasher.update(chunk)
                        writer.write(chunk)
                found = hasher.hexdigest()
                _same(found, sha256, name or source.name)
                self._place(Path(aside), found)
            finally:
                Path(aside).unlink(missing_ok=True)
            if move:
                source.unlink()
            return found

    def _place(self, whole: Path, sha256: str) -> None:
        """Rename a file of known bytes to its name; over an object of that name, which may have gone bad."""
        target = self.path(sha256)
        target.parent.mkdir(exist_ok=True)
        whole.chmod(0o444)
        # What was made here may carry the build's clamped time stamp; for the collection it is new.
        os.utime(whole)
        with whole.open("rb") as stream:
            os.fsync(stream.fileno())
        with self.lock(sha256):
            whole.replace(target)

    @contextmanager
    def lock(self, name: str, *, waiting: Callable[[], None] | None = None) -> Iterator[None]:
        """Hold the lock of an object (its sha256) or of any other name, across processes and threads.

        `waiting` is called about five times a second while somebody else holds it; what it raises ends the wait.
        """
        place = self.root / "locks" / f"{name}.lock"
        lock = FileLock(place)
        while True:
            try:
                with writing(place):
                    lock.acquire(timeout=-1 if waiting is None else 0.2)
                break
            except Timeout:
                assert waiting is not None
                waiting()
        try:
            yield
        finally:
            lock.release()

    def derived_get(self, kind: str, key: str) -> Derived | None:
        """What was made under this key, verified; none when it was not, or when its object was collected."""
        entry = self.entry(kind, key)
        try:
            data = json.loads(entry.read_text(encoding="utf-8"))
            sha256, meta = str(data["sha256"]), dict(data["meta"])
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            entry.unlink(missing_ok=True)
            raise IntegrityError(f"{entry} is no derived entry; it was deleted", hint="run again") from error
        if not self.has(sha256):
            return None
        return Derived(self.get(sha256, f"{kind} {key[:12]}"), sha256, meta)

    def derived_put(self, kind: str, key: str, path: Path, meta: dict[str, Any], *, move: bool = False) -> Derived:
        """Place `path` as an object and remember that `key` led to it."""
        sha256 = self.add_file(path, move=move)
        entry = self.entry(kind, key)
        with writing(entry):
            write_text(entry, json.dumps({"sha256": sha256, "meta": meta}, indent=1) + "\n")
        return Derived(self.path(sha256), sha256, meta)

    def note_get(self, kind: str, key: str) -> dict[str, Any] | None:
        """What `note_put` left under this key; none when there is nothing, or nothing readable."""
        entry = self.entry(kind, key)
        try:
            found = json.loads(entry.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        with suppress(OSError):
            os.utime(entry)
        return found if isinstance(found, dict) else None

    def note_put(self, kind: str, key: str, facts: dict[str, Any]) -> None:
        """Remember facts that were established under this key; unlike a derived object they name no bytes."""
        entry = self.entry(kind, key)
        with writing(entry):
            write_text(entry, json.dumps(facts, indent=1) + "\n")

    @contextmanager
    def derived_lock(self, kind: str, key: str, *, waiting: Callable[[], None] | None = None) -> Iterator[None]:
        """Hold while looking for and making a derived object, so that two builds do not make the same thing twice."""
        with self.lock(f"{kind}-{key}", waiting=waiting):
            yield

    def entry(self, kind: str, key: str) -> Path:
        """Where the entry of a derived object or a note lies or would lie."""
        return self.root / "derived" / kind / f"{key}.json"


def sha256_of_text(text: str) -> str:
    """Sha256 (hex) of a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode()).hexdigest()


def _readable_sha256(path: Path) -> str:
    """Sha256 (hex), or a word that no sha256 equals when the disk cannot give the bytes back."""
    try:
        return file_sha256(path)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return "unreadable"


def _same(found: str, expected: str | None, name: str) -> None:
    if expected is not None and found != expected:
        raise IntegrityError(f"{name}: sha256 is {found}, expected {expected}")
