"""The distribution's packages, asked of apt in a private root: no state of the host is read or changed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from forge_build.lock import LockedDeb
from forge_build.manifest import Base
from forge_core.errors import EnvironmentFailure, UsageError
from forge_core.process import CommandFailed, Completed, run

# What a minbase holds; apt itself is one of the required packages.
_MINBASE = ("?essential", "?priority(required)")
_URI = re.compile(r"^'(?P<url>[^']+)' (?P<file>\S+) (?P<size>\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Located:
    """Where locked packages are now."""

    urls: dict[LockedDeb, str]
    """Package -> its address, for those the distribution still has."""
    moved: dict[LockedDeb, tuple[LockedDeb, str] | None]
    """Package -> what the distribution has instead and its address; none: it is gone."""


class Apt:
    """apt-get and apt-cache over a private root folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @classmethod
    def open(cls, base: Base, folder: Path) -> Apt:
        """Make the private root below `folder` and read the suite's indexes (needs the network).

        Raises EnvironmentFailure when the mirror does not answer or its signature cannot be checked.
        """
        assert base.suite is not None
        for name in ("lists/partial", "archives/partial", "etc/apt.conf.d", "etc/preferences.d"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "status").touch()
        (folder / "etc/apt.conf").write_text(_configuration(), encoding="utf-8")
        (folder / "etc/sources.list").write_text(_sources(base, folder), encoding="utf-8")
        apt = cls(folder)
        try:
            apt._run("apt-get", "update")
        except CommandFailed as error:
            raise EnvironmentFailure(
                f"the package indexes of {base.suite} could not be read",
                hint="a mirror of your own goes into `base.mirror`; keys come with the package debian-archive-keyring",
                details=error.details,
            ) from error
        return apt

    def resolve(self, packages: Sequence[str]) -> list[tuple[LockedDeb, str]]:
        """What minbase with `packages` on top consists of: each package with its address, sorted by name.

        Raises UsageError when a package does not exist or cannot be installed.
        """
        try:
            done = self._run("apt-get", "--print-uris", "--yes", "install", *_MINBASE, *packages)
        except CommandFailed as error:
            # which dependency is missing stands on stdout
            said = (error.completed.stdout + error.completed.stderr).strip().splitlines()
            unmet = next((i for i, line in enumerate(said) if "unmet dependencies" in line), max(0, len(said) - 8))
            raise UsageError("base packages cannot be resolved", details=tuple(said[unmet : unmet + 8])) from error
        wanted = {match["file"]: match["url"] for match in _URI.finditer(done.stdout)}
        found = []
        for deb, _ in self._show(sorted(file.split("_", 1)[0] for file in wanted)):
            if url := wanted.get(deb.file):
                found.append((deb, url))
        if len(found) != len(wanted):
            missing = sorted(set(wanted) - {deb.file for deb, _ in found})
            raise EnvironmentFailure(f"apt names packages it does not describe: {', '.join(missing)}")
        return sorted(found, key=lambda pair: pair[0].name)

    def locate(self, debs: Iterable[LockedDeb]) -> Located:
        """Find each locked package by version and sha256, or say what stands in its place."""
        wanted = sorted(debs, key=lambda deb: deb.name)
        now: dict[str, list[tuple[LockedDeb, str]]] = {}
        for deb, filename in self._show([deb.name for deb in wanted]):
            now.setdefault(deb.name, []).append((deb, filename))
        same: list[LockedDeb] = []
        instead: dict[LockedDeb, LockedDeb | None] = {}
        for deb in wanted:
            versions = [found for found, _ in now.get(deb.name, [])]
            if deb in versions:
                same.append(deb)
            else:
                # apt-cache shows the candidate first
                instead[deb] = versions[0] if versions else None
        urls = self._urls([*same, *(new for new in instead.values() if new)])
        moved = {old: (new, urls[new]) if new else None for old, new in instead.items()}
        return Located({deb: urls[deb] for deb in same}, moved)

    def _urls(self, debs: Sequence[LockedDeb]) -> dict[LockedDeb, str]:
        if not debs:
            return {}
        done = self._run("apt-get", "--print-uris", "download", *(f"{d.name}={d.version}" for d in debs))
        by_file = {match["file"]: match["url"] for match in _URI.finditer(done.stdout)}
        return {deb: by_file[deb.file] for deb in debs}

    def _show(self, names: Sequence[str]) -> Iterable[tuple[LockedDeb, str]]:
        if not names:
            return
        # A name that is gone makes apt-cache end with 100 although it describes the others.
        done = self._run("apt-cache", "show", *names, check=False)
        for stanza in done.stdout.split("\n\n"):
            fields = dict(re.findall(r"^([A-Za-z0-9-]+): (.*)$", stanza, re.MULTILINE))
            if "SHA256" in fields:
                yield (
                    LockedDeb(
                        name=fields["Package"],
                        version=fields["Version"],
                        architecture=fields["Architecture"],
                        sha256=fields["SHA256"],
                        size=int(fields["Size"]),
                    ),
                    fields["Filename"],
                )

    def _run(self, program: str, *argv: str, check: bool = True) -> Completed:
        root = self._folder
        options = {
            "Dir::State": root,
            "Dir::State::lists": root / "lists",
            "Dir::State::status": root / "status",
            "Dir::Cache": root,
            "Dir::Cache::archives": root / "archives",
            "Dir::Etc::sourcelist": root / "etc/sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::Etc::preferences": "/dev/null",
            "Dir::Etc::preferencesparts": "/dev/null",
            "Dir::Etc::trustedparts": "/usr/share/keyrings",
            "APT::Architecture": "amd64",
            "APT::Architectures": "amd64",
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": "root",
            "Acquire::Languages": "none",
            # a mirror that is a snapshot keeps a Release file past its date
            "Acquire::Check-Valid-Until": "false",
        }
        settings = [f"-o{name}={value}" for name, value in options.items()]
        env = {"LC_ALL": "C.UTF-8", "APT_CONFIG": str(root / "etc/apt.conf")}
        return run([program, *settings, *argv], check=check, timeout=600, env=env)


