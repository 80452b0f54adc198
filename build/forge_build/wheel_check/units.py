"""Kernels by unit and architecture: one op may lack what the object as a whole has."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path

from forge_build.manifest import CompileCheck
from forge_build.wheel_check import cubin, fatbin
from forge_build.wheel_check.cubin import DeviceCode
from forge_build.wheel_check.elf import BrokenObject, Elf
from forge_build.wheel_check.names import demangled_kernel
from forge_core.model import Finding

_NAMED_KERNELS = 3
_NAMED_OPS = 12


@dataclass(frozen=True)
class Unit:
    """What one source file left in an object."""

    address: int
    """Of its container, when loaded."""
    name: str
    """The source file, where the compiler left its name."""
    kernels: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Architecture -> mangled names of the kernels its cubin holds."""
    ptx: tuple[str, ...] = ()
    """Architectures of its PTX texts."""
    ptx_kernels: frozenset[str] = frozenset()

    @property
    def every_kernel(self) -> frozenset[str]:
        """Whatever any of its cubins or PTX texts holds."""
        return frozenset(self.ptx_kernels.union(*self.kernels.values()))


def units(path: Path, seen: Elf | None, code: DeviceCode) -> tuple[Unit, ...]:
    """Split an object's device code by source file.

    Raises BrokenObject when the containers do not add up to what cuobjdump lists, EnvironmentFailure as cuobjdump does.
    """
    found = list(fatbin.containers(path, seen))
    cubins = sum(kinds.count(fatbin.CUBIN) for _, kinds in found)
    if cubins != len(code.cubins) or sum(kinds.count(fatbin.PTX) for _, kinds in found) != len(code.ptx):
        raise BrokenObject(f"{len(found)} containers hold {cubins} cubins, cuobjdump lists {len(code.cubins)}")
    blocks = _blocks(path)
    if len(blocks) != cubins:
        raise BrokenObject(f"cuobjdump lists {cubins} cubins and the symbols of {len(blocks)}")
    texts = cubin.ptx_kernels(path) if code.ptx else []
    made: list[Unit] = []
    next_cubin = next_ptx = 0
    for number, (address, kinds) in enumerate(found, 1):
        kernels: dict[str, frozenset[str]] = {}
        source = ""
        for _ in range(kinds.count(fatbin.CUBIN)):
            architecture = code.cubins[next_cubin][0]
            names, file = blocks[next_cubin]
            kernels[architecture] = kernels.get(architecture, frozenset()) | names
            source = source or file
            next_cubin += 1
        ptx = range(next_ptx, next_ptx + kinds.count(fatbin.PTX))
        next_ptx = ptx.stop
        in_ptx = frozenset().union(*(texts[i] for i in ptx if i < len(texts)))
        every = in_ptx.union(*kernels.values())
        made.append(
            Unit(
                address=address,
                name=_unique(source or _by_kernel(every, number), {u.name for u in made}),
                kernels=kernels,
                ptx=tuple(code.ptx[i][0] for i in ptx),
                ptx_kernels=in_ptx,
            )
        )
    return tuple(made)


def _by_kernel(kernels: Collection[str], number: int) -> str:
    """A name for a unit that tells nothing of its source file: by the first of its kernels."""
    named = sorted(kernels)
    return f"the unit of {demangled_kernel(named[0]).split('<')[0]}" if named else f"unit {number}"


def _unique(name: str, taken: Collection[str]) -> str:
    """The name, or the name with the first number that makes it another."""
    return next(n for n in chain([name], (f"{name} ({i})" for i in count(2))) if n not in taken)


def _blocks(path: Path) -> list[tuple[frozenset[str], str]]:
    """(kernels, source file or empty) of every cubin."""
    blocks: list[tuple[set[str], str]] = []
    for kernel, source in cubin.kernels(path):
        if kernel:
            blocks[-1][0].add(kernel)
        elif source:
            blocks[-1] = (blocks[-1][0], source)
        else:
            blocks.append((set(), ""))
    return [(frozenset(names), source) for names, source in blocks]


def check(
    where: str, found: Sequence[Unit], spec: CompileCheck, ops: Mapping[str, frozenset[int]]
) -> Iterator[Finding]:
    """Every kernel of every unit has a cubin for each demanded architecture, in its own unit.

    A unit's host code registers its own container alone, so a namesake in another unit does not help. `ops` are the
    addresses of the containers each registered op leads to.
    """
    for unit in found:
        for architecture in spec.demand:
            missing = sorted(unit.every_kernel - unit.kernels.get(architecture, frozenset()))
            if not missing:
                continue
            of = sorted(op for op, addresses in ops.items() if unit.address in addresses)
            whose = f"op {some(of, _NAMED_OPS)}: " if of else ""
            holds = [*unit.kernels, *(f"PTX for {a}" for a in unit.ptx)]
            message = (
                f"{whose}{unit.name} has no cubin for {architecture} of {len(missing)} of its {len(unit.every_kernel)} "
                f"kernels: {some([demangled_kernel(n) for n in missing], _NAMED_KERNELS)}; it holds {', '.join(holds)}"
            )
            yield Finding(kind="op-without-architecture", where=where, message=message)


def some(names: Sequence[str], most: int) -> str:
    """The first names and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
