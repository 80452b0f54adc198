"""What the dynamic loader reads of an ELF file: names, search paths, symbols with their versions, memory protection."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elftools.common.exceptions import ELFError
from elftools.construct import ConstructError
from elftools.elf.dynamic import DynamicSegment
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerDefSection, GNUVerNeedSection

MAGIC = b"\x7fELF"

# pyelftools trusts the offsets it reads; in a damaged file they lead to any of these.
_DAMAGE = (
    ELFError,
    ConstructError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
    struct.error,
)

_SYMBOL = struct.Struct("<IBBHQQ")
_GLOBAL, _WEAK, _UNIQUE = 1, 2, 10
_DEFAULT, _PROTECTED = 0, 3
_VERSION_WEAK = 0x2


class BrokenObject(ValueError):
    """The file cannot be read as what it claims to be."""


@dataclass(frozen=True)
class Import:
    """An undefined symbol that must be found at load time (weak ones need not and are left out)."""

    name: str
    version: str | None
    library: str | None
    """The soname its version was bound to."""


@dataclass(frozen=True)
class VersionNeed:
    """A version node that a library must define, or the loader refuses the object."""

    library: str
    version: str
    weak: bool


@dataclass(frozen=True)
class Section:
    """Where a section lies: address when loaded, offset in the file, size in bytes."""

    address: int
    offset: int
    size: int


@dataclass(frozen=True)
class Elf:
    """One ELF file as the dynamic loader sees it."""

    machine: str
    """As pyelftools names it, for example `EM_X86_64`."""
    bits: int
    dynamic: bool
    """Has a dynamic section: a shared object or a dynamically linked program."""
    sections: bool
    """Has section headers; without them nobody can list its device code."""
    device_section: bool
    """Has a section with embedded device code."""
    soname: str | None
    needed: tuple[str, ...]
    search: tuple[tuple[str, str], ...]
    """Entries of the search paths: (`RPATH` or `RUNPATH`, entry)."""
    executable_stack: bool
    text_relocations: bool
    imports: tuple[Import, ...]
    exports: Mapping[str, frozenset[str]]
    """Symbol -> its versions; empty set: without a version."""
    version_needs: tuple[VersionNeed, ...]
    places: Mapping[str, Section] = field(default_factory=dict)
    """The named sections that have bytes in the file."""

    def provides(self, wanted: Import) -> bool:
        """Whether this object defines the symbol, in the version that is asked for if it has versions at all."""
        versions = self.exports.get(wanted.name)
        if versions is None:
            return False
        return wanted.version is None or not versions or wanted.version in versions


def read(path: Path) -> Elf:
    """Read an ELF file; raises BrokenObject when it is none or is damaged, OSError as open() does."""
    with path.open("rb") as stream:
        try:
            return _read(ELFFile(stream))
        except _DAMAGE as error:
            raise BrokenObject(f"not a readable ELF file: {str(error) or type(error).__name__}") from error


def _read(elf: Any) -> Elf:
    machine = str(elf["e_machine"])
    host = machine == "EM_X86_64" and elf.elfclass == 64
    tags: list[Any] = []
    if host:
        for segment in elf.iter_segments("PT_DYNAMIC"):
            assert isinstance(segment, DynamicSegment)
            tags.extend(segment.iter_tags())
    needs = tuple(_version_needs(elf)) if tags else ()
    imports, exports = _symbols(elf) if tags else ((), {})
    flags = sum(t.entry.d_val for t in tags if t.entry.d_tag == "DT_FLAGS")
    stacks = [s["p_flags"] for s in elf.iter_segments("PT_GNU_STACK")] if tags else []
    return Elf(
        machine=machine,
        bits=elf.elfclass,
        dynamic=bool(tags),
        sections=elf.num_sections() > 0,
        device_section=any(
            s.name in (".nv_fatbin", "__nv_relfatbin") and s["sh_size"] > 0 for s in elf.iter_sections() if s.name
        ),
        soname=next((t.soname for t in tags if t.entry.d_tag == "DT_SONAME"), None),
        needed=tuple(t.needed for t in tags if t.entry.d_tag == "DT_NEEDED"),
        search=tuple(_search(tags)),
        # Without the segment the loader assumes an executable stack.
        executable_stack=bool(tags) and (not stacks or any(f & 1 for f in stacks)),
        text_relocations=any(t.entry.d_tag == "DT_TEXTREL" for t in tags) or bool(flags & 0x4),
        imports=imports,
        exports=exports,
        version_needs=tuple(VersionNeed(library, name, weak) for _, library, name, weak in needs),
        places={
            s.name: Section(s["sh_addr"], s["sh_offset"], s["sh_size"])
            for s in elf.iter_sections()
            if s.name and s["sh_type"] != "SHT_NOBITS"
        },
    )


def _search(tags: list[Any]) -> Iterator[tuple[str, str]]:
    for tag in tags:
        if tag.entry.d_tag == "DT_RPATH":
            yield from (("RPATH", entry) for entry in tag.rpath.split(":"))
        elif tag.entry.d_tag == "DT_RUNPATH":
            yield from (("RUNPATH", entry) for entry in tag.runpath.split(":"))


def _version_needs(elf: Any) -> Iterator[tuple[int, str, str, bool]]:
    """(index in the version table, library, version, weak)."""
    for section in elf.iter_sections("SHT_GNU_verneed"):
        assert isinstance(section, GNUVerNeedSection)
        for need, auxiliaries in section.iter_versions():
            for aux in auxiliaries:
                yield aux["vna_other"] & 0x7FFF, str(need.name), str(aux.name), bool(aux["vna_flags"] & _VERSION_WEAK)


def _version_definitions(elf: Any) -> Iterator[tuple[int, str]]:
    for section in elf.iter_sections("SHT_GNU_verdef"):
        assert isinstance(section, GNUVerDefSection)
        for definition, auxiliaries in section.iter_versions():
            # The first name is the version's own, the others are its parents.
            yield definition["vd_ndx"] & 0x7FFF, next(iter(auxiliaries)).name


def _symbols(elf: Any) -> tuple[tuple[Import, ...], dict[str, frozenset[str]]]:
    """The dynamic symbol table; unpacked here because pyelftools takes seconds for torch's hundred thousands."""
    table = next(elf.iter_sections("SHT_DYNSYM"), None)
    if table is None:
        return (), {}
    names = elf.get_section(table["sh_link"]).data()
    versym = next(elf.iter_sections("SHT_GNU_versym"), None)
    indexes = [i for (i,) in struct.iter_unpack("<H", versym.data())] if versym is not None else []
    needs = {index: (library, version) for index, library, version, _ in _version_needs(elf)}
    definitions = dict(_version_definitions(elf))
    imports: list[Import] = []
    exports: dict[str, set[str]] = {}
    for number, (at, info, other, section, _value, _size) in enumerate(_SYMBOL.iter_unpack(table.data())):
        bind = info >> 4
        if at == 0 or bind not in (_GLOBAL, _WEAK, _UNIQUE):
            continue
        name = names[at : names.index(b"\0", at)].decode(errors="backslashreplace")
        index = indexes[number] & 0x7FFF if indexes else 1
        if section != 0:
            if other & 3 in (_DEFAULT, _PROTECTED):
                exports.setdefault(name, set()).update({definitions[index]} if index in definitions else ())
        elif bind != _WEAK:
            library, version = needs.get(index, (None, None))
            imports.append(Import(name, version, library))
    return tuple(imports), {name: frozenset(versions) for name, versions in exports.items()}