def locate(base: Base, debs: Sequence[LockedDeb], folder: Path) -> Located:
    """Where the locked packages are now; `folder` is scratch space."""
    return Apt.open(base, folder).locate(debs)


def _configuration() -> str:
    """An apt.conf that keeps the host's hooks and preferences out (they would act on the host) but its ways to the net in.

    apt reads the file that APT_CONFIG names before all others, so it can switch those off.
    """
    ways = run(["apt-config", "dump"]).stdout.splitlines()
    kept = [line for line in ways if re.match(r'Acquire::https?::\S+ ".+";$', line)]
    return "\n".join(['Dir::Etc::main "/dev/null";', 'Dir::Etc::parts "/dev/null";', *kept]) + "\n"


def _sources(base: Base, folder: Path) -> str:
    """A sources.list for the suite: of the manifest's mirrors, else the one mmdebstrap would write."""
    if base.mirror:
        lines = [f"deb {base.mirror} {base.suite} main", f"deb {base.mirror} {base.suite}-updates main"]
        if base.security_mirror:
            lines.append(f"deb {base.security_mirror} {base.suite}-security main")
        return "\n".join(lines) + "\n"
    # mmdebstrap knows the default mirror, updates and security of each suite; the hook shows it and ends the run.
    copy = folder / "etc/default.list"
    hook = f'cp "$1/etc/apt/sources.list" "{copy}"; exit 1'
    done = run(
        ["mmdebstrap", "--format=null", "--variant=custom", f"--setup-hook={hook}", str(base.suite), "/dev/null"],
        check=False,
    )
    if not copy.is_file():
        raise EnvironmentFailure(
            f"mmdebstrap knows no default mirror for {base.suite}",
            hint="install mmdebstrap (`nox -s engine`), or name `base.mirror` in the manifest",
            details=tuple(done.stderr.strip().splitlines()[-5:]),
        )
    return copy.read_text(encoding="utf-8")
