"""Who provides what an object leans on: NEEDED libraries, search paths, undefined symbols, the C library's version."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from forge_build.manifest import CompileCheck
from forge_build.wheel_check.elf import Elf, Import
from forge_build.wheel_check.environment import Environment
from forge_build.wheel_check.exports import listed, looks_like_torch
from forge_build.wheel_check.families import (
    C_FAMILY,
    C_FAMILY_VERSION,
    DRIVER,
    GLIBC_NAMED_NODES,
    GLIBC_VERSION,
    PRELOADED,
    PYTHON_SYMBOL,
    SYMBOLS_OF,
    UNVERSIONED_C_SYMBOL,
)
from forge_build.wheel_check.names import demangled
from forge_build.wheel_check.stack import Stack, cuda_major
from forge_core.model import Finding

# Where the installer puts the parts of a wheel: both below site-packages (PEP 427).
_DATA = re.compile(r"^[^/]+\.data/(?:platlib|purelib)/")


def check_needed(
    where: str, elf: Elf, own: Mapping[str, Elf], spec: CompileCheck, environment: Environment, stack: Stack | None
) -> Iterator[Finding]:
    """Every NEEDED soname is in the base or the wheel itself, or allowed and provided, and of the lock's CUDA."""
    base = stack.base if stack else C_FAMILY
    locked = stack.cuda if stack else None
    for soname in elf.needed:
        if soname in base or soname in own:
            continue
        major = cuda_major(soname)
        if stack and locked and major and major != locked[0]:
            message = f"NEEDs {soname} of CUDA {major}; the lock {stack.name!r} is CUDA {locked[0]} ({locked[1]})"
            yield Finding(kind="cuda-major", where=where, message=message)
        elif spec.needed != "provided" and soname not in spec.needed:
            allowed = ", ".join(spec.needed) or "none"
            message = f"NEEDs {soname}; allowed beyond the base: {allowed}"
            yield Finding(kind="needed-not-allowed", where=where, message=message)
        elif soname not in DRIVER and not environment.has(soname):
            message = f"NEEDs {soname}, which neither the base nor a wheel of the environment provides"
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


def check_undefined(
    where: str,
    elf: Elf,
    own: Sequence[Elf],
    environment: Environment,
    stack: Stack | None,
    torch_symbols: set[str] | None = None,
) -> Iterator[Finding]:
    """Every undefined symbol is resolved by the wheel, the base, the driver, what it NEEDs or what is loaded before.

    What a NEEDED library that is not there would have is left out: its absence is the finding. `torch_symbols` collects those
    of torch's that are undefined.
    """
    base = stack.base if stack else C_FAMILY
    left = [i for i in elf.imports if not _builtin(i, elf, base) and not any(o.provides(i) for o in own)]
    for library in environment.closure(elf.needed) if left else ():
        left = [i for i in left if not library.provides(i)]
        if not left:
            return
    for soname, asked in PRELOADED:
        # Reading torch's libraries takes seconds: only for symbols that look like theirs.
        if any(asked.search(i.name) for i in left) and (loaded := environment.library(soname)):
            left = [i for i in left if not loaded.provides(i)]
    absent = {soname for soname in elf.needed if soname not in base and not environment.has(soname)}
    for symbol in left:
        torch = looks_like_torch(symbol.name)
        if (listed().library(symbol.name) if torch else symbol.library) in absent or _of_absent(symbol.name, absent):
            continue
        if torch and torch_symbols is not None:
            torch_symbols.add(symbol.name)
        version = f", version {symbol.version} of {symbol.library}" if symbol.version else ""
        nothing = _lacking(symbol.name, stack) if torch else "nothing in the wheel or its environment provides it"
        yield Finding(kind="undefined-symbol", where=where, message=f"{demangled(symbol.name)}{version}: {nothing}")


def fitting_torch(symbols: Collection[str], wheel: str) -> Iterator[Finding]:
    """Which listed releases of torch export every one of these symbols."""
    lists = listed()
    known = [set(lists.having(symbol)) for symbol in symbols if lists.having(symbol)]
    if not known:
        return
    fits = [release for release in lists.releases if all(release in having for having in known)]
    unknown = len(symbols) - len(known)
    message = f"torch {', '.join(fits)}" if fits else f"no torch of {', '.join(lists.releases)}"
    message += f" exports all of the {len(known)} undefined symbols of torch's that the lists know"
    message += f"; {unknown} more are unknown" if unknown else ""
    yield Finding(kind="torch-release", where=wheel, message=message, severity="info")


def _of_absent(symbol: str, absent: Collection[str]) -> bool:
    """Whether a symbol without a version is one of a library that is not there."""
    return any(
        pattern.match(symbol) and any(library.match(soname) for soname in absent) for library, pattern in SYMBOLS_OF
    )


def _lacking(symbol: str, stack: Stack | None) -> str:
    """Who lacks a symbol of torch's and who has it."""
    lists = listed()
    lacks = f"torch {stack.torch} of the lock does not export it" if stack and stack.torch else "no torch exports it"
    releases = lists.having(symbol)
    if releases == lists.releases:
        return f"{lacks}; every listed release does ({releases[0]} to {releases[-1]}, in {lists.library(symbol)})"
    if releases:
        return f"{lacks}; torch {', '.join(releases)} does (of {lists.releases[0]} to {lists.releases[-1]})"
    return f"{lacks}; which torch does is unknown (listed: {', '.join(lists.releases)})"


def _builtin(symbol: Import, elf: Elf, base: frozenset[str]) -> bool:
    """Whether it comes from outside any wheel: the base by its version nodes, the driver, Python itself."""
    if symbol.version is not None and symbol.library in C_FAMILY:
        return bool(C_FAMILY_VERSION.match(symbol.version))
    if symbol.library in base:
        return True
    if PYTHON_SYMBOL.match(symbol.name) or (symbol.version is None and UNVERSIONED_C_SYMBOL.match(symbol.name)):
        return True
    return any(soname in elf.needed and pattern.match(symbol.name) for soname, pattern in DRIVER.items())
