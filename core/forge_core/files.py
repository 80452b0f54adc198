"""Half-written stays invisible: write aside, sync, rename."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def atomic_path(target: Path, *, mode: int = 0o644) -> Iterator[Path]:
    """Yield a path beside `target`; at a clean end it is synced and renamed over `target`, otherwise removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    aside = Path(name)
    try:
        yield aside
        aside.chmod(mode)
        with aside.open("rb") as stream:
            os.fsync(stream.fileno())
        aside.replace(target)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target`; at a clean end it takes `target`'s place, otherwise it is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        yield aside
        aside.chmod(0o755)
        _take_place(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _take_place(aside: Path, target: Path) -> None:
    """Rename a folder over another: the old one is moved away whole first, so none is ever seen half deleted."""
    if not target.exists():
        aside.replace(target)
        return
    old = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.")) / target.name
    try:
        target.replace(old)
        try:
            aside.replace(target)
        except BaseException:
            old.replace(target)
            raise
    finally:
        shutil.rmtree(old.parent, ignore_errors=True)


def write_text(target: Path, text: str) -> None:
    """Write a text file atomically (UTF-8)."""
    with atomic_path(target) as aside:
        aside.write_text(text, encoding="utf-8")
