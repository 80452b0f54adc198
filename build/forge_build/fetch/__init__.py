"""Fetch: every locked input lies in the store, verified, before anything uses one."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from forge_build.fetch import debian, git, moves
from forge_build.fetch.client import host_of
from forge_build.fetch.download import PARALLEL, Download, download
from forge_build.fetch.indexes import (
    Offer,
    anywhere,
    file_sha256_of_offer,
    in_folders,
    new_client,
    page,
    variable,
)
from forge_build.lock import Lock, LockedDeb, LockedWheel
from forge_build.manifest import Manifest
from forge_core.console import Console, Step, size
from forge_core.errors import EnvironmentFailure, ForgeError, IntegrityError
from forge_core.model import Deviation
from forge_core.store import Store

Item = LockedWheel | LockedDeb


@dataclass(frozen=True)
class Inputs:
    """What enters the build: everything is in the store and was verified by this run."""

    store: Store
    wheels: dict[str, LockedWheel]
    """By sha256."""
    debs: dict[str, tuple[LockedDeb, ...]]
    """By use (`builder`, `runtime`): what is really used, after the distribution moved."""
    deviations: tuple[Deviation, ...]
    trees: Mapping[str, str] = field(default_factory=dict)
    """Git tree id of each tree from git, by `SOURCE` or `SOURCE/DEPENDENCY`."""

    def tree(self, name: str, into: Path) -> Path:
        """Write the tree of a source from git into the new folder `into`; its id is computed from the bytes again.

        Raises IntegrityError (5) when it differs.
        """
        return git.unpack(self.trees[name], name, self.store, into)

    def path(self, sha256: str) -> Path:
        """Path of an input in the store."""
        return self.store.path(sha256)


def fetch(
    manifest: Manifest, lock: Lock, store: Store, *, offline: bool, console: Console, mirrors: Sequence[Path] = ()
) -> Inputs:
    """Bring what is missing and verify every byte of what is there.

    Raises IntegrityError (5) when a stored or arriving file has other bytes, EnvironmentFailure (3) when something
    cannot be had or, in production, when a base package has moved on, UsageError (2) in production for a dependency of a
    source that the lock could not name. `mirrors` are git directories that may have the commits of sources.
    """
    unlocked = git.unlocked(manifest, lock)
    trees = git.sources(lock, store, offline=offline, mirrors=mirrors, console=console)
    with console.step("fetch", "inputs in the store, verified") as step:
        moved = moves.known(lock, store)
        debs = dict.fromkeys(moved.get(deb, deb) for deb in lock.all_debs().values())
        wanted: list[Item] = [*lock.all_wheels().values(), *debs]
        missing = _verify(wanted, store, step)
        amount = sum(item.size for item in missing)
        if missing and offline:
            raise EnvironmentFailure(
                f"--offline, and {len(missing)} of {len(wanted)} inputs ({size(amount)}) are not in {store.root}",
                hint="run once online, or `python -m forge_core store import FOLDER` from a machine that has them",
                details=_some([f"{item.file} ({size(item.size)})" for item in missing]),
            )
        deviations = moves.judge(manifest, moved, step)
        step.result(f"{len(wanted)} files, {size(sum(i.size for i in wanted))}, {len(missing)} missing")
    if missing:
        # A step of its own: rate and estimate are those of the network alone.
        with console.step("download", f"{len(missing)} files, {size(amount)}") as step:
            new = _bring(manifest, missing, store, step)
            if new:
                moved |= new
                moves.remember(lock, moved, store)
                deviations = moves.judge(manifest, moved, step)
            step.result(f"{size(amount)}, {size(amount / max(step.elapsed, 0.1))}/s")
    used = {use: tuple(moved.get(deb, deb) for deb in debs) for use, debs in lock.debs.items()}
    return Inputs(store, lock.all_wheels(), used, (*unlocked, *deviations), trees)


def _some(lines: Iterable[str], most: int = 40) -> tuple[str, ...]:
    """Sorted lines, cut where they would bury the message."""
    ordered = sorted(lines)
    return (*ordered[:most], *([f"and {len(ordered) - most} more"] if len(ordered) > most else []))


def _verify(items: Iterable[Item], store: Store, step: Step) -> list[Item]:
    """Hash what is there, as many at a time as there are cores (hashing releases the lock); returns what is missing."""
    items = list(items)
    present = [item for item in items if store.has(item.sha256)]
    total = sum(item.size for item in present)
    wrong: list[IntegrityError] = []
    done = 0

    def hash_one(item: Item) -> int:
        try:
            store.get(item.sha256, item.file)
        except IntegrityError as error:
            wrong.append(error)
        return item.size

    with ThreadPoolExecutor(min(8, os.cpu_count() or 2)) as pool:
        for amount in pool.map(hash_one, present):
            done += amount
            step.progress(done, total, unit="B", note="verifying the store")
    if wrong:
        raise IntegrityError(wrong[0].message, hint=wrong[0].hint, details=tuple(error.message for error in wrong[1:]))
    there = set(present)
    return [item for item in items if item not in there]


def _bring(manifest: Manifest, missing: Sequence[Item], store: Store, step: Step) -> moves.Moves:
    """Find and download; returns the base packages that moved, with what stands in their place."""
    wheels = [item for item in missing if isinstance(item, LockedWheel)]
    debs = [item for item in missing if isinstance(item, LockedDeb)]
    moved: moves.Moves = {}
    with new_client() as client:
        items = _locate(manifest, wheels, client)
        if debs:
            step.detail(f"asking the distribution for {len(debs)} packages")
            with tempfile.TemporaryDirectory(prefix="apt-", dir=store.root / "partial") as scratch:
                located = debian.locate(manifest.base, debs, Path(scratch))
            if gone := [deb.file for deb, new in located.moved.items() if new is None]:
                raise EnvironmentFailure(
                    f"{len(gone)} base packages are gone from the distribution",
                    details=_some(gone),
                    hint=f"`nox -s lock -- --profile {manifest.profile} --upgrade` moves on",
                )
            items += [Download(d.file, url, d.sha256, d.size) for d, url in located.urls.items()]
            for old, new in located.moved.items():
                assert new is not None
                moved[old] = new[0]
                items.append(Download(new[0].file, new[1], new[0].sha256, new[0].size))
            if manifest.kind == "production":
                # before anything is downloaded in vain
                moves.judge(manifest, moved, step)
        download(items, store, client, step)
    return moved


def _locate(manifest: Manifest, wheels: Sequence[LockedWheel], client: httpx.Client) -> list[Download]:
    """An address or a local file for each wheel; what cannot be found is reported all at once."""

    def one(wheel: LockedWheel) -> Download | ForgeError:
        try:
            return _locate_one(manifest, wheel, client)
        except (EnvironmentFailure, IntegrityError) as error:
            return error

    with ThreadPoolExecutor(PARALLEL) as pool:
        found = list(pool.map(one, wheels))
    failures = [item for item in found if isinstance(item, ForgeError)]
    if failures:
        worst = next((e for e in failures if isinstance(e, IntegrityError)), failures[0])
        others = [e for e in failures if e is not worst]
        raise type(worst)(worst.message, hint=worst.hint, details=_some({e.message for e in others} - {worst.message}))
    return [item for item in found if isinstance(item, Download)]


def _locate_one(manifest: Manifest, wheel: LockedWheel, client: httpx.Client) -> Download:
    where = anywhere(manifest, wheel.index)
    stated: list[str] = []
    unanswered: list[EnvironmentFailure] = []

    def sought() -> Iterator[Offer]:
        yield from in_folders(where, wheel.name)
        for index in where.indexes:
            try:
                yield from page(client, index, wheel.name)
            except EnvironmentFailure as error:
                # another place may have it
                unanswered.append(error)

    for offer in sought():
        if offer.file == wheel.file:
            sha256 = file_sha256_of_offer(offer)
            if sha256 in (None, wheel.sha256):
                return Download(wheel.file, offer.location, wheel.sha256, wheel.size)
            stated.append(
                f"{offer.location if isinstance(offer.location, Path) else host_of(offer.location)}: {sha256}"
            )
    if stated:
        raise IntegrityError(
            f"{wheel.file}: the lock names sha256 {wheel.sha256}, but there is ({'; '.join(stated)})",
            hint="the file was replaced, or a folder holds a build of its own; nothing was downloaded",
        )
    if unanswered:
        raise unanswered[0]
    hint = "the release was withdrawn; `python -m forge_core store import` brings it from a machine that has it"
    if wheel.index:
        hint = f"set {variable(wheel.index)} to the address (or a folder) of the index {wheel.index!r}"
    places = ", ".join(dict.fromkeys([*map(str, where.folders), *map(host_of, where.indexes)])) or "none"
    raise EnvironmentFailure(f"{wheel.file} is not to be found (looked in: {places})", hint=hint)
