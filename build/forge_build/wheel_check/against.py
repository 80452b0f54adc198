"""Any wheel against a lock: what the lock's profile demands of the wheel, and the locked wheels it leans on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import httpx
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from pydantic import ValidationError

from forge_build import lock as locks
from forge_build import manifest as manifests
from forge_build.fetch.download import Download, download
from forge_build.fetch.indexes import anywhere, in_folders, new_client, page
from forge_build.lock import Lock, LockedWheel
from forge_build.manifest import CompileCheck, Manifest
from forge_build.wheel_check import WheelReport, check
from forge_build.wheel_check.stack import holders, stack
from forge_core.console import Console, size
from forge_core.errors import EnvironmentFailure, UsageError
from forge_core.store import Store

# Who says which version of a kernel package it wants.
_REQUIRERS = ("sglang",)

UNNAMED = CompileCheck(demand=("sm_120a",), allow=("sm_120a",), needed="provided")
"""For a wheel that no manifest builds: code for SM120 alone, and whatever libraries the lock's wheels hold."""


def read_lock(text: str) -> Lock:
    """A lock by its path or its profile's name; raises UsageError where there is none or it is malformed."""
    path = Path(text)
    if not path.is_file() and text in manifests.profiles():
        path = locks.lock_path(text)
    if not path.is_file():
        raise UsageError(f"--against {text}: no such lock", hint="a path, or a profile that has a lock")
    try:
        return Lock.model_validate(manifests.read_yaml(path))
    except ValidationError as error:
        raise UsageError(f"{path}: {error.error_count()} mistakes", details=manifests.mistakes(error)) from error


def check_against(wheel: Path, lock: Lock, *, offline: bool, console: Console) -> WheelReport:
    """Look into a wheel as it will be beside the lock's wheels.

    The lock's manifest says what is demanded, where it builds a wheel of this name; otherwise `UNNAMED` does. Locked wheels
    are taken from the store; one that holds a NEEDED library or torch's symbols and is not there is brought, which takes
    the network. Raises EnvironmentFailure when it cannot be had, IntegrityError when its bytes are not the lock's, and as
    `check` does.
    """
    store = Store.open()
    plan = manifests.load(lock.profile) if lock.profile in manifests.profiles() else None
    locked = lock.wheels.get("runtime", ())

    def bring(wanted: Sequence[LockedWheel]) -> list[Path]:
        missing = [item for item in wanted if not store.has(item.sha256)]
        if missing and offline:
            raise EnvironmentFailure(
                f"--offline, and {len(missing)} locked wheels that {wheel.name} leans on are not in {store.root}",
                details=tuple(f"{item.file} ({size(item.size)})" for item in missing),
                hint="run once without --offline",
            )
        if missing:
            with console.step("fetch", ", ".join(item.file for item in missing)) as step, new_client() as client:
                download([_located(plan, item, client) for item in missing], store, client, step)
        return [store.get(item.sha256, item.file) for item in wanted]

    bring([item for item in locked if item.name in _REQUIRERS])
    there = {item.sha256: store.get(item.sha256, item.file) for item in locked if store.has(item.sha256)}
    spec = _demanded(wheel, plan)
    return check(
        wheel,
        spec,
        epoch=plan.epoch if plan and spec is not UNNAMED else None,
        environment=list(there.values()),
        platform=plan.target.platform if plan else None,
        stack=stack(
            lock,
            lambda item: there.get(item.sha256),
            base=plan.base.provides if plan else (),
            python=plan.target.python if plan else None,
        ),
        more=lambda soname: bring([item for item in holders(lock, soname) if item.sha256 not in there]),
    )


def _demanded(wheel: Path, plan: Manifest | None) -> CompileCheck:
    """The check section of the manifest's wheel of this name."""
    try:
        name = parse_wheel_filename(wheel.name)[0]
    except InvalidWheelFilename:
        return UNNAMED
    for built, spec in plan.wheels.items() if plan else ():
        if canonicalize_name(built) == name:
            return spec.check
    return UNNAMED


def _located(plan: Manifest | None, wheel: LockedWheel, client: httpx.Client) -> Download:
    """Where a locked wheel is to be had; raises EnvironmentFailure when nowhere."""
    if plan is None and wheel.index is not None:
        raise EnvironmentFailure(
            f"{wheel.file} comes from the index {wheel.index!r}, which no manifest here knows",
            hint=f"`python -m forge_core store import` brings it, or write a manifest for the profile of {wheel.index!r}",
        )
    # The default index needs no manifest.
    where = anywhere(cast(Manifest, plan), wheel.index)

    def offers() -> Iterator[Download]:
        for offer in in_folders(where, wheel.name):
            if offer.file == wheel.file:
                yield Download(wheel.file, offer.location, wheel.sha256, wheel.size)
        for index in where.indexes:
            for offer in page(client, index, wheel.name):
                if offer.file == wheel.file:
                    yield Download(wheel.file, offer.location, wheel.sha256, wheel.size)

    for found in offers():
        return found
    raise EnvironmentFailure(f"{wheel.file} is not to be found", hint="the release was withdrawn, or lies elsewhere")
