"""Mirrors: folders with clones somewhere below. Only their objects are read, never their settings, refs or hooks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from forge_build.fetch.git.command import git, init
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


class Heap:
    """The objects of a clone on this machine, lent to a scratch repository: none of its other files is opened."""

    def __init__(self, place: Path, scratch: Path) -> None:
        """Use the git directory `place` through the folder `scratch`, which is made anew."""
        shutil.rmtree(scratch, ignore_errors=True)
        init(scratch)
        (scratch / "objects/info").mkdir(exist_ok=True)
        (scratch / "objects/info/alternates").write_text(f"{place / 'objects'}\n", encoding="utf-8")
        self._scratch = scratch

    def trees(self, commit: str) -> list[str] | None:
        """Ids of a commit and all its trees; none when the commit or one of them is not there."""
        if git(self._scratch, "cat-file", "-t", commit, check=False).stdout.strip() != "commit":
            return None
        root = git(self._scratch, "rev-parse", "--verify", "--quiet", f"{commit}^{{tree}}", check=False)
        listed = git(self._scratch, "ls-tree", "-r", "-d", root.stdout.strip(), check=False)
        if root.returncode or listed.returncode:
            return None
        rows = [line.split() for line in listed.stdout.splitlines()]
        return [commit, root.stdout.strip(), *(row[2] for row in rows if row[1] == "tree")]

    def carry(self, oids: Iterable[str], into: Path) -> bool:
        """Pack objects and index the pack in the bare repository `into`: that names each by the hash of its bytes.

        False when one of them is not there under its right name afterwards.
        """
        wanted = sorted(set(oids))
        if not wanted:
            return True
        listed = "".join(f"{oid}\n" for oid in wanted).encode()
        options = ("--quiet", "--window=0", "--compression=1")
        packed = git(self._scratch, "pack-objects", *options, self._scratch / "out", check=False, stdin=listed)
        if packed.returncode:
            return False
        name = packed.stdout.strip()
        pack = into / f"objects/pack/pack-{name}.pack"
        (self._scratch / f"out-{name}.pack").replace(pack)
        if git(into, "index-pack", pack, check=False).returncode:
            pack.unlink()
            return False
        found = git(into, "cat-file", "--batch-check=%(objectname)", stdin=listed).stdout.split("\n")
        return not any(line.endswith(" missing") for line in found)


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
