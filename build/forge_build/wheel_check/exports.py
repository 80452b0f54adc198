"""Which release of torch has a symbol: committed lists of what differs between releases, made by `torch-exports`."""

from __future__ import annotations

import lzma
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

from packaging.utils import parse_wheel_filename
from packaging.version import Version

from forge_build.wheel_check import archive, elf
from forge_core.console import Console
from forge_core.errors import UsageError
from forge_core.files import atomic_path

FILE = Path(__file__).with_name("torch_exports.txt.xz")

# What a torch extension asks for: at, c10, torch and caffe2 (with their vtables and type names), Python's binding, C shims.
_OURS = re.compile(r"^_Z(?:T[VTISC]|GV|Z)?N?[KRO]?(?:2at|3c10|5torch|6caffe2)|^_Z\d+THP|^(?:aoti_torch|torch|THP)")
_LIBRARY = re.compile(r"^torch/lib/lib(?:c10|c10_cuda|torch|torch_cpu|torch_cuda|torch_python)\.so$")
# Small and first asked for: listed whole, so that "every listed release has it" can be said.
_WHOLE = frozenset({"libc10.so", "libc10_cuda.so"})


@dataclass(frozen=True)
class Exports:
    """What the lists say."""

    releases: tuple[str, ...]
    """Releases of torch that were read, oldest first."""
    symbols: dict[str, tuple[int, str]]
    """Symbol -> (bit per release, library of the newest one that has it)."""

    def having(self, symbol: str) -> tuple[str, ...]:
        """The releases that export a symbol; none where the lists do not tell."""
        bits, _ = self.symbols.get(symbol, (0, ""))
        return tuple(release for at, release in enumerate(self.releases) if bits >> at & 1)

    def library(self, symbol: str) -> str | None:
        """The library that has it, where the lists tell."""
        return self.symbols[symbol][1] if symbol in self.symbols else None


def looks_like_torch(symbol: str) -> bool:
    """Whether a symbol is one that torch's libraries would export."""
    return bool(_OURS.match(symbol))


@cache
def listed() -> Exports:
    """Read the committed lists: 0.1 s, once."""
    lines = lzma.decompress(FILE.read_bytes()).decode().splitlines()
    symbols: dict[str, tuple[int, str]] = {}
    bits, library = 0, ""
    for line in lines[1:]:
        if line.startswith("@"):
            text, library = line[1:].split(" ")
            bits = int(text, 16)
        else:
            symbols[line] = (bits, library)
    return Exports(tuple(lines[0].split(" ")), symbols)


def make(wheels: Sequence[Path], console: Console, target: Path = FILE) -> Exports:
    """Write the lists anew from wheels of torch, oldest release first; equal wheels give equal bytes.

    Raises UsageError when a file is no wheel of torch or there are two of a release.
    """
    found: dict[Version, Path] = {}
    for path in wheels:
        name, version, _, _ = parse_wheel_filename(path.name)
        release = Version(version.public)
        if name != "torch" or release in found:
            raise UsageError(f"{path.name} is no wheel of torch, or the second one of its release")
        found[release] = path
    ordered = sorted(found)
    symbols: dict[str, int] = defaultdict(int)
    libraries: dict[str, str] = {}
    for at, release in enumerate(ordered):
        with console.step("exports", f"torch {release}") as step:
            names = 0
            for library, exported in _exports(found[release]):
                names += len(exported)
                for symbol in exported:
                    symbols[symbol] |= 1 << at
                    libraries[symbol] = library
            step.result(f"{names} symbols")
    everywhere = (1 << len(ordered)) - 1
    groups: dict[tuple[int, str], list[str]] = defaultdict(list)
    for symbol, bits in symbols.items():
        if bits != everywhere or libraries[symbol] in _WHOLE:
            groups[bits, libraries[symbol]].append(symbol)
    lines = [" ".join(map(str, ordered))]
    for (bits, library), names_of in sorted(groups.items()):
        lines += [f"@{bits:x} {library}", *sorted(names_of)]
    with atomic_path(target) as aside:
        aside.write_bytes(lzma.compress("\n".join(lines).encode(), preset=9 | lzma.PRESET_EXTREME))
    listed.cache_clear()
    return Exports(tuple(map(str, ordered)), {s: (b, lib) for (b, lib), group in groups.items() for s in group})


def _exports(wheel: Path) -> Iterator[tuple[str, list[str]]]:
    """(library, symbols that are ours) of a wheel of torch."""
    with archive.opened(wheel) as opened, tempfile.TemporaryDirectory(prefix="sm120-forge-torch-") as folder:
        for member in opened.namelist():
            if _LIBRARY.match(member):
                path = Path(opened.extract(member, folder))
                yield PurePosixPath(member).name, [s for s in elf.read(path).exports if _OURS.match(s)]
                path.unlink()
