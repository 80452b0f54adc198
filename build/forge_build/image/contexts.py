"""The folders BuildKit is shown: verified files and nothing else of the checkout or the store."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from forge_build.base import Base
from forge_build.fetch import Inputs
from forge_build.lock import LockedWheel


@dataclass(frozen=True)
class BuiltFile:
    """A wheel made here."""

    path: Path
    file: str
    sha256: str


@contextmanager
def contexts(
    inputs: Inputs,
    base: Base,
    locked: Sequence[LockedWheel],
    built: Sequence[BuiltFile],
    stand_ins: Mapping[str, Mapping[str, Path]],
) -> Iterator[tuple[Path, dict[str, Path | str]]]:
    """The main context and the named ones, made of hard links into the store where the disk allows."""
    with tempfile.TemporaryDirectory(prefix="context-", dir=inputs.store.root / "partial") as scratch:
        main, wheels, made, inside = (Path(scratch) / name for name in ("main", "wheels", "built", "inside"))
        for folder in (main, wheels, made, inside):
            folder.mkdir()
        if base.rootfs:
            _link(base.rootfs, main / "rootfs.tar")
        for wheel in locked:
            _link(inputs.path(wheel.sha256), wheels / wheel.file)
        lines = (f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in locked)
        (wheels / "requirements.txt").write_text("".join(lines), encoding="utf-8")
        for own in built:
            _link(own.path, made / own.file)
        lines = (f"./{own.file} --hash=sha256:{own.sha256}\n" for own in built)
        (made / "requirements.txt").write_text("".join(lines), encoding="utf-8")
        for name, files in stand_ins.items():
            for path, source in files.items():
                target = inside / "stand_ins" / name / path
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
        yield main, {"wheels": wheels, "built": made, "inside": inside}


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
