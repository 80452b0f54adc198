"""The lock: what a manifest resolved to. It names packages, versions and sha256, never an address."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import yaml
from pydantic import ConfigDict, Field, ValidationError

from forge_build.manifest import Manifest, manifests_folder, mistakes, read_yaml
from forge_core.errors import UsageError
from forge_core.files import write_text
from forge_core.model import Frozen, GitOid, Sha256


class LockedWheel(Frozen):
    """One wheel file."""

    name: str
    """Normalised (PEP 503)."""
    version: str
    file: str
    sha256: Sha256
    size: int
    """Bytes."""
    index: str | None = None
    """Name of the index in the manifest; none: the default one."""


class LockedDeb(Frozen):
    """One package of the distribution."""

    name: str
    version: str
    architecture: str
    sha256: Sha256
    size: int
    """Bytes."""

    @property
    def file(self) -> str:
        """File name as apt writes it (a colon of an epoch becomes %3a)."""
        return f"{self.name}_{self.version.replace(':', '%3a')}_{self.architecture}.deb"


class LockedPatch(Frozen):
    """One patch of a series."""

    file: str
    sha256: Sha256


class LockedSource(Frozen):
    """A source tree, before and after its series."""

    wheel: LockedWheel | None = None
    commit: GitOid | None = None
    """Of the repository, for a source from git."""
    tree: GitOid
    """Git tree id of the unpatched tree."""
    series: str | None = None
    patches: tuple[LockedPatch, ...] = ()
    patched_tree: GitOid
    """Git tree id after the series; equal to `tree` where there is none."""


class Lock(Frozen):
    """What one profile's manifest resolved to."""

    schema_version: Literal[1] = Field(alias="schema")
    profile: str
    manifest: Sha256
    """`Manifest.resolving_sha256` at the time of resolving."""
    wheels: dict[str, tuple[LockedWheel, ...]]
    """By use: `runtime`, `builder`, `model`."""
    debs: dict[str, tuple[LockedDeb, ...]] = Field(default_factory=dict)
    sources: dict[str, LockedSource] = Field(default_factory=dict)

    model_config = ConfigDict(populate_by_name=True)

    def all_wheels(self) -> dict[str, LockedWheel]:
        """Every wheel file by sha256, sources' wheels included."""
        found = {w.sha256: w for wheels in self.wheels.values() for w in wheels}
        return found | {s.wheel.sha256: s.wheel for s in self.sources.values() if s.wheel}

    def all_debs(self) -> dict[str, LockedDeb]:
        """Every distribution package by sha256."""
        return {d.sha256: d for debs in self.debs.values() for d in debs}


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
    data = lock.model_dump(mode="json", by_alias=True, exclude_none=True)
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
