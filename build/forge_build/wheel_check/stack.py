"""What a wheel will meet: the versions, the base and the wheels of a lock."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from forge_build.lock import Lock, LockedWheel
from forge_build.wheel_check import archive, metadata
from forge_build.wheel_check.bases import provided
from forge_build.wheel_check.families import CUDA_MAJOR_SONAME, PROVIDERS
from forge_build.wheel_check.metadata import Named
from forge_core.model import Finding

_RUNTIME = re.compile(r"^nvidia-cuda-runtime(?:-cu\d+)?$")


@dataclass(frozen=True)
class Stack:
    """What a lock says, as far as a wheel leans on it."""

    name: str
    """The lock's profile."""
    base: frozenset[str]
    """Libraries of the runtime base, by soname."""
    versions: dict[str, str]
    """Version of every wheel that is installed, by normalised name."""
    demands: tuple[tuple[str, Requirement], ...]
    """(who, what): requirements of the installed wheels whose metadata is at hand."""

    @property
    def torch(self) -> str | None:
        """Version of torch."""
        return self.versions.get("torch")

    @property
    def cuda(self) -> tuple[int, str] | None:
        """(CUDA major, the locked package that says so)."""
        for name, version in self.versions.items():
            if _RUNTIME.match(name):
                return Version(version).major, f"{name} {version}"
        if match := re.search(r"\+cu(\d\d)\d$", self.torch or ""):
            return int(match[1]), f"torch {self.torch}"
        return None


def stack(
    lock: Lock,
    path: Callable[[LockedWheel], Path | None],
    *,
    base: Sequence[str] = (),
    python: str | None = None,
    made: Mapping[str, tuple[str, Path]] = MappingProxyType({}),
) -> Stack:
    """Read a lock; `path` gives a wheel's file, none where it is not at hand: its requirements stay unknown.

    `base` are libraries of a base that names no packages, `python` its version (major.minor), for markers; `made` the wheels
    that are made here and installed with the lock's: name -> version, file.
    """
    wheels = lock.wheels.get("runtime", ())
    environment: dict[str, str] = {"extra": "", **({"python_version": python} if python else {})}
    demands: list[tuple[str, Requirement]] = []
    files = [(f"{wheel.name} {wheel.version}", wheel.file, path(wheel)) for wheel in wheels]
    files += [(f"{name} {version}", file.name, file) for name, (version, file) in made.items()]
    for who, name, file in files:
        if file is None:
            continue
        with archive.opened(file, locked=True) as opened:
            folder, _ = metadata.dist_info(opened, name)
            for requirement in metadata.requirements(opened, folder):
                if requirement.marker is None or requirement.marker.evaluate(environment):
                    demands.append((who, requirement))
    return Stack(
        name=lock.profile,
        base=provided(deb.name for deb in lock.debs.get("runtime", ())) | frozenset(base),
        versions={wheel.name: wheel.version for wheel in wheels}
        | {name: version for name, (version, _) in made.items()},
        demands=tuple(demands),
    )


def holders(lock: Lock, soname: str) -> list[LockedWheel]:
    """The locked wheels that are known to hold a library."""
    names = [name for pattern, name in PROVIDERS if pattern.match(soname)]
    return [w for w in lock.wheels.get("runtime", ()) if any(n.fullmatch(w.name) for n in names)]


def check_versions(
    wheel: str, named: Named | None, requires: Sequence[Requirement], against: Stack
) -> Iterator[Finding]:
    """The wheel is the version its users ask for, and its own requirements are what the lock holds."""
    if named is None:
        return
    for who, requirement in against.demands:
        if canonicalize_name(requirement.name) == named.name and not requirement.specifier.contains(
            named.version, prereleases=True
        ):
            message = f"is version {named.version}, but {who} requires {requirement}"
            yield Finding(kind="version-demanded", where=wheel, message=message)
    for requirement in requires:
        locked = against.versions.get(canonicalize_name(requirement.name))
        if locked is None or requirement.marker is not None:
            continue
        try:
            fits = requirement.specifier.contains(Version(locked), prereleases=True)
        except InvalidVersion:
            fits = False
        if not fits:
            # The image check holds every installed package to this, with the manifest's allowed conflicts.
            message = f"requires {requirement}, but the lock {against.name!r} holds {requirement.name} {locked}"
            yield Finding(kind="requires-other", where=wheel, message=message, severity="warning")


def cuda_major(soname: str) -> int | None:
    """The CUDA major that a soname carries; none for a library whose number is its own."""
    match = CUDA_MAJOR_SONAME.match(soname)
    return int(match[1]) if match else None
