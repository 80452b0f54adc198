"""Source trees from git: each lies in the store as one archive, known by its tree id, which is computed anew at every use."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_build.fetch.git import archive
from forge_build.fetch.git.clone import Clone
from forge_build.lock import Lock
from forge_build.manifest import Manifest
from forge_core.console import Console, Step, size
from forge_core.errors import EnvironmentFailure, IntegrityError, UsageError
from forge_core.model import Deviation
from forge_core.store import Derived, Store
from forge_core.store.names import TREE


@dataclass(frozen=True)
class Wanted:
    """One tree that a lock names."""

    name: str
    """`SOURCE` or `SOURCE/DEPENDENCY`."""
    url: str
    commit: str
    tree: str
    """Git tree id of what is taken."""
    root: str | None = None
    """Git tree id of the whole commit, where the lock names it."""
    subfolder: str | None = None
    paths: tuple[str, ...] = ()
    """What is taken of the commit; none: all of it."""


def wanted(lock: Lock) -> tuple[Wanted, ...]:
    """Every tree from git that a lock names: sources, and what their builds take by name."""
    found = []
    for name, source in lock.sources.items():
        if source.commit is None or source.url is None:
            continue
        found.append(Wanted(name, source.url, source.commit, source.tree, subfolder=source.subfolder))
        for part, item in source.dependencies.items():
            if item.commit is not None and item.taken is not None:
                found.append(Wanted(f"{name}/{part}", item.url, item.commit, item.taken, item.tree, None, item.paths))
    return tuple(found)


def unlocked(manifest: Manifest, lock: Lock) -> tuple[Deviation, ...]:
    """Dependencies that the lock could not name; raises UsageError in production, which builds from locked inputs alone."""
    found = tuple(
        Deviation(kind="unlocked", subject=f"{name}/{part}", detail=item.unlocked)
        for name, source in lock.sources.items()
        for part, item in source.dependencies.items()
        if item.unlocked is not None
    )
    if found and manifest.kind == "production":
        raise UsageError(
            f"{manifest.profile}: {len(found)} dependencies are unlocked; production builds from locked inputs alone",
            details=tuple(f"{d.subject}: {d.detail}" for d in found),
            hint=f"`nox -s lock -- --profile {manifest.profile} --mirror FOLDER` where a clone below FOLDER has the commit;"
            " or drop it by a patch and say so in the manifest (`needed: false`)",
        )
    return found


def sources(lock: Lock, store: Store, *, offline: bool, mirrors: Sequence[Path], console: Console) -> dict[str, str]:
    """Bring what is missing and verify what is there; returns the tree id of each by name.

    Raises IntegrityError (5) when an archive, or what a repository gives, has another tree than the lock says;
    EnvironmentFailure (3) when a repository does not answer, or with `offline` when something is missing.
    """
    items = wanted(lock)
    if not items:
        return {}
    with console.step("sources", f"{len(items)} trees from git in the store, verified") as step:
        missing, amount = [], 0
        for number, item in enumerate(items):
            step.progress(number, len(items), unit="trees", note=item.name)
            if (made := known(item.tree, item.name, store)) is None:
                missing.append(item)
            else:
                amount += made.path.stat().st_size
        if missing and offline:
            raise EnvironmentFailure(
                f"--offline, and {len(missing)} of {len(items)} source trees are not in {store.root}",
                hint="run once online, or `python -m forge_core store import FOLDER` from a machine that has them",
                details=tuple(f"{item.name} (tree {item.tree[:12]})" for item in missing),
            )
        for item in missing:
            amount += bring(item, store, mirrors, step).path.stat().st_size
        step.result(f"{len(items)} trees, {size(amount)}, {len(missing)} were missing")
    return {item.name: item.tree for item in items}


def known(tree: str, name: str, store: Store) -> Derived | None:
    """The archive of a tree, hashed as a file and as a tree; none when the store has none.

    Raises IntegrityError, and forgets the archive, when it holds another tree.
    """
    made = store.derived_get(TREE, tree)
    if made is None:
        return None
    try:
        _hold(made.path, tree, name)
    except IntegrityError:
        store.entry(TREE, tree).unlink(missing_ok=True)
        raise
    return made


def bring(item: Wanted, store: Store, mirrors: Sequence[Path], step: Step) -> Derived:
    """Take a tree from a mirror's clone or from its address into the store; raises as `sources`."""
    with store.derived_lock(TREE, item.tree, waiting=step.waiting_for_another):
        if (made := known(item.tree, item.name, store)) is not None:
            return made
        with tempfile.TemporaryDirectory(prefix="git-", dir=store.root / "partial") as scratch:
            place = Path(scratch) / "clone"
            clone = Clone.fetch(item.url, item.commit, place, mirrors=mirrors, step=step, name=item.name)
            if item.root is not None and clone.root != item.root:
                raise IntegrityError(
                    f"{item.name}: commit {item.commit[:12]} has the tree {clone.root}, the lock says {item.root}"
                )
            found = clone.taken(item.paths) if item.paths else clone.tree(item.subfolder)
            if found != item.tree:
                raise IntegrityError(
                    f"{item.name}: what is taken of {item.commit[:12]} has the tree {found}, the lock says {item.tree}"
                )
            folder = clone.check_out(item.tree, Path(scratch) / "tree")
            return keep(item.name, item.tree, folder, store, step)


def keep(name: str, tree: str, folder: Path, store: Store, step: Step) -> Derived:
    """Put a checked-out tree into the store; raises IntegrityError when its files do not give the tree id."""
    with tempfile.TemporaryDirectory(prefix="tree-", dir=store.root / "partial") as scratch:
        packed = Path(scratch) / "tree.tar"
        pointers = archive.pack(folder, packed)
        _hold(packed, tree, name)
        if pointers:
            shown = ", ".join(pointers[:3]) + (", ..." if len(pointers) > 3 else "")
            step.say(f"note: {name}: {len(pointers)} files are Git LFS pointers, not what they point to: {shown}")
        return store.derived_put(TREE, tree, packed, {"name": name}, move=True)


def unpack(tree: str, name: str, store: Store, into: Path) -> Path:
    """Write a tree's files into the new folder `into`, after its id was computed from the archive's bytes again.

    Raises IntegrityError when it differs, EnvironmentFailure when the store does not have it (any more).
    """
    made = known(tree, name, store)
    if made is None:
        raise EnvironmentFailure(f"{name} (tree {tree[:12]}) is not in the store {store.root}", hint="run it again")
    archive.unpack(made.path, into)
    return into


def _hold(packed: Path, tree: str, name: str) -> None:
    found = archive.tree_id(packed)
    if found != tree:
        raise IntegrityError(
            f"{name}: the archive holds the tree {found}, the lock says {tree}; nothing used it",
            hint="the next run brings it again; a disk that changes bytes wants attention",
        )


__all__ = ["Clone", "Wanted", "bring", "keep", "known", "sources", "unlocked", "unpack", "wanted"]
