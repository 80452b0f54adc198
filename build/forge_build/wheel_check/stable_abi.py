"""`abi3`: what CPython promises to every later version, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator

from abi3info import DATAS, FUNCTIONS
from abi3info.models import PyVersion, Symbol

from forge_build.wheel_check.elf import Elf
from forge_build.wheel_check.families import PYTHON_SYMBOL
from forge_build.wheel_check.metadata import Named
from forge_core.model import Finding

_ONE_VERSION = re.compile(r"\.cpython-(\d)(\d+)[a-z]*-[\w-]+\.so$")


def check(where: str, seen: Elf, named: Named | None) -> Iterator[Finding]:
    """Where the file name says abi3: the module is found by every CPython, and asks it only for the stable ABI."""
    tags = [t for t in named.tags if t.abi == "abi3"] if named else []
    versions = [match for t in tags if (match := re.fullmatch(r"cp(\d)(\d+)", t.interpreter))]
    if not versions:
        return
    oldest = min(PyVersion(int(v[1]), int(v[2])) for v in versions)
    if match := _ONE_VERSION.search(where):
        message = f"is named for CPython {match[1]}.{match[2]} alone, in a wheel tagged abi3: no other finds it"
        yield Finding(kind="abi3", where=where, message=message)
        return
    for symbol in seen.imports:
        if not PYTHON_SYMBOL.match(symbol.name):
            continue
        known = FUNCTIONS.get(Symbol(symbol.name)) or DATAS.get(Symbol(symbol.name))
        if known is None:
            message = f"{symbol.name} is not in the stable ABI, but the wheel is tagged abi3"
            yield Finding(kind="abi3", where=where, message=message)
        elif known.added > oldest:
            message = f"{symbol.name} came with CPython {known.added}, the tag promises {oldest}"
            yield Finding(kind="abi3", where=where, message=message)
