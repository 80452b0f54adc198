"""Mirrors: folders with clones somewhere below. Only their objects are read, never their settings, refs or hooks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from forge_core.errors import UsageError

_DEEPEST = 6


def repositories(folders: Sequence[Path]) -> tuple[Path, ...]:
    """Every git directory below the folders (bare, or the `.git` of a work tree), in a stable order.

    Raises UsageError for what is no folder, and for a folder that holds none: a mirror that is named is meant.
    """
    found: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"--mirror {folder} is no folder")
        below = sorted(_below(folder.resolve(), 0))
        if not below:
            raise UsageError(
                f"--mirror {folder}: there is no git directory in it",
                hint="`git clone --mirror ADDRESS` into it makes one",
            )
        found += below
    return tuple(dict.fromkeys(found))


def _below(folder: Path, depth: int) -> Iterator[Path]:
    if _is_repository(folder):
        yield folder
    elif _is_repository(folder / ".git"):
        yield folder / ".git"
    elif depth < _DEEPEST and os.access(folder, os.R_OK | os.X_OK):
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False) and "\n" not in entry.path:
                yield from _below(Path(entry.path), depth + 1)


def _is_repository(folder: Path) -> bool:
    return (
        (folder / "HEAD").is_file()
        and (folder / "objects").is_dir()
        and ((folder / "refs").is_dir() or (folder / "packed-refs").is_file())
    )
