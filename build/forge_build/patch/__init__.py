"""Patches: a quilt series with DEP-3 headers, applied as commits with a fixed identity: the tree id is stable."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from forge_build.lock import LockedPatch, LockedSource
from forge_build.patch.repository import Checked, Outcome, Repository
from forge_build.patch.series import Patch, read_series, series_folder
from forge_build.patch.unpack import unpack_wheel
from forge_core.errors import IntegrityError, UsageError
from forge_core.model import file_sha256

_BEGINNING = ("the source as it came", "2000-01-01")


@dataclass(frozen=True)
class Dependency:
    """A tree that a source's build takes by name."""

    path: Path
    tree: str
    """Git tree id of what lies there."""


@dataclass(frozen=True)
class PatchedTree:
    """A source tree after its series."""

    name: str
    version: str
    path: Path
    tree: str
    """Git tree id before the series."""
    patched_tree: str
    series: str | None
    patches: tuple[Patch, ...]
    dependencies: Mapping[str, Dependency] = field(default_factory=dict)
    """By CMake's name for each, in lower case: what `FETCHCONTENT_SOURCE_DIR_<NAME>` is to point to."""

    def locked(self) -> tuple[LockedPatch, ...]:
        """The series as a lock names it."""
        return _locked(self.patches)


def apply(
    source: str, version: str, folder: Path, series: Path | None, *, locked: LockedSource | None = None
) -> PatchedTree:
    """Apply a series in place, one commit a patch, and hold every step to the lock where one is given.

    Raises UsageError (2) naming patch, file and hunk of a conflict, the patch that is upstream already or meant for other versions,
    or the patches that changed since the lock; IntegrityError (5) when the source has other bytes than the lock says.
    """
    patches = read_series(series) if series else ()
    name = series.name if series else None
    with Repository(folder) as repository:
        tree = patched = repository.commit_all(*_BEGINNING)
        if locked is not None:
            _compare(source, tree, name, patches, locked)
        for patch in patches:
            checked = repository.check(patch, version)
            if checked.outcome is not Outcome.APPLIES:
                raise UsageError(
                    f"patch {name}/{patch.name} on {source} {version}: {checked.outcome}",
                    hint=_way_out(checked),
                    details=(checked.detail,),
                )
            patched = repository.apply(patch)
    if locked is not None and patched != locked.patched_tree:
        raise IntegrityError(
            f"{source}: after the series the tree is {patched}, the lock says {locked.patched_tree}",
            hint="source and patches are the locked ones, so git did something else; compare its versions",
        )
    return PatchedTree(source, version, folder, tree, patched, name, patches)


def table(version: str, folder: Path, series: Path) -> list[Checked]:
    """What each patch of a series would do to a tree, which is left alone; later patches see the earlier ones."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="patches-") as scratch:
        copy = Path(scratch) / "tree"
        shutil.copytree(folder, copy, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        with Repository(copy) as repository:
            repository.commit_all(*_BEGINNING)
            for patch in read_series(series):
                checked = repository.check(patch, version)
                rows.append(checked)
                if checked.outcome in (Outcome.APPLIES, Outcome.RETIRED):
                    repository.apply(patch)
    return rows


def tree_of(folder: Path) -> str:
    """Git tree id of a folder's content, whatever the user's git is configured to do."""
    with Repository(folder) as repository:
        return repository.commit_all(*_BEGINNING)


def _locked(patches: tuple[Patch, ...]) -> tuple[LockedPatch, ...]:
    return tuple(LockedPatch(file=patch.name, sha256=file_sha256(patch.path)) for patch in patches)


def _compare(source: str, tree: str, series: str | None, patches: tuple[Patch, ...], locked: LockedSource) -> None:
    """The source's bytes first, then the series."""
    if tree != locked.tree:
        raise IntegrityError(f"{source}: the tree is {tree}, the lock says {locked.tree}", hint="nothing was applied")
    found = _locked(patches)
    if (series, found) != (locked.series, locked.patches):
        before = {patch.file: patch.sha256 for patch in locked.patches}
        now = {patch.file: patch.sha256 for patch in found}
        changed = sorted(file for file in before.keys() | now.keys() if before.get(file) != now.get(file))
        raise UsageError(
            f"{source}: the series {series or '(none)'} changed since the lock",
            details=tuple(changed) or ("their order",),
            hint="`nox -s lock` applies and locks it again",
        )


def _way_out(checked: Checked) -> str:
    if checked.outcome is Outcome.CONFLICT:
        return "write the patch anew against this version, or move the source back; the context must match exactly"
    return "retire it: take its line out of `series`, then `nox -s lock`"


__all__ = [
    "Checked",
    "Dependency",
    "Outcome",
    "Patch",
    "PatchedTree",
    "apply",
    "read_series",
    "series_folder",
    "table",
    "tree_of",
    "unpack_wheel",
]
