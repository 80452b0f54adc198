"""Base packages that the distribution replaced: noted in the store, so that a later run, --offline too, is the same."""

from __future__ import annotations

from pydantic import ValidationError

from forge_build.lock import Lock, LockedDeb
from forge_build.manifest import Manifest
from forge_core.console import Step
from forge_core.errors import EnvironmentFailure
from forge_core.model import Deviation, canonical_sha256
from forge_core.store import Store
from forge_core.store.names import MOVED

Moves = dict[LockedDeb, LockedDeb]
"""Locked package -> what stands in for it."""


def _key(lock: Lock) -> str:
    return canonical_sha256(sorted(lock.all_debs()))


def known(lock: Lock, store: Store) -> Moves:
    """What earlier runs noted; not what is in the store as locked by now, nor where the stand-in is gone from there."""
    rows = (store.note_get(MOVED, _key(lock)) or {}).get("moves", [])
    try:
        pairs = [(LockedDeb.model_validate(old), LockedDeb.model_validate(new)) for old, new in rows]
    except (ValidationError, ValueError, TypeError):
        return {}
    return {old: new for old, new in pairs if not store.has(old.sha256) and store.has(new.sha256)}


def remember(lock: Lock, moved: Moves, store: Store) -> None:
    """Note the moves of a lock's packages."""
    rows = [[old.model_dump(), new.model_dump()] for old, new in sorted(moved.items(), key=lambda pair: pair[0].file)]
    store.note_put(MOVED, _key(lock), {"moves": rows})


def judge(manifest: Manifest, moved: Moves, step: Step) -> tuple[Deviation, ...]:
    """Name every package that moved; raises EnvironmentFailure in production, which builds from the locked ones alone."""
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
