"""What the line needs from the distribution, and how it gets there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forge_core.errors import EnvironmentFailure
from forge_core.process import CommandFailed, run

TOOLS = {"git": "git", "mmdebstrap": "mmdebstrap", "skopeo": "skopeo"}
"""Program -> package: sources, bases, registries."""

_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_POLICY = Path("/usr/sbin/policy-rc.d")
_POLICY_TEXT = "#!/bin/sh\n# sm120-forge: no service starts while packages are installed\nexit 101\n"

_APT = ("apt-get", "-q", "-o", "DPkg::Lock::Timeout=600")
_APT_ENV = {"DEBIAN_FRONTEND": "noninteractive", "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}

Way = Literal["distribution", "suite"]


@dataclass(frozen=True)
class Distribution:
    """What /etc/os-release says."""

    id: str
    version: str
    name: str
    codename: str

    @classmethod
    def of(cls, path: Path = Path("/etc/os-release")) -> Distribution:
        """Read os-release; an absent file gives an unknown distribution."""
        fields: dict[str, str] = {}
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                key, separator, value = line.partition("=")
                if separator:
                    fields[key.strip()] = value.strip().strip("\"'")
        version, identity = fields.get("VERSION_ID", ""), fields.get("ID", "unknown")
        return cls(identity, version, fields.get("PRETTY_NAME", identity), fields.get("VERSION_CODENAME", ""))

    def way(self) -> Way | None:
        """How an engine comes here: from the distribution, from a newer suite in a root of its own, or not at all.

        Debian 13 has docker.io 26.1 and buildx 0.13.1, Ubuntu 22.04 (updates) and later are newer; Debian 12's 20.10
        cannot clamp the times in a layer. Tried for real: Debian 12.
        """
        try:
            number = float(self.version) if self.version else None
        except ValueError:
            number = None
        if self.id == "debian":
            # testing and unstable have no number
            if number is None or number >= 13:
                return "distribution"
            return "suite" if number == 12 else None
        if self.id == "ubuntu" and number is not None and number >= 22.04:
            return "distribution"
        return None


def missing_tools(which: Mapping[str, str] = TOOLS) -> list[str]:
    """Packages of the programs that are not there."""
    missing = [package for program, package in which.items() if shutil.which(program) is None]
    if not _KEYRING.is_file():
        missing.append("debian-archive-keyring")  # bases are Debian's, on Ubuntu too
    return missing


def install(packages: list[str], *, log: Path) -> None:
    """Install packages, without what they merely recommend; their services stay stopped.

    Raises EnvironmentFailure with the log.
    """
    if not packages:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise EnvironmentFailure(
            f"not installed: {', '.join(packages)}", hint=f"as root: apt-get install {' '.join(packages)}"
        )
    update(log)
    with _held():
        try:
            run([*_APT, "install", "-y", "--no-install-recommends", *packages], env=_APT_ENV, log=log, timeout=1800)
        except CommandFailed as error:
            raise EnvironmentFailure(
                f"apt-get could not install {', '.join(packages)}",
                hint="check the machine's package sources and network, then run again",
                log=log,
                details=error.details,
            ) from error


def update(log: Path) -> None:
    """Fetch the package lists, if we may; a broken foreign source must not stop what the distribution has itself."""
    if os.geteuid() == 0:
        run([*_APT, "update"], env=_APT_ENV, log=log, check=False, timeout=900)


def systemd_runs() -> bool:
    """Whether systemd is the machine's init."""
    return Path("/run/systemd/system").is_dir()


def mirror(codename: str) -> str | None:
    """The address this machine takes its distribution from (a private mirror must do for the newer suite as well)."""
    listed = run(["apt-get", "indextargets", "--format", "$(CREATED_BY) $(RELEASE) $(REPO_URI)"], check=False)
    for line in listed.stdout.splitlines():
        made, _, rest = line.partition(" ")
        release, _, address = rest.partition(" ")
        if made == "Packages" and release == codename and address:
            return address
    return None


def apt_settings() -> list[str]:
    """The machine's proxy and certificate settings for apt, as options of a private apt."""
    dump = run(["apt-config", "dump"], check=False).stdout.splitlines()
    wanted = ("acquire::http::", "acquire::https::")
    return [line.rstrip(";") for line in dump if line.lower().startswith(wanted) and not line.endswith('"";')]


@contextmanager
def _held() -> Iterator[None]:
    """While held, package scripts start no service; a policy of the machine's own is left alone."""
    if _POLICY.is_file() and _POLICY.read_text(encoding="utf-8", errors="replace") == _POLICY_TEXT:
        _POLICY.unlink()  # left by a run that was killed
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text(_POLICY_TEXT, encoding="utf-8")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink(missing_ok=True)
