"""Device code inside a file, as cuobjdump lists it: cubins (native code of one architecture) and PTX."""

from __future__ import annotations

import re
import signal
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from forge_build.wheel_check.elf import BrokenObject
from forge_core.errors import EnvironmentFailure
from forge_core.process import run

PACKAGE = "nvidia-cuda-cuobjdump"

# A published kernel library of 1 GB takes cuobjdump about ten seconds.
_TIMEOUT_S = 600

_LINE = re.compile(r"^(ELF|PTX) file\s+\d+:\s+(.+)$")
_ARCHITECTURE = re.compile(r"(?:^|\.)(sm_[0-9]{2,3}[af]?)\.(?:cubin|ptx)$")


@dataclass(frozen=True)
class DeviceCode:
    """What one file holds."""

    cubins: tuple[tuple[str, str], ...] = ()
    """(architecture, cuobjdump's name of the cubin), in file order."""
    ptx: tuple[tuple[str, str], ...] = ()
    """(architecture, cuobjdump's name of the PTX text)."""

    def __bool__(self) -> bool:
        return bool(self.cubins or self.ptx)

    def counts(self) -> dict[str, int]:
        """Architecture -> number of cubins, sorted."""
        return dict(sorted(Counter(architecture for architecture, _ in self.cubins).items()))


@cache
def tool() -> Path:
    """The cuobjdump of our own environment; PATH is not asked, so every host lists with the same version.

    Raises EnvironmentFailure when its wheel is not installed.
    """
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "cuobjdump" and (path := Path(str(file.locate()))).is_file():
            return path
    raise EnvironmentFailure(
        f"the package {PACKAGE} is not installed beside this one",
        hint="run through nox, or install requirements/forge.txt into this environment",
    )


def device_code(path: Path) -> DeviceCode:
    """List the device code of an ELF file, cubin or fatbin.

    Raises BrokenObject when cuobjdump cannot read it, EnvironmentFailure when cuobjdump is missing, dies or prints
    something unknown: device code that is not understood must not pass for none.
    """
    done = run([tool(), "--list-elf", "--list-ptx", path], check=False, timeout=_TIMEOUT_S)
    if done.returncode != 0:
        # 255 and this sentence is its way to say: nothing here.
        if "does not contain device code" in done.stderr + done.stdout:
            return DeviceCode()
        said = (done.stderr or done.stdout).strip().splitlines()
        # Killed from outside, for memory perhaps; any other signal is its own stumbling over bad input.
        if done.returncode in (-signal.SIGKILL, -signal.SIGTERM):
            raise EnvironmentFailure(f"cuobjdump died by signal {-done.returncode} on {path.name}", details=tuple(said))
        text = re.sub(r" in '[^']*'", "", said[-1]).strip() if said else f"exit status {done.returncode}"
        raise BrokenObject(f"cuobjdump cannot read it: {text}")
    found: dict[str, list[tuple[str, str]]] = {"ELF": [], "PTX": []}
    for line in done.stdout.splitlines():
        # Its remarks ("No PTX file found") go to the one stream or the other, by version.
        if not line.strip() or line.startswith("cuobjdump info"):
            continue
        match = _LINE.match(line)
        architecture = _ARCHITECTURE.search(match[2]) if match else None
        if match is None or architecture is None:
            raise EnvironmentFailure(f"{PACKAGE} printed a line that is not understood: {line!r}")
        found[match[1]].append((architecture[1], match[2]))
    return DeviceCode(tuple(found["ELF"]), tuple(found["PTX"]))
