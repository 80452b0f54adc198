"""The shared objects of a set of wheels and folders, found by file name and read only when something asks for them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from forge_build.wheel_check import elf
from forge_build.wheel_check.archive import SHARED_OBJECT, opened
from forge_core.errors import EnvironmentFailure, IntegrityError


@dataclass(frozen=True)
class _Place:
    """Where a library lies: a member of a wheel, or a plain file (no member)."""

    file: Path
    member: str | None


class Environment:
    """What is installed beside the wheel under check.

    `paths` are wheel files (under any name: a store names them by sha256) or folders, whose wheel files and libraries
    count; `more` brings further wheels for a library that none of them has. Raises EnvironmentFailure when one is missing,
    IntegrityError when a wheel is damaged.
    """

    def __init__(
        self, paths: Sequence[Path], folder: Path, more: Callable[[str], Sequence[Path]] = lambda soname: ()
    ) -> None:
        self._folder = folder
        self._more = more
        self._read: dict[str, elf.Elf | None] = {}
        self._places: dict[str, _Place] = {}
        for path in paths:
            if path.is_dir():
                self._scan(path)
            elif path.is_file():
                self._list(path)
            else:
                raise EnvironmentFailure(f"{path}, of the environment the wheel is held against, does not exist")

    def has(self, soname: str) -> bool:
        """Whether something provides a library of this name; libraries are found by file name, as the loader does."""
        if soname not in self._places:
            for wheel in self._more(soname):
                self._list(wheel)
        return soname in self._places

    def library(self, soname: str) -> elf.Elf | None:
        """Read a library once; none where nothing provides it."""
        if soname not in self._read:
            place = self._places[soname] if self.has(soname) else None
            self._read[soname] = self._load(soname, place) if place else None
        return self._read[soname]

    def closure(self, sonames: Sequence[str]) -> Iterator[elf.Elf]:
        """These libraries and, breadth first, what they need in turn: the loader's own order of search."""
        queue, seen = list(sonames), set(sonames)
        while queue:
            library = self.library(queue.pop(0))
            if library is None:
                continue
            yield library
            fresh = [name for name in library.needed if name not in seen]
            seen.update(fresh)
            queue.extend(fresh)

    def _scan(self, folder: Path) -> None:
        for path in sorted(folder.rglob("*")):
            if path.suffix == ".whl" and path.is_file():
                self._list(path)
            elif SHARED_OBJECT.search(path.name) and path.is_file():
                self._places.setdefault(path.name, _Place(path, None))

    def _list(self, wheel: Path) -> None:
        with opened(wheel, locked=True) as archive:
            for member in archive.namelist():
                name = PurePosixPath(member).name
                if SHARED_OBJECT.search(name):
                    self._places.setdefault(name, _Place(wheel, member))

    def _load(self, soname: str, place: _Place) -> elf.Elf:
        path = place.file
        try:
            if place.member is None:
                return elf.read(path)
            # Libraries of hundreds of MB are read once and need not stay.
            path = self._folder / soname
            with (
                opened(place.file, locked=True) as archive,
                archive.open(place.member) as source,
                path.open("wb") as target,
            ):
                shutil.copyfileobj(source, target, 1 << 20)
            try:
                return elf.read(path)
            finally:
                path.unlink()
        except elf.BrokenObject as error:
            raise IntegrityError(f"{soname} of {place.file.name} is {error}", hint="fetch it again") from error
