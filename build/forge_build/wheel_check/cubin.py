"""Device code inside a file, as cuobjdump lists it: cubins (native code of one architecture) and PTX."""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from forge_build.wheel_check.elf import BrokenObject
from forge_core.errors import EnvironmentFailure
from forge_core.process import run

PACKAGES = {"cuobjdump": "nvidia-cuda-cuobjdump", "nvdisasm": "nvidia-cuda-nvdisasm"}

# A published kernel library of 1 GB takes cuobjdump about ten seconds.
_TIMEOUT_S = 600

_LINE = re.compile(r"^(ELF|PTX) file\s+\d+:\s+(.+)$")
# Of the symbols of all cubins: where one begins, its kernels, and internal names, which hold the source file's.
_SYMBOL = re.compile(
    r"^(?P<begins>symbols:)$|^FUNC .*? ENTRY +(?P<kernel>[\w$.]+)$"
    r"|^\S+ .*?_INTERNAL_[0-9a-f]{8}_(?P<length>\d+)_(?P<rest>\w+)$",
    re.MULTILINE,
)
_PTX_BEGINS = re.compile(r"^Fatbin ptx code:$", re.MULTILINE)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)")
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
def tool(program: str = "cuobjdump") -> Path:
    """A program of our own environment; PATH is not asked, so every host reads with the same version.

    Raises EnvironmentFailure when its wheel is not installed.
    """
    package = PACKAGES[program]
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == program and (path := Path(str(file.locate()))).is_file():
            return path
    raise EnvironmentFailure(
        f"the package {package} is not installed beside this one",
        hint="run through nox, or install requirements/forge.txt into this environment",
    )


def device_code(path: Path) -> DeviceCode:
    """List the device code of an ELF file, cubin or fatbin.

    Raises BrokenObject when cuobjdump cannot read it, EnvironmentFailure when cuobjdump is missing, dies or prints
    something unknown: device code that is not understood must not pass for none.
    """
    listed = _said("cuobjdump", path, "--list-elf", "--list-ptx")
    found: dict[str, list[tuple[str, str]]] = {"ELF": [], "PTX": []}
    for line in listed.splitlines():
        # Its remarks ("No PTX file found") go to the one stream or the other, by version.
        if not line.strip() or line.startswith("cuobjdump info"):
            continue
        match = _LINE.match(line)
        architecture = _ARCHITECTURE.search(match[2]) if match else None
        if match is None or architecture is None:
            raise EnvironmentFailure(f"cuobjdump printed a line that is not understood: {line!r}")
        found[match[1]].append((architecture[1], match[2]))
    return DeviceCode(tuple(found["ELF"]), tuple(found["PTX"]))


def kernels(path: Path) -> Iterator[tuple[str, str]]:
    """(kernel's mangled name, source file or empty) of every cubin in file order; a cubin begins with ("", "").

    The source file is the one nvcc wrote into the names of internal symbols. Takes cuobjdump about a second per 300 MB
    and twice the file in memory. Raises as `device_code` does.
    """
    text = _said("cuobjdump", path, "--dump-elf-symbols")
    unit = ""
    for match in _SYMBOL.finditer(text):
        if match["begins"]:
            unit = ""
            yield "", ""
        elif match["kernel"]:
            yield match["kernel"], ""
        elif not unit:
            # `_INTERNAL_<hash>_<length>_<file>_<hash>`: the length tells where the file's name ends
            unit = match["rest"][: int(match["length"])]
            yield "", re.sub(r"_(cu|cpp|cc|cxx)$", r".\1", unit)


def ptx_kernels(path: Path) -> list[frozenset[str]]:
    """The kernels' mangled names of every PTX text, in file order."""
    blocks = _PTX_BEGINS.split(_said("cuobjdump", path, "--dump-ptx"))[1:]
    return [frozenset(_ENTRY.findall(block)) for block in blocks]


def extracted(path: Path, architecture: str, folder: Path) -> list[Path]:
    """Write the cubins of one architecture to an empty folder; they take the room they take in the file, unpacked."""
    _said("cuobjdump", path, "--extract-elf", f".{architecture}.", cwd=folder)
    return sorted(folder.iterdir())


def sass(cubin: Path) -> str:
    """The machine code of a cubin as text: about four times its size, at about 1.5 MB of cubin a second."""
    return _said("nvdisasm", cubin, "--print-code", "--no-dataflow")


def _said(program: str, path: Path, *options: str, cwd: Path | None = None) -> str:
    """What one of the two programs prints about a file; nothing where there is no device code."""
    done = run([tool(program), *options, path], check=False, timeout=_TIMEOUT_S, cwd=cwd)
    if done.returncode == 0:
        return done.stdout
    # 255 and this sentence is its way to say: nothing here.
    if "does not contain device code" in done.stderr + done.stdout:
        return ""
    said = (done.stderr or done.stdout).strip().splitlines()
    # Killed from outside, for memory perhaps; any other signal is its own stumbling over bad input.
    if done.returncode in (-signal.SIGKILL, -signal.SIGTERM):
        raise EnvironmentFailure(
            f"{program} died by signal {-done.returncode} on {path.name}", details=tuple(said[-12:])
        )
    text = re.sub(r" in '[^']*'", "", said[-1]).strip() if said else f"exit status {done.returncode}"
    raise BrokenObject(f"{program} cannot read it: {text[:300]}")
