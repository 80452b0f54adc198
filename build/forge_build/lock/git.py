"""A source from git: its tree, and a tree for everything that its CMake files would fetch."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from forge_build import patch
from forge_build.fetch import git
from forge_build.fetch.git.clone import Clone
from forge_build.fetch.git.command import NoSuchCommit, Unanswered, commit_of_tag
from forge_build.lock import LockedDependency, LockedSource
from forge_build.lock.cmake import Declaration, declarations
from forge_build.manifest import GitDependency, GitSource, Source
from forge_core.console import Step
from forge_core.errors import UsageError
from forge_core.store import Store


def lock(
    name: str, source: Source, previous: LockedSource | None, store: Store, mirrors: Sequence[Path], step: Step
) -> LockedSource:
    """Lock a source's commit, tree and patched tree, and its dependencies; its files go into the store.

    `previous` keeps what its tags named, and what cannot be had now. Raises UsageError when manifest and tree disagree
    about the dependencies, when a path, a commit or a folder does not exist, or when a patch does not apply;
    EnvironmentFailure when the repository does not answer.
    """
    wanted = source.git
    assert wanted is not None
    with tempfile.TemporaryDirectory(prefix="source-") as scratch:
        tree, folder = _source(name, wanted, previous, store, mirrors, step, Path(scratch))
        compare(f"sources.{name}.git.dependencies", _own(wanted), declarations(folder))
        dependencies = {}
        for part, item in wanted.dependencies.items():
            kept = previous.dependencies.get(part) if previous else None
            inner = {n: d for n, d in wanted.dependencies.items() if d.of == part}
            dependencies[part] = _dependency(f"{name}/{part}", item, kept, inner, mirrors, step)
        patched = patch.apply(name, wanted.version, folder, patch.series_folder(name, source.series))
    return LockedSource(
        url=wanted.url,
        commit=wanted.commit,
        subfolder=wanted.subfolder,
        tree=tree,
        series=source.series,
        patches=patched.locked(),
        patched_tree=patched.patched_tree,
        dependencies=dependencies,
    )


def _source(
    name: str,
    wanted: GitSource,
    previous: LockedSource | None,
    store: Store,
    mirrors: Sequence[Path],
    step: Step,
    scratch: Path,
) -> tuple[str, Path]:
    """The tree id of a source and a folder with its files: from its repository, else as it was locked and stored before."""
    try:
        clone = Clone.fetch(wanted.url, wanted.commit, scratch / "clone", mirrors=mirrors, step=step, name=name)
        tree = clone.tree(wanted.subfolder)
        folder = clone.check_out(tree, scratch / "tree")
    except Unanswered:
        same = (wanted.url, wanted.commit, wanted.subfolder)
        if previous is None or (previous.url, previous.commit, previous.subfolder) != same:
            raise
        if git.known(previous.tree, name, store) is None:
            raise
        step.say(f"{name}: its repository does not answer; taken from the store as it was locked")
        return previous.tree, git.unpack(previous.tree, name, store, scratch / "stored")
    git.keep(name, tree, folder, store, step)
    return tree, folder


def compare(
    where: str,
    named: Mapping[str, GitDependency],
    declared: Mapping[str, Sequence[Declaration]],
    *,
    complete: bool = True,
) -> None:
    """Hold what a manifest names to what a tree declares; raises UsageError with a line for each disagreement.

    Where conditions choose among several declarations, one of them must be the manifest's. With `complete` everything
    that the tree declares must be named.
    """
    if wrong := list(_disagreements(named, declared, complete)):
        raise UsageError(
            f"{where}: manifest and tree disagree about {len(wrong)} dependencies",
            details=tuple(wrong),
            hint="the tree is what CMake would follow: write what it says, or take another commit of it",
        )


def _disagreements(
    named: Mapping[str, GitDependency], declared: Mapping[str, Sequence[Declaration]], complete: bool
) -> Iterator[str]:
    for name, item in named.items():
        found = declared.get(name, ())
        if not found:
            yield f"{name}: the manifest names it, no CMake file of the tree declares it"
        elif not any(_same(item, one) for one in found):
            ours = item.declared or f"{item.url} {item.tag or item.commit}"
            yield f"{name}: the manifest says {ours}; {'; '.join(f'{one.where} says {one}' for one in found)}"
    for name, found in declared.items() if complete else ():
        if name not in named:
            yield f"{name}: the manifest does not name it; {'; '.join(f'{one.where} says {one}' for one in found)}"


def _same(item: GitDependency, found: Declaration) -> bool:
    if found.repository is None:
        return found.url is not None and found.url == item.declared
    return (
        item.declared is None
        and _plain(found.repository) == _plain(item.url)
        and found.tag == (item.tag or item.commit)
    )


def _plain(url: str) -> str:
    return url.rstrip("/").removesuffix(".git").lower()


def _own(source: GitSource) -> dict[str, GitDependency]:
    return {name: item for name, item in source.dependencies.items() if item.of is None}


def _dependency(
    name: str,
    item: GitDependency,
    kept: LockedDependency | None,
    inner: Mapping[str, GitDependency],
    mirrors: Sequence[Path],
    step: Step,
) -> LockedDependency:
    """One dependency, whatever became of it; `inner` are those that its own CMake files must declare."""
    if not item.needed:
        return LockedDependency(url=item.url, commit=item.commit, tag=item.tag, dropped=item.reason)
    if kept is not None and (kept.url, kept.tag) != (item.url, item.tag):
        kept = None
    commit = item.commit or (kept.commit if kept else None)
    try:
        commit = commit or commit_of_tag(item.url, item.tag or "")
        with tempfile.TemporaryDirectory(prefix="dependency-") as scratch:
            clone = Clone.fetch(item.url, commit, Path(scratch) / "clone", mirrors=mirrors, step=step, name=name)
            root, taken = clone.root, clone.taken(item.paths)
            clone.refuse_submodules(taken)
            if inner:
                tree = clone.check_out(taken, Path(scratch) / "tree")
                compare(f"dependencies of {name}", inner, declarations(tree), complete=False)
    except (Unanswered, NoSuchCommit) as error:
        if kept is not None and kept.taken is not None and (kept.commit, kept.paths) == (commit, item.paths):
            step.say(f"{name}: not to be had now; it stays as it was locked")
            return kept
        # in words that are the same on every machine: a lock is compared and committed
        why = "has no such commit or tag" if isinstance(error, NoSuchCommit) else "does not answer"
        step.say(f"note: {name} is unlocked, and production will refuse it: {error.message}")
        for line in error.details:
            step.detail(line)
        return LockedDependency(
            url=item.url, commit=commit, tag=item.tag, paths=item.paths, unlocked=f"its repository {why}"
        )
    return LockedDependency(url=item.url, commit=commit, tag=item.tag, tree=root, paths=item.paths, taken=taken)
