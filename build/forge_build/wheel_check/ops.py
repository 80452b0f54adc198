"""Ops an object registers, and the units of device code that each of them leads to."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from forge_build.wheel_check.code import Code
from forge_build.wheel_check.elf import BrokenObject, Elf

# A schema as torch's library takes it: a name, arguments that begin with a type, an arrow.
_SCHEMA = re.compile(
    rb"(?<=\0)([A-Za-z_]\w*(?:::[A-Za-z_]\w*)?(?:\.\w+)?)\(\s*(?:\)|(?:Tensor|int|SymInt|float|bool|str|Scalar|Device|Layout|Generator"
    rb"|MemoryFormat|Dict|Any|\*|\(|__torch__)[^\0]*?\))\s*->\s*[^\0]{1,400}(?=\0)"
)
_TVM_FFI = "__tvm_ffi_"


def registered(path: Path, seen: Elf) -> dict[str, frozenset[int]]:
    """Op -> addresses of the containers its code leads to; empty where it cannot be followed.

    Ops are the schemas of torch's library among the constants, and the functions exported for tvm-ffi.
    """
    schemas = _schemas(path, seen)
    functions = {name.removeprefix(_TVM_FFI): name for name in seen.exports if name.startswith(_TVM_FFI)}
    found: dict[str, frozenset[int]] = dict.fromkeys([*schemas.values(), *functions], frozenset())
    if not found:
        return {}
    code = Code(path, seen.places)
    try:
        begins: dict[str, set[int]] = defaultdict(set)
        for op, name in functions.items():
            begins[op].add(code.exported[name])
        if schemas:
            for op, begin in _implementations(code, set(schemas.values()), schemas):
                begins[op].add(begin)
        for op, starts in begins.items():
            found[op] = frozenset().union(*(code.reaches(begin) for begin in starts))
    except (BrokenObject, LookupError, ValueError):
        # Stripped or built in a way that is not known: the ops are still named, what they lead to is not.
        return dict.fromkeys(found, frozenset())
    return found


def _schemas(path: Path, seen: Elf) -> dict[int, str]:
    """Address of a schema's text -> op."""
    place = seen.places.get(".rodata")
    if place is None:
        return {}
    with path.open("rb") as stream:
        stream.seek(place.offset)
        data = b"\0" + stream.read(place.size)
    return {place.address + m.start() - 1: m[1].decode() for m in _SCHEMA.finditer(data)}


def _implementations(code: Code, ops: set[str], schemas: Mapping[int, str]) -> Iterator[tuple[str, int]]:
    """(op, begin of a function that implements it).

    A function of the op's name that the object exports is it; for other ops, the functions named beside its text where
    the library is registered.
    """
    plain = {op.rsplit("::", 1)[-1].split(".")[0]: op for op in ops}
    left = set(ops)
    for symbol, address in code.exported.items():
        if (name := _base_name(symbol)) in plain:
            left.discard(plain[name])
            yield plain[name], address
    if not left:
        return
    texts = {**_names(code, {plain_name: op for plain_name, op in plain.items()}), **schemas}
    for function in code.functions:
        references = [r for r in code.references(function) if isinstance(r, int)]
        if any(r in texts for r in references):
            yield from ((op, begin) for op, begin in _paired(code, references, texts) if op in left)


def _paired(code: Code, references: Sequence[int], texts: Mapping[int, str]) -> Iterator[tuple[str, int]]:
    """(op, function) for the functions that registering code names between its ops' texts.

    A compiler loads the function before the text or after it, and does so alike throughout: which one shows at the first.
    What is named more than once is a helper.
    """
    times = Counter(references)
    marks = [r for r in references if r in texts or (times[r] == 1 and code.begins(r))]
    if marks and marks[0] not in texts:
        marks.reverse()
    current: str | None = None
    for mark in marks:
        if mark in texts:
            current = texts[mark]
        elif current is not None:
            yield current, mark


def _names(code: Code, ops: Mapping[str, str]) -> dict[int, str]:
    """Addresses of the texts that are an op's bare name, as `m.impl` takes it."""
    place = code.places.get(".rodata")
    if place is None or not ops:
        return {}
    data = b"\0" + code.section(".rodata")
    names = rb"|".join(re.escape(name.encode()) for name in sorted(ops, key=len, reverse=True))
    pattern = re.compile(rb"(?<=\0)(" + names + rb")(?=\0)")
    return {place.address + m.start() - 1: ops[m[1].decode()] for m in pattern.finditer(data)}


def _base_name(symbol: str) -> str:
    """The last name of a plain or nested C++ function, for example `awq_dequantize` of `_Z14awq_dequantizeN2at...`."""
    if not symbol.startswith("_Z"):
        return symbol
    at = 3 if symbol.startswith("_ZN") else 2
    name = ""
    while match := re.compile(r"(\d+)").match(symbol, at):
        begin = match.end()
        at = begin + int(match[1])
        name = symbol[begin:at]
        if not symbol.startswith("_ZN"):
            break
    return name
