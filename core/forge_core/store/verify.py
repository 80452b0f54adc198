"""`store verify`: hash every object again, delete what is wrong."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from forge_core.console import Step
from forge_core.errors import EnvironmentFailure, IntegrityError
from forge_core.store import Store
from forge_core.store.access import writing
from forge_core.store.names import SHA256


@dataclass(frozen=True)
class Verified:
    """What `verify` saw."""

    objects: int
    size: int
    """Bytes hashed."""
    wrong: tuple[str, ...]
    """One message per object that was deleted."""


def objects(store: Store) -> Iterator[Path]:
    """Every file below `objects/`, strangers included, in a stable order."""
    for folder in sorted((store.root / "objects").iterdir()):
        yield from sorted(folder.iterdir()) if folder.is_dir() else [folder]


def is_object(path: Path) -> bool:
    """Whether a file's name and place are those of an object."""
    return bool(SHA256.fullmatch(path.name)) and path.parent.name == path.name[:2] and path.is_file()


def verify(store: Store, names: Mapping[str, str], step: Step) -> Verified:
    """Hash every object (seconds per GB and core), delete those with other bytes than their name says.

    `names` gives objects a name in messages. What is no object at all is deleted too: nothing could ever use it.
    """
    present = [(path, path.stat().st_size) for path in objects(store) if not path.name.startswith(".")]
    total, done, seen = sum(size for _, size in present), 0, 0
    wrong: list[str] = []

    def look(item: tuple[Path, int]) -> tuple[int, str | None]:
        path, size = item
        if not is_object(path):
            with writing(path):
                if not path.is_dir():
                    path.unlink(missing_ok=True)
            return size, f"{path} is no object"
        try:
            store.get(path.name, names.get(path.name, ""), touch=False)
        except IntegrityError as error:
            return size, error.message
        except EnvironmentFailure:
            if path.exists():
                raise
            return 0, None  # collected meanwhile
        return size, None

    # Hashing releases the interpreter lock.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 2)) as pool:
        for size, message in pool.map(look, present):
            done += size
            seen += 1
            if message:
                wrong.append(message)
            step.progress(done, total, unit="B", note=f"{seen} of {len(present)} objects")
    return Verified(len(present), total, tuple(wrong))
