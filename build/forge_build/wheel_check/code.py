"""Host code of a shared object, as far as references tell: which function leads to which, and who registers which kernels.

No disassembler: calls, jumps and address loads relative to the instruction are found by their bytes, and count only where they
hit the begin of a function, an import's stub, a slot of the loader or a known place. What goes through a pointer in memory
(a virtual call, a table) is not followed.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from forge_build.wheel_check.elf import BrokenObject, Section

# jmp rel8; call/jmp rel32; jcc rel32; mov/lea r64, [rip + disp32]
_REFERENCE = re.compile(
    rb"\xeb|[\xe8\xe9]|\x0f[\x80-\x8f]|[\x48\x4c][\x8b\x8d][\x05\x0d\x15\x1d\x25\x2d\x35\x3d]", re.DOTALL
)
_JUMP_TO_SLOT = re.compile(rb"\xff\x25(....)", re.DOTALL)
_SYMBOL = struct.Struct("<IBBHQQ")
_RELOCATION = struct.Struct("<QQq")
_GLOB_DAT, _JUMP_SLOT, _RELATIVE, _ABSOLUTE = 6, 7, 8, 1
_REGISTER = "__cudaRegisterFunction"
_WRAPPER_SIZE = 24
_MOST_FUNCTIONS = 50_000


@dataclass
class Code:
    """One shared object's code, read on demand. Raises BrokenObject when it lacks the tables that compilers leave."""

    path: Path
    places: Mapping[str, Section]

    @cached_property
    def functions(self) -> list[int]:
        """Begins of all functions, sorted."""
        return sorted(self._sizes)

    @cached_property
    def exported(self) -> dict[str, int]:
        """Dynamic symbols that are defined here: name -> address."""
        return {name: value for name, section, value in self._symbols if section}

    @cached_property
    def slots(self) -> dict[int, int | str]:
        """Where the loader writes an address: our own (a number) or a foreign symbol's (its name)."""
        found: dict[int, int | str] = {}
        for name in (".rela.dyn", ".rela.plt"):
            for at, info, addend in _RELOCATION.iter_unpack(self.section(name)):
                kind, number = info & 0xFFFFFFFF, info >> 32
                if kind == _RELATIVE:
                    found[at] = addend
                elif kind in (_GLOB_DAT, _JUMP_SLOT, _ABSOLUTE) and number < len(self._symbols):
                    symbol, section, value = self._symbols[number]
                    found[at] = value if section else symbol
        return found

    @cached_property
    def stubs(self) -> dict[int, int | str]:
        """Begins of the linker's stubs for calls through a slot, with what the slot holds."""
        found: dict[int, int | str] = {}
        for name in (".plt", ".plt.sec", ".plt.got"):
            section = self.places.get(name)
            for match in _JUMP_TO_SLOT.finditer(self.section(name)) if section else ():
                assert section is not None
                (offset,) = struct.unpack("<i", match[1])
                if (target := self.slots.get(section.address + match.end() + offset)) is not None:
                    found[section.address + match.start() // 8 * 8] = target
        return found

    @cached_property
    def kernels(self) -> dict[int, set[int]]:
        """Host function that stands for a kernel -> addresses of the containers that hold the kernel."""
        segment = self.places.get(".nvFatBinSegment")
        found: dict[int, set[int]] = {}
        if segment is None:
            return found
        for function in self.functions:
            for target in self.references(function):
                if not isinstance(target, int) or not segment.address <= target < segment.address + segment.size:
                    continue
                wrapper = segment.address + (target - segment.address) // _WRAPPER_SIZE * _WRAPPER_SIZE
                container = self.slots.get(wrapper + 8)
                if not isinstance(container, int):
                    continue
                # The registrations are inlined here, or in a function of their own that this one names.
                for registering in {function, *(t for t in self.references(function) if isinstance(t, int))}:
                    for kernel in self._registered(registering):
                        found.setdefault(kernel, set()).add(container)
        return found

    def reaches(self, begin: int) -> frozenset[int]:
        """Addresses of the containers of all kernels that a function leads to."""
        queue, seen, found = [begin], {begin}, set[int]()
        while queue and len(seen) < _MOST_FUNCTIONS:
            function = queue.pop()
            found |= self.kernels.get(function, set())
            if self._registers(function):
                continue
            for target in self.references(function):
                if isinstance(target, int) and target not in seen and self.begins(target):
                    seen.add(target)
                    queue.append(target)
        return frozenset(found)

    def references(self, function: int) -> tuple[int | str, ...]:
        """What a function refers to, in the order of its code: addresses of ours, names of imports."""
        if function not in self._cached:
            self._cached[function] = tuple(self._refer(function))
        return self._cached[function]

    def section(self, name: str) -> bytes:
        """A section's bytes; none where there is no such section."""
        place = self.places.get(name)
        if place is None:
            return b""
        with self.path.open("rb") as stream:
            stream.seek(place.offset)
            return stream.read(place.size)

    @cached_property
    def _cached(self) -> dict[int, tuple[int | str, ...]]:
        return {}

    @cached_property
    def _sizes(self) -> dict[int, int]:
        """Begin of a function -> bytes: the unwinder's tables have them even where symbols were stripped."""
        place, frames = self.places.get(".eh_frame_hdr"), self.places.get(".eh_frame")
        data, entries = self.section(".eh_frame_hdr"), self.section(".eh_frame")
        # version 1; pointer and count as 4-byte values, a table of pairs relative to the section
        if place is None or frames is None or len(data) < 12 or data[0] != 1 or data[2] != 0x03 or data[3] != 0x3B:
            raise BrokenObject("its unwind table is of a form that is not known")
        (count,) = struct.unpack_from("<I", data, 8)
        found = {}
        for begin, entry in struct.iter_unpack("<ii", data[12 : 12 + 8 * count]):
            # length, pointer to the common part, then begin (relative) and size
            offset = place.address + entry - frames.address
            (size,) = struct.unpack_from("<I", entries, offset + 12)
            found[place.address + begin] = size
        return found

    @cached_property
    def _symbols(self) -> list[tuple[str, int, int]]:
        """(name, section, value) by number."""
        names = self.section(".dynstr")
        return [
            (names[at : names.index(b"\0", at)].decode(errors="replace"), section, value)
            for at, _, _, section, value, _ in _SYMBOL.iter_unpack(self.section(".dynsym"))
        ]

    @cached_property
    def _text(self) -> tuple[int, bytes]:
        return self.places[".text"].address if ".text" in self.places else 0, self.section(".text")

    def begins(self, address: int) -> bool:
        """Whether a function begins at this address."""
        at = bisect_right(self.functions, address) - 1
        return at >= 0 and self.functions[at] == address

    def _registers(self, function: int) -> bool:
        return self.begins(function) and _REGISTER in self.references(function)

    def _registered(self, function: int) -> Iterator[int]:
        """The host functions that a function registers as kernels: the last one named before each call."""
        last = None
        for target in self.references(function) if self._registers(function) else ():
            if isinstance(target, int):
                last = target if self.begins(target) else last
            elif target == _REGISTER and last is not None:
                yield last
                last = None

    def _refer(self, function: int) -> Iterator[int | str]:
        base, text = self._text
        begin = function - base
        end = min(begin + self._sizes.get(function, 0), len(text))
        if begin < 0:
            return
        for match in _REFERENCE.finditer(text, begin, end):
            at = match.end()
            width = 1 if match[0] == b"\xeb" else 4
            target = base + at + width + int.from_bytes(text[at : at + width], "little", signed=True)
            if match[0][-2:-1] == b"\x8b":
                # a load: what the loader wrote there
                if (held := self.slots.get(target)) is not None:
                    yield held
            elif (stub := self.stubs.get(target)) is not None:
                yield stub
            else:
                yield target
