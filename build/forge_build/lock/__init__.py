"""The lock: what a manifest resolved to. It names packages, versions and sha256, never an index."""

from __future__ import annotations

from pathlib import Path

import yaml
from pydantic import ValidationError

from forge_build.lock.models import Lock, LockedDeb, LockedDependency, LockedPatch, LockedSource, LockedWheel
from forge_build.manifest import Manifest, manifests_folder, mistakes, read_yaml
from forge_core.errors import UsageError
from forge_core.files import write_text


def lock_path(profile: str) -> Path:
    """Where the lock of a profile lies."""
    return manifests_folder() / f"{profile}.lock.yaml"


def load(manifest: Manifest) -> Lock:
    """Read the manifest's lock; raises UsageError when it is missing, malformed or of another state of the manifest."""
    path = lock_path(manifest.profile)
    again = f"`nox -s lock -- --profile {manifest.profile}` resolves it"
    if not path.exists():
        raise UsageError(f"the profile {manifest.profile!r} has no lock: {path} does not exist", hint=again)
    try:
        lock = Lock.model_validate(read_yaml(path))
    except ValidationError as error:
        raise UsageError(f"{path}: {error.error_count()} mistakes", details=mistakes(error), hint=again) from error
    if lock.manifest != manifest.resolving_sha256():
        raise UsageError(f"{path} was resolved from another state of the manifest {manifest.profile!r}", hint=again)
    return lock


def save(lock: Lock) -> Path:
    """Write a lock beside its manifest, atomically, in a stable order; returns its path."""
    path = lock_path(lock.profile)
    data = lock.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    header = f"# Made by `nox -s lock -- --profile {lock.profile}`; do not edit.\n"
    write_text(path, header + yaml.safe_dump(data, sort_keys=False, width=1000, allow_unicode=True))
    return path


def read(profile: str) -> Lock | None:
    """The lock of a profile as it lies there, whatever its manifest says now; none when there is none."""
    path = lock_path(profile)
    if not path.exists():
        return None
    try:
        return Lock.model_validate(read_yaml(path))
    except ValidationError as error:
        raise UsageError(
            f"{path}: {error.error_count()} mistakes", details=mistakes(error), hint="delete it and resolve again"
        ) from error


__all__ = [
    "Lock",
    "LockedDeb",
    "LockedDependency",
    "LockedPatch",
    "LockedSource",
    "LockedWheel",
    "load",
    "lock_path",
    "read",
    "save",
]
