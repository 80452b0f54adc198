"""Device code by unit of compilation: each source file has a container of its own, with one entry per architecture."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from forge_build.wheel_check.elf import BrokenObject, Elf, Section

SECTIONS = (".nv_fatbin", "__nv_relfatbin")

# Read off what nvcc 12.9 and 13.0 write: magic, version, header size, size of all entries; then entries, each with its
# kind, version, header size and padded size.
_MAGIC = 0xBA55ED50
_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQ")
PTX, CUBIN = 1, 2


def containers(path: Path, seen: Elf | None) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(address, kinds of its entries) of every container in a shared object, or in a fatbin file when `seen` is none.

    Reads headers alone. Raises BrokenObject where something else stands.
    """
    if seen is None:
        section = Section(0, 0, path.stat().st_size)
    else:
        named = [seen.places[name] for name in SECTIONS if name in seen.places and seen.places[name].size]
        if not named:
            return
        section = named[0]
    with path.open("rb") as stream:
        at = 0
        while at + _CONTAINER.size <= section.size:
            magic, _, header, size = _read(stream, section.offset + at, _CONTAINER)
            if magic == 0:
                at += 8
                continue
            if magic != _MAGIC or header < _CONTAINER.size or at + header + size > section.size:
                raise BrokenObject(f"what stands at byte {at} of its device code is no container")
            yield section.address + at, tuple(_kinds(stream, section.offset + at + header, size))
            at += header + size


def _kinds(stream: BinaryIO, begin: int, size: int) -> Iterator[int]:
    at = begin
    while at + _ENTRY.size <= begin + size:
        kind, _, header, padded = _read(stream, at, _ENTRY)
        if header < _ENTRY.size or at + header + padded > begin + size:
            raise BrokenObject("an entry of its device code does not fit its container")
        yield kind
        at += header + padded


def _read(stream: BinaryIO, at: int, layout: struct.Struct) -> tuple[int, ...]:
    stream.seek(at)
    data = stream.read(layout.size)
    if len(data) < layout.size:
        raise BrokenObject("its device code is cut off")
    return layout.unpack(data)
