"""The bases: root file systems made by mmdebstrap from the store's packages alone, or registry images by digest."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from forge_build.fetch import Inputs
from forge_build.lock import LockedDeb
from forge_build.manifest import Manifest
from forge_core import disk
from forge_core.console import Console, size
from forge_core.errors import EnvironmentFailure, IntegrityError, Refused
from forge_core.explain import Evidence, explain
from forge_core.model import ImageRef, canonical_sha256
from forge_core.process import CommandFailed, run

# Raise it when this module changes what a root file system holds: it is part of the key.
RECIPE = 1

USES: tuple[Literal["builder"], Literal["runtime"]] = ("builder", "runtime")

# What an image that is never upgraded does not read: half of minbase's size. Copyright files stay: licences demand them.
_LEFT_OUT = (
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/lintian/*",
)
_TIDY = (
    'rm -rf "$1"/var/cache/* "$1"/var/log/* "$1"/var/lib/apt/* "$1"/tmp/* "$1"/run/*',
    'rm -f "$1"/etc/hostname "$1"/etc/resolv.conf "$1"/etc/apt/sources.list',
    ': > "$1"/etc/machine-id',
)


@dataclass(frozen=True)
class Base:
    """A base of the builder or the runtime image."""

    use: Literal["builder", "runtime"]
    identity: str
    """Sha256 (hex) of the root file system archive, or digest of the registry image."""
    rootfs: Path | None
    """Tar archive in the store."""
    image: str | None
    """`repository@sha256:...`."""
    size: int = 0
    """Bytes of the archive."""
    cached: bool = False
    tools: dict[str, str] = field(default_factory=dict)


def build(
    use: Literal["builder", "runtime"], manifest: Manifest, inputs: Inputs, *, log: Path, console: Console
) -> Base:
    """Make a base, offline, from the verified packages of the store; equal packages give equal bytes.

    Raises EnvironmentFailure when mmdebstrap is missing or may not make a root file system, IntegrityError when the
    archive holds other packages than were given.
    """
    image = manifest.base.builder_image if use == "builder" else manifest.base.runtime_image
    if image is not None:
        return Base(use, ImageRef.parse(image).digest, None, image)
    debs = inputs.debs[use]
    with console.step("base", f"{use}: {manifest.base.suite} from {len(debs)} packages") as step:
        version = run(["mmdebstrap", "--version"]).stdout.strip()
        key = canonical_sha256(
            {
                "recipe": [RECIPE, *_LEFT_OUT, *_TIDY],
                "debs": sorted(d.sha256 for d in debs),
                "suite": manifest.base.suite,
                "epoch": manifest.epoch,
                "mmdebstrap": version,
            }
        )
        with inputs.store.derived_lock("rootfs", key, waiting=step.waiting_for_another):
            made = inputs.store.derived_get("rootfs", key)
            cached = made is not None
            if made is None:
                with tempfile.TemporaryDirectory(prefix="base-", dir=inputs.store.root / "partial") as scratch:
                    archive = _bootstrap(manifest, inputs, debs, Path(scratch), log)
                    made = inputs.store.derived_put(
                        "rootfs", key, archive, {"use": use, "mmdebstrap": version}, move=True
                    )
        amount = made.path.stat().st_size
        step.result(f"{size(amount)}, {made.sha256[:12]}" + (", made before" if cached else ""))
    return Base(use, made.sha256, made.path, None, amount, cached, {"mmdebstrap": version})


def _repository(inputs: Inputs, debs: tuple[LockedDeb, ...], folder: Path) -> None:
    """Fill `folder` with the packages and an index that apt holds their bytes to."""
    # In a user namespace apt runs under another user id; a home folder, the store in it, is often closed to that.
    folder.chmod(0o755)
    stanzas = []
    for deb in debs:
        target = folder / deb.file
        shutil.copyfile(inputs.store.get(deb.sha256, deb.file), target)
        control = run(["dpkg-deb", "--field", target]).stdout.strip()
        stanzas.append(f"{control}\nFilename: ./{deb.file}\nSize: {deb.size}\nSHA256: {deb.sha256}\n")
    (folder / "Packages").write_text("\n".join(stanzas), encoding="utf-8")


def _bootstrap(manifest: Manifest, inputs: Inputs, debs: tuple[LockedDeb, ...], scratch: Path, log: Path) -> Path:
    """Run mmdebstrap over a local repository of exactly these packages."""
    archive = scratch / "rootfs.tar"
    with tempfile.TemporaryDirectory(prefix="packages-") as repository:
        _repository(inputs, debs, Path(repository))
        _mmdebstrap(manifest, debs, Path(repository), archive, log)
    _prove(archive, debs)
    return archive


def _mmdebstrap(manifest: Manifest, debs: tuple[LockedDeb, ...], repository: Path, archive: Path, log: Path) -> None:
    names = sorted({deb.name for deb in debs})
    try:
        run(
            [
                # not --quiet: that hides what apt says, also when it fails
                "mmdebstrap",
                "--variant=custom",
                "--format=tar",
                f"--mode={'root' if os.geteuid() == 0 else 'unshare'}",
                "--architectures=amd64",
                f"--include={','.join(names)}",
                *(f"--dpkgopt={option}" for option in _LEFT_OUT),
                *(f"--customize-hook={hook}" for hook in _TIDY),
                str(manifest.base.suite),
                str(archive),
                # copy: has apt bring the files into the root, where dpkg can see them
                f"deb [trusted=yes] copy:{repository} ./",
            ],
            env={"SOURCE_DATE_EPOCH": str(manifest.epoch)},
            log=log,
            timeout=1800,
        )
    except CommandFailed as error:
        text = error.completed.stdout
        details = tuple(line for line in text.splitlines() if line.startswith("E: "))[:6] or error.details
        found = explain(text.splitlines(), Evidence(stage="build", exit_code=error.completed.returncode))
        if found is not None and found.kind == "hash_mismatch":
            raise IntegrityError(
                "a base package has other bytes than the lock names", details=details, log=log
            ) from error
        hint = None
        if re.search(r"unshare|newuidmap|user namespace", text):
            hint = "run as root, or allow unprivileged user namespaces (package uidmap, kernel.unprivileged_userns_clone=1)"
        elif (found is not None and found.kind == "disk_full") or disk.tight((archive, repository), disk.FULL):
            # seen on a full disk: "tar --extract failed: 512" and no more, so the disks are asked as well
            hint = f"free space on the disks of {archive.parent} and {repository.parent}"
        elif found is not None and found.fault == "machine":
            hint = found.hint
        raise (EnvironmentFailure if hint else Refused)(
            f"mmdebstrap could not make the root file system of {manifest.base.suite}",
            details=details,
            hint=hint,
            log=log,
        ) from error


def _prove(archive: Path, debs: tuple[LockedDeb, ...]) -> None:
    """The package database inside must name exactly the given packages."""
    status = run(["tar", "--extract", "--to-stdout", "--file", archive, "./var/lib/dpkg/status"]).stdout
    found = set(re.findall(r"^Package: (\S+)\n(?:.+\n)*?Version: (\S+)$", status, re.MULTILINE))
    wanted = {(deb.name, deb.version) for deb in debs}
    if found != wanted:
        odd = sorted(found ^ wanted)
        raise IntegrityError(
            f"the root file system holds other packages than were given: {len(odd)} differ",
            details=tuple(f"{name} {version}" for name, version in odd[:10]),
        )
