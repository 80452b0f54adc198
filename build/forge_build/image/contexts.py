"""The folders BuildKit is shown: verified files and nothing else of the checkout or the store."""

from __future__ import annotations

import os
import re
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


GROUPS = {
    # NVIDIA's libraries change with CUDA, torch with its release, all the rest with SGLang
    "vendor": re.compile(r"(?:nvidia|cuda)-.*|pip"),
    "torch": re.compile(r"torch|torch-c-dlpack-ext|torchvision|torchaudio|triton|flashinfer-cubin"),
    "wheels": re.compile(r".*"),
}
"""The runtime stage's contexts of locked wheels, each installed into a layer of its own: name -> which distributions."""


def grouped(locked: Sequence[LockedWheel]) -> dict[str, list[LockedWheel]]:
    """The wheels of each group; one belongs to the first that takes its name."""
    found: dict[str, list[LockedWheel]] = {group: [] for group in GROUPS}
    for wheel in locked:
        found[next(group for group, names in GROUPS.items() if names.fullmatch(wheel.name))].append(wheel)
    return found


@contextmanager
def contexts(
    inputs: Inputs,
    base: Base,
    locked: Mapping[str, Sequence[LockedWheel]],
    built: Sequence[BuiltFile],
    stand_ins: Mapping[str, Mapping[str, Path]],
    scripts: Mapping[str, Path],
) -> Iterator[tuple[Path, dict[str, Path | str]]]:
    """The main context and the named ones, made of hard links into the store where the disk allows.

    `locked` are the wheels of each context that has some.
    """
    with tempfile.TemporaryDirectory(prefix="context-", dir=inputs.store.root / "partial") as scratch:
        folders = {name: Path(scratch) / name for name in ("main", *locked, "built", "inside")}
        for folder in folders.values():
            folder.mkdir()
        main, made, inside = folders.pop("main"), folders["built"], folders["inside"]
        if base.rootfs:
            _link(base.rootfs, main / "rootfs.tar")
        for name, wheels in locked.items():
            for wheel in wheels:
                _link(inputs.path(wheel.sha256), folders[name] / wheel.file)
            lines = (f"{wheel.name}=={wheel.version} --hash=sha256:{wheel.sha256}\n" for wheel in wheels)
            (folders[name] / "requirements.txt").write_text("".join(lines), encoding="utf-8")
        for own in built:
            _link(own.path, made / own.file)
        lines = (f"./{own.file} --hash=sha256:{own.sha256}\n" for own in built)
        (made / "requirements.txt").write_text("".join(lines), encoding="utf-8")
        for name, files in stand_ins.items():
            for path, source in files.items():
                target = inside / "stand_ins" / name / path
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)
        for name, source in scripts.items():
            shutil.copyfile(source, inside / name)
        yield main, dict(folders)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
