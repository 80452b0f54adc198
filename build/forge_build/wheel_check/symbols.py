"""Who provides what an object leans on: NEEDED libraries, search paths, undefined symbols, the C library's version."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

import cpp_demangle

from forge_build.manifest import CompileCheck
from forge_build.wheel_check.elf import Elf, Import
from forge_build.wheel_check.environment import Environment
from forge_build.wheel_check.families import (
    C_FAMILY,
    C_FAMILY_VERSION,
    DRIVER,
    GLIBC_NAMED_NODES,
    GLIBC_VERSION,
    PRELOADED,
    PYTHON_SYMBOL,
    UNVERSIONED_C_SYMBOL,
)
from forge_core.model import Finding

# Where the installer puts the parts of a wheel: both below site-packages (PEP 427).
_DATA = re.compile(r"^[^/]+\.data/(?:platlib|purelib)/")


def check_needed(
    where: str, elf: Elf, own: Mapping[str, Elf], spec: CompileCheck, environment: Environment
) -> Iterator[Finding]:
    """Every NEEDED soname is the C library's family, in the wheel itself, or allowed by the manifest and provided."""
    for soname in elf.needed:
        if soname in C_FAMILY or soname in own:
            continue
        if soname not in spec.needed:
            allowed = ", ".join(spec.needed) or "none"
            message = f"NEEDs {soname}; allowed beyond the C library's family: {allowed}"
            yield Finding(kind="needed-not-allowed", where=where, message=message)
        elif soname not in DRIVER and not environment.has(soname):
            message = f"NEEDs {soname}, which no wheel of the environment provides"
            yield Finding(kind="needed-not-provided", where=where, message=message)


def check_search(where: str, elf: Elf) -> Iterator[Finding]:
    """Search paths start at $ORIGIN and stay below the folder the wheel is installed into."""
    place = posixpath.dirname(_DATA.sub("", where))
    for tag, entry in elf.search:
        match = re.match(r"^\$(?:ORIGIN|\{ORIGIN\})(/|$)", entry)
        if match is None:
            yield Finding(kind="rpath", where=where, message=f"{tag} entry {entry!r} does not start at $ORIGIN")
            continue
        below = posixpath.normpath(posixpath.join(place, entry[match.end() :]))
        if PurePosixPath(below).parts[:1] == ("..",) or "$" in below:
            yield Finding(kind="rpath", where=where, message=f"{tag} entry {entry!r} leaves the install folder")


def check_glibc(where: str, elf: Elf, limits: Sequence[tuple[str, tuple[int, int]]]) -> Iterator[Finding]:
    """The newest glibc version node asked for is at most what the platform tag (or the target) promises."""
    asked: list[tuple[tuple[int, int], str]] = []
    for need in elf.version_needs:
        if need.weak or need.library not in C_FAMILY:
            continue
        if match := GLIBC_VERSION.match(need.version):
            asked.append(((int(match[1]), int(match[2])), need.version))
        elif need.version in GLIBC_NAMED_NODES:
            asked.append((GLIBC_NAMED_NODES[need.version], need.version))
    for limit, version in limits:
        if asked and max(asked)[0] > version:
            newest = max(asked)[1]
            symbols = sorted(i.name for i in elf.imports if i.version == newest)[:3]
            used = f" ({', '.join(symbols)})" if symbols else ""
            message = f"needs {newest}{used}, but {limit} promises glibc {version[0]}.{version[1]}"
            yield Finding(kind="glibc-too-new", where=where, message=message)


def check_undefined(where: str, elf: Elf, own: Sequence[Elf], environment: Environment) -> Iterator[Finding]:
    """Every undefined symbol is resolved by the wheel, the C family, the driver, what it NEEDs or what is loaded before."""
    left = [i for i in elf.imports if not _builtin(i, elf) and not any(o.provides(i) for o in own)]
    for library in environment.closure(elf.needed) if left else ():
        left = [i for i in left if not library.provides(i)]
        if not left:
            return
    for soname, asked in PRELOADED:
        # Reading torch's libraries takes seconds: only for symbols that look like theirs.
        if any(asked.search(i.name) for i in left) and (loaded := environment.library(soname)):
            left = [i for i in left if not loaded.provides(i)]
    for symbol in left:
        version = f", version {symbol.version} of {symbol.library}" if symbol.version else ""
        message = f"{demangled(symbol.name)}{version}: nothing in the wheel or its environment provides it"
        yield Finding(kind="undefined-symbol", where=where, message=message)


def _builtin(symbol: Import, elf: Elf) -> bool:
    """Whether it comes from outside any wheel: the C family by its version nodes, the driver, Python itself."""
    if symbol.version is not None and symbol.library in C_FAMILY:
        return bool(C_FAMILY_VERSION.match(symbol.version))
    if PYTHON_SYMBOL.match(symbol.name) or (symbol.version is None and UNVERSIONED_C_SYMBOL.match(symbol.name)):
        return True
    return any(soname in elf.needed and pattern.match(symbol.name) for soname, pattern in DRIVER.items())


def demangled(name: str) -> str:
    """A C++ symbol as its source spells it, with the mangled name behind it; any other as it is."""
    if not name.startswith("_Z"):
        return name
    try:
        return f"{cpp_demangle.demangle(name)} [{name}]"
    except ValueError:
        return name
