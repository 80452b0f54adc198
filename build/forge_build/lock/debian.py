"""The bases' packages: what the suite has now, or what the last lock names."""

from __future__ import annotations

import tempfile
from pathlib import Path

from forge_build.fetch.debian import Apt
from forge_build.lock import Lock, LockedDeb
from forge_build.manifest import Manifest
from forge_core.console import Console


def packages(manifest: Manifest, kept: Lock | None, console: Console) -> dict[str, tuple[LockedDeb, ...]]:
    """Every package of each base by use.

    Where the same packages are needed as `kept` names, its versions stay, all or none: packages of one moment fit
    together, a mixture need not. Raises as Apt does.
    """
    wanted = {"builder": manifest.base.builder, "runtime": manifest.base.runtime}
    if not any(wanted.values()):
        return {}
    found: dict[str, tuple[LockedDeb, ...]] = {}
    with console.step("resolve", f"packages of {manifest.base.suite}") as step:
        with tempfile.TemporaryDirectory(prefix="apt-") as scratch:
            apt = Apt.open(manifest.base, Path(scratch))
            for use, rootfs in wanted.items():
                if rootfs is None:
                    continue
                now = tuple(deb for deb, _ in apt.resolve(rootfs.packages))
                before = kept.debs.get(use, ()) if kept else ()
                found[use] = before if _names(before) == _names(now) else now
                if moved := len(set(now) - set(found[use])):
                    step.say(f"{use}: {moved} packages have moved on; --upgrade takes them")
        step.result(", ".join(f"{use} {len(debs)}" for use, debs in found.items()))
    return found


def _names(debs: tuple[LockedDeb, ...]) -> list[str]:
    return sorted(deb.name for deb in debs)
