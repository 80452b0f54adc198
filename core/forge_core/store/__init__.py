"""The store: inputs by sha256 and what we made of them by key, in the user's cache folder, shared by all clones.

Layout below the root:
    objects/ab/abcd...      read-only files named by their sha256; placed by rename, so a name there is a whole file
    derived/KIND/KEY.json   {sha256, meta}: an object that was made here from what KEY hashes
    partial/                downloads under way, resumable, never taken for whole
    locks/                  one lock file per object
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import platformdirs
from filelock import FileLock

from forge_core.errors import EnvironmentFailure, IntegrityError
from forge_core.files import atomic_path, write_text
from forge_core.model import file_sha256

APPLICATION = "sm120-forge"


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
        """The store of `FORGE_STORE`, else of the user's cache folder; raises EnvironmentFailure if not writable."""
        root = Path(os.environ.get("FORGE_STORE") or platformdirs.user_cache_path(APPLICATION)).expanduser().absolute()
        try:
            for name in ("objects", "derived", "partial", "locks"):
                (root / name).mkdir(parents=True, exist_ok=True)
        except (PermissionError, FileExistsError, NotADirectoryError) as error:
            raise EnvironmentFailure(
                f"the store {root} cannot be written: {error}", hint="set FORGE_STORE to a folder of yours"
            ) from error
        return cls(root)

    def path(self, sha256: str) -> Path:
        """Where the object lies or would lie."""
        return self.root / "objects" / sha256[:2] / sha256

    def has(self, sha256: str) -> bool:
        """Whether a whole file is there under that name; its bytes are not verified."""
        return self.path(sha256).is_file()

    def get(self, sha256: str, name: str = "") -> Path:
        """The object's path after its bytes were hashed again.

        Raises EnvironmentFailure when it is missing, IntegrityError when its bytes changed (it is deleted then).
        """
        path = self.path(sha256)
        label = f"{name} ({sha256[:12]})" if name else sha256
        try:
            found = file_sha256(path)
        except FileNotFoundError as error:
            raise EnvironmentFailure(f"{label} is not in the store {self.root}") from error
        if found != sha256:
            path.unlink(missing_ok=True)
            raise IntegrityError(
                f"stored {label} has other bytes: sha256 {found}; it was deleted before anything used it",
                hint="the next run fetches or makes it again; a disk that changes bytes wants attention",
            )
        # Collection spares what was used lately; reading alone does not move a time stamp on most mounts.
        os.utime(path)
        return path

    def add_file(self, source: Path, *, sha256: str | None = None, move: bool = False) -> str:
        """Place a copy of (or move) `source`; returns its sha256.

        Raises IntegrityError when `sha256` is given and differs; `source` is then left alone.
        """
        found = file_sha256(source)
        if sha256 is not None and found != sha256:
            raise IntegrityError(f"{source.name}: sha256 is {found}, expected {sha256}")
        target = self.path(found)
        with self.lock(found):
            if not (target.is_file() and file_sha256(target) == found):
                target.parent.mkdir(exist_ok=True)
                if move and source.stat().st_dev == target.parent.stat().st_dev:
                    with source.open("rb") as stream:
                        os.fsync(stream.fileno())
                    source.chmod(0o444)
                    source.replace(target)
                    return found
                with atomic_path(target, mode=0o444) as aside:
                    shutil.copyfile(source, aside)
        if move:
            source.unlink()
        return found

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold the lock of an object (its sha256) or of any other name, across processes."""
        with FileLock(self.root / "locks" / f"{name}.lock"):
            yield

    def derived_get(self, kind: str, key: str) -> Derived | None:
        """What was made under this key, verified; none when it was not, or when its object was collected."""
        entry = self._entry(kind, key)
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
        write_text(self._entry(kind, key), json.dumps({"sha256": sha256, "meta": meta}, indent=1) + "\n")
        return Derived(self.path(sha256), sha256, meta)

    def note_get(self, kind: str, key: str) -> dict[str, Any] | None:
        """What `note_put` left under this key; none when there is nothing, or nothing readable."""
        try:
            found = json.loads(self._entry(kind, key).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def note_put(self, kind: str, key: str, facts: dict[str, Any]) -> None:
        """Remember facts that were established under this key; unlike a derived object they name no bytes."""
        write_text(self._entry(kind, key), json.dumps(facts, indent=1) + "\n")

    @contextmanager
    def derived_lock(self, kind: str, key: str) -> Iterator[None]:
        """Hold while looking for and making a derived object, so that two builds do not make the same thing twice."""
        with self.lock(f"{kind}-{key}"):
            yield

    def _entry(self, kind: str, key: str) -> Path:
        return self.root / "derived" / kind / f"{key}.json"


def sha256_of_text(text: str) -> str:
    """Sha256 (hex) of a text's UTF-8 bytes."""
    return hashlib.sha256(text.encode()).hexdigest()
