"""Fetch: every locked input lies in the store, verified, before anything uses one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx

from forge_build.fetch import debian
from forge_build.fetch.download import Download, download
from forge_build.fetch.indexes import new_client, offers, places, variable
from forge_build.lock import Lock, LockedDeb, LockedWheel
from forge_build.manifest import Manifest
from forge_core.console import Console, Step, size
from forge_core.errors import EnvironmentFailure, IntegrityError
from forge_core.files import write_text
from forge_core.model import Deviation, canonical_sha256
from forge_core.store import Store


@dataclass(frozen=True)
class Inputs:
    """What enters the build: everything is in the store and was verified by this run."""

    store: Store
    wheels: dict[str, LockedWheel]
    """By sha256."""
    debs: dict[str, tuple[LockedDeb, ...]]
    """By use (`builder`, `runtime`): what is really used, after the distribution moved."""
    deviations: tuple[Deviation, ...]

    def path(self, sha256: str) -> Path:
        """Path of an input in the store."""
        return self.store.path(sha256)


def fetch(manifest: Manifest, lock: Lock, store: Store, *, offline: bool, console: Console) -> Inputs:
    """Bring what is missing and verify every byte of what is there.

    Raises IntegrityError (5) when a stored or arriving file has other bytes, EnvironmentFailure (3) when something
    cannot be had or, in production, when a base package has moved on.
    """
    with console.step("fetch", "inputs into the store, verified") as step:
        moved = _known_moves(lock, store)
        debs = {sha: moved.get(deb, deb) for sha, deb in lock.all_debs().items()}
        wanted: list[LockedWheel | LockedDeb] = [*lock.all_wheels().values(), *dict.fromkeys(debs.values())]
        missing = _verify(wanted, store, step)
        if missing and offline:
            raise EnvironmentFailure(
                f"--offline, and {len(missing)} inputs ({size(sum(i.size for i in missing))}) are not in {store.root}",
                hint="run once online, or `python -m forge_core store import FOLDER` from a machine that has them",
                details=tuple(sorted(i.file for i in missing)[:20]),
            )
        if missing:
            moved |= _bring(manifest, lock, missing, store, step)
        deviations = _judge_moves(manifest, moved, step)
        step.result(f"{len(wanted)} files, {size(sum(i.size for i in wanted))}, {len(missing)} brought")
    used = {use: tuple(moved.get(deb, deb) for deb in debs) for use, debs in lock.debs.items()}
    return Inputs(store, lock.all_wheels(), used, deviations)


def _verify(items: Iterable[LockedWheel | LockedDeb], store: Store, step: Step) -> list[LockedWheel | LockedDeb]:
    """Hash what is there, two at a time (hashing releases the interpreter lock); returns what is missing."""
    items = list(items)
    present = [item for item in items if store.has(item.sha256)]
    total = sum(item.size for item in present)
    wrong: list[IntegrityError] = []
    done = 0

    def hash_one(item: LockedWheel | LockedDeb) -> int:
        try:
            store.get(item.sha256, item.file)
        except IntegrityError as error:
            wrong.append(error)
        return item.size

    with ThreadPoolExecutor(2) as pool:
        for amount in pool.map(hash_one, present):
            done += amount
            step.progress(done, total, unit="B", note="verifying the store")
    if wrong:
        raise IntegrityError(wrong[0].message, hint=wrong[0].hint, details=tuple(error.message for error in wrong[1:]))
    there = set(present)
    return [item for item in items if item not in there]


def _bring(
    manifest: Manifest, lock: Lock, missing: list[LockedWheel | LockedDeb], store: Store, step: Step
) -> dict[LockedDeb, LockedDeb]:
    """Find and download; returns the base packages that moved, with what stands in their place."""
    wheels = [item for item in missing if isinstance(item, LockedWheel)]
    debs = [item for item in missing if isinstance(item, LockedDeb)]
    step.say(f"{len(missing)} files to bring, {size(sum(item.size for item in missing))}")
    moved: dict[LockedDeb, LockedDeb] = {}
    with new_client() as client:
        with ThreadPoolExecutor(8) as pool:
            items = list(pool.map(lambda wheel: _locate(manifest, wheel, client), wheels))
        if debs:
            with tempfile.TemporaryDirectory(prefix="apt-", dir=store.root / "partial") as scratch:
                located = debian.locate(manifest.base, debs, Path(scratch))
            gone = [deb.file for deb, new in located.moved.items() if new is None]
            if gone:
                raise EnvironmentFailure(
                    f"{len(gone)} base packages are gone from the distribution",
                    details=tuple(gone),
                    hint=f"`nox -s lock -- --profile {manifest.profile} --upgrade` moves on",
                )
            items += [Download(d.file, url, d.sha256, d.size) for d, url in located.urls.items()]
            for old, new in located.moved.items():
                assert new is not None
                moved[old] = new[0]
                items.append(Download(new[0].file, new[1], new[0].sha256, new[0].size))
            if moved and manifest.kind == "production":
                _judge_moves(manifest, moved, step)
        download(items, store, client, step)
    if moved:
        _remember_moves(lock, moved, store)
    return moved


def _locate(manifest: Manifest, wheel: LockedWheel, client: httpx.Client) -> Download:
    where = places(manifest, wheel.index)
    found = [offer for offer in offers(client, where, wheel.name) if offer.file == wheel.file]
    for offer in found:
        if offer.sha256 in (None, wheel.sha256):
            return Download(wheel.file, offer.location, wheel.sha256, wheel.size)
    if found:
        raise IntegrityError(
            f"{wheel.file}: the index states sha256 {found[0].sha256}, the lock {wheel.sha256}",
            hint="the file was replaced upstream; nothing was downloaded",
        )
    hint = "the release was withdrawn; `store import` brings it from a machine that has it"
    if wheel.index:
        hint = f"set {variable(wheel.index)} to the address (or a folder) of the index {wheel.index!r}"
    raise EnvironmentFailure(f"{wheel.file} is not to be found in the index {wheel.index or 'by default'}", hint=hint)


def _moves_key(lock: Lock) -> str:
    return canonical_sha256(sorted(lock.all_debs()))


def _moves_path(lock: Lock, store: Store) -> Path:
    return store.root / "derived" / "moved" / f"{_moves_key(lock)}.json"


def _remember_moves(lock: Lock, moved: dict[LockedDeb, LockedDeb], store: Store) -> None:
    """So that a later run, --offline included, builds the same base again."""
    rows = [[old.model_dump(), new.model_dump()] for old, new in moved.items()]
    known = [[old.model_dump(), new.model_dump()] for old, new in _known_moves(lock, store).items() if old not in moved]
    write_text(_moves_path(lock, store), json.dumps(known + rows, indent=1) + "\n")


def _known_moves(lock: Lock, store: Store) -> dict[LockedDeb, LockedDeb]:
    """Moves seen by an earlier run, unless the locked package itself has come into the store since."""
    try:
        rows = json.loads(_moves_path(lock, store).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    pairs = ((LockedDeb.model_validate(old), LockedDeb.model_validate(new)) for old, new in rows)
    return {old: new for old, new in pairs if not store.has(old.sha256)}


def _judge_moves(manifest: Manifest, moved: dict[LockedDeb, LockedDeb], step: Step) -> tuple[Deviation, ...]:
    deviations = tuple(
        Deviation(
            kind="base-moved",
            subject=old.name,
            detail=f"locked {old.version} ({old.sha256[:12]}), the distribution has {new.version} ({new.sha256[:12]})",
        )
        for old, new in sorted(moved.items(), key=lambda pair: pair[0].name)
    )
    lines = tuple(f"{d.subject}: {d.detail}" for d in deviations)
    if deviations and manifest.kind == "production":
        raise EnvironmentFailure(
            f"{len(deviations)} base packages have moved on; production builds from locked packages alone",
            details=lines,
            hint=f"`nox -s lock -- --profile {manifest.profile} --upgrade`, or `store import` the locked ones",
        )
    for line in lines:
        step.say(f"moved: {line}")
    return deviations
