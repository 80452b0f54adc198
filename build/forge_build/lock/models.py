"""The lock's models: closed and frozen."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import ConfigDict, Field, model_validator

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


class LockedDependency(Frozen):
    """A repository that a source's build takes by name: locked, dropped, or not to be had."""

    url: str
    commit: GitOid | None = None
    tag: str | None = None
    tree: GitOid | None = None
    """Git tree id of the whole commit."""
    paths: tuple[str, ...] = ()
    """What is needed of it; none: all."""
    taken: GitOid | None = None
    """Git tree id of the tree that holds the needed paths alone; equal to `tree` where all is needed."""
    dropped: str | None = None
    """Why nothing of it enters the build."""
    unlocked: str | None = None
    """Why it could not be had when it was to be locked."""

    @model_validator(mode="after")
    def _one_state(self) -> Self:
        locked = None not in (self.commit, self.tree, self.taken)
        if [locked, self.dropped is not None, self.unlocked is not None].count(True) != 1:
            raise ValueError("exactly one of `commit` with `tree` and `taken`, `dropped` and `unlocked` must be given")
        return self


class LockedSource(Frozen):
    """A source tree, before and after its series."""

    wheel: LockedWheel | None = None
    url: str | None = None
    """Of the repository, for a source from git."""
    commit: GitOid | None = None
    subfolder: str | None = None
    tree: GitOid
    """Git tree id of the unpatched tree: the subfolder's where there is one."""
    series: str | None = None
    patches: tuple[LockedPatch, ...] = ()
    patched_tree: GitOid
    """Git tree id after the series; equal to `tree` where there is none."""
    dependencies: dict[str, LockedDependency] = Field(default_factory=dict)
    """By CMake's name for each."""


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
