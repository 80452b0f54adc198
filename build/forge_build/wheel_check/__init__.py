"""The wheel check: what a wheel's bytes prove without a GPU, against what a manifest demands and a lock holds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from forge_build.manifest import CompileCheck
from forge_build.wheel_check import archive, cubin, elf, metadata, ops, sass, stable_abi, symbols, units
from forge_build.wheel_check.archive import Object
from forge_build.wheel_check.cubin import DeviceCode
from forge_build.wheel_check.environment import Environment
from forge_build.wheel_check.metadata import Named
from forge_build.wheel_check.report import ObjectDetail, WheelReport, lines, raise_for, summary, table
from forge_build.wheel_check.stack import Stack, check_versions
from forge_core.model import Finding, file_sha256
from forge_core.record import RecordedObject

__all__ = ["WheelReport", "check", "lines", "raise_for", "summary", "table"]

_NAMED_CUBINS = 3
_NAMED_OPS = 12


def check(
    wheel: Path,
    spec: CompileCheck,
    *,
    epoch: int | None = None,
    environment: Sequence[Path] = (),
    platform: str | None = None,
    stack: Stack | None = None,
    more: Callable[[str], Sequence[Path]] = lambda soname: (),
) -> WheelReport:
    """Look into a wheel; everything found is in the report, nothing is raised for what is wrong inside it.

    `environment` are the wheel files (or folders) that will be installed beside it: they resolve its NEEDED libraries and
    undefined symbols; `more` brings wheels for a library none of them has. `epoch` is the newest time stamp allowed, in
    seconds; `platform` the target's newest platform tag as uv spells it; `stack` what the lock says. Objects are streamed to
    a temporary folder as large as they are; memory is cuobjdump's, about twice the largest object.

    Raises UsageError when there is no such file, Refused when it is no zip, IntegrityError when its bytes or those of the
    environment are damaged, EnvironmentFailure when a tool or a file of the environment is missing.
    """
    cubin.tool()
    with tempfile.TemporaryDirectory(prefix="sm120-forge-wheel-") as scratch, archive.opened(wheel) as opened:
        folder = Path(scratch)
        for name in ("objects", "environment", "cubins"):
            (folder / name).mkdir()
        named, findings = metadata.named(wheel.name)
        findings += _sizes(wheel.name, wheel.stat().st_size, spec.max_size)
        findings += archive.check_names(opened, wheel.name, epoch)
        dist_info, wrong = metadata.dist_info(opened, wheel.name)
        findings += wrong
        objects, wrong = archive.unpack(opened, dist_info, folder / "objects")
        findings += wrong
        if dist_info is not None:
            findings += metadata.check(opened, named, dist_info, wheel.name, [o.member for o in objects])
        if stack is not None:
            requires = list(metadata.requirements(opened, dist_info))
            findings += check_versions(wheel.name, named, requires, stack)
        judged = _Judged(wheel, spec, named, platform, stack, Environment(environment, folder / "environment", more))
        return judged.report(objects, findings, folder / "cubins")


def _sizes(where: str, size: int, budget: int | None) -> Iterator[Finding]:
    if budget is not None and size > budget:
        message = f"is {size:,} bytes, {size - budget:,} over the budget of {budget:,}"
        yield Finding(kind="oversize", where=where, message=message)


class _Judged:
    """The objects of one wheel, device code and host code."""

    def __init__(
        self,
        wheel: Path,
        spec: CompileCheck,
        named: Named | None,
        platform: str | None,
        stack: Stack | None,
        environment: Environment,
    ) -> None:
        self._wheel, self._spec, self._named, self._stack, self._environment = wheel, spec, named, stack, environment
        self._limits = list(metadata.glibc_limits(named, platform))
        self._read: dict[str, elf.Elf] = {}
        self._device: dict[str, DeviceCode] = {}
        self._details: dict[str, ObjectDetail] = {}

    def report(self, objects: Sequence[Object], findings: Sequence[Finding], scratch: Path) -> WheelReport:
        """Judge every object; `scratch` is an empty folder for single cubins."""
        found = list(findings)
        for item in objects:
            found += _sizes(item.member, item.size, self._spec.max_object_size)
            try:
                self._device[item.member] = _device_code(item, self._read)
                found += self._architectures(item, scratch)
            except elf.BrokenObject as error:
                found.append(Finding(kind="broken-object", where=item.member, message=str(error)))
        if self._spec.demand and not any(self._device.values()):
            message = f"no object holds device code, but {', '.join(self._spec.demand)} is demanded"
            found.append(Finding(kind="no-device-code", where=self._wheel.name, message=message))
        counted = {m: d.instructions for m, d in self._details.items() if self._demanded(m)}
        found += sass.check(self._wheel.name, counted, self._spec)
        found += self._host_code()
        return WheelReport(
            file=self._wheel.name,
            sha256=file_sha256(self._wheel),
            size=self._wheel.stat().st_size,
            objects=tuple(map(self._recorded, objects)),
            findings=tuple(found),
            details=self._details,
        )

    def _demanded(self, member: str) -> bool:
        return any(a in self._spec.demand for a in self._device[member].counts())

    def _architectures(self, item: Object, scratch: Path) -> Iterator[Finding]:
        """Cubins and PTX of an object against what is allowed and demanded: as a whole, then by unit and op."""
        found, seen = self._device[item.member], self._read.get(item.member)
        if not found:
            return
        leads = ops.registered(item.path, seen) if seen is not None else {}
        yield from _whole(item.member, found, self._spec, sorted(leads))
        split: tuple[units.Unit, ...] = ()
        # A cubin by itself is its own unit; an object without the architecture lacks it in all of them.
        is_container = seen is not None or item.path.suffix != ".cubin"
        if is_container and self._demanded(item.member):
            try:
                split = units.units(item.path, seen, found)
            except elf.BrokenObject as error:
                yield Finding(kind="unmeasured", where=item.member, message=str(error))
            yield from units.check(item.member, split, self._spec, leads)
        counts: dict[str, int] = {}
        if sass.wanted(item.member, list(found.counts()), self._spec):
            counts = sass.count(item.path, self._spec, scratch)
        names = {unit.address: unit.name for unit in split}
        self._details[item.member] = ObjectDetail(
            ops={op: tuple(sorted(names[a] for a in to if a in names)) for op, to in sorted(leads.items())},
            units={u.name: tuple(a for a, has in u.kernels.items() if has >= u.every_kernel) for u in split},
            instructions=counts,
        )

    def _host_code(self) -> Iterator[Finding]:
        own = {o.soname or member.rsplit("/", 1)[-1]: o for member, o in self._read.items() if o.dynamic}
        torch_symbols: set[str] = set()
        own |= {member.rsplit("/", 1)[-1]: o for member, o in self._read.items() if o.dynamic}
        for member, seen in self._read.items():
            yield from _host_code(member, seen)
            if not seen.dynamic:
                continue
            yield from symbols.check_needed(member, seen, own, self._spec, self._environment, self._stack)
            yield from symbols.check_search(member, seen)
            yield from symbols.check_glibc(member, seen, self._limits)
            yield from symbols.check_undefined(
                member, seen, list(own.values()), self._environment, self._stack, torch_symbols
            )
            yield from stable_abi.check(member, seen, self._named)
        yield from symbols.fitting_torch(torch_symbols, self._wheel.name)

    def _recorded(self, item: Object) -> RecordedObject:
        found = self._device.get(item.member, DeviceCode())
        return RecordedObject(
            path=item.member,
            size=item.size,
            cubins=found.counts(),
            ptx=tuple(sorted({a for a, _ in found.ptx})),
            needed=self._read[item.member].needed if item.member in self._read else (),
        )


def _device_code(item: Object, read: dict[str, elf.Elf]) -> DeviceCode:
    """List a member's device code; its ELF, if it is one, goes into `read`. Raises BrokenObject."""
    with item.path.open("rb") as stream:
        head = stream.read(4)
    if head == archive.FATBIN_MAGIC:
        return cubin.device_code(item.path)
    if head != elf.MAGIC:
        raise elf.BrokenObject("is named like a shared object but is no ELF file")
    seen = elf.read(item.path)
    if seen.machine in ("EM_CUDA", "190"):
        return cubin.device_code(item.path)
    read[item.member] = seen
    if not seen.sections:
        raise elf.BrokenObject("has no section headers, so its device code cannot be listed")
    found = cubin.device_code(item.path)
    if seen.device_section and not found:
        raise elf.BrokenObject("has a section for device code in which cuobjdump finds none")
    return found


def _whole(where: str, found: DeviceCode, spec: CompileCheck, registered: Sequence[str]) -> Iterator[Finding]:
    """Cubins and PTX of an object against what is allowed and demanded; `registered` are its ops."""
    counts = found.counts()
    for architecture in counts:
        if architecture not in spec.allow:
            cubins = units.some([name for a, name in found.cubins if a == architecture], _NAMED_CUBINS)
            allowed = ", ".join(spec.allow) or "none"
            message = f"holds {architecture} ({cubins}); allowed: {allowed}"
            yield Finding(kind="foreign-architecture", where=where, message=message)
    for architecture in spec.demand:
        if architecture not in counts:
            names = {a: [name for b, name in found.cubins if b == a] for a in counts}
            holds = ", ".join(f"{a} ({units.some(n, _NAMED_CUBINS)})" for a, n in names.items()) or "PTX only"
            whose = f"; its ops: {units.some(registered, _NAMED_OPS)}" if registered else ""
            message = f"has no cubin for {architecture}; it holds {holds}{whose}"
            yield Finding(kind="architecture-missing", where=where, message=message)
    if found.ptx and spec.ptx == "forbid":
        texts = units.some([name for _, name in found.ptx], _NAMED_CUBINS)
        message = f"holds PTX for {', '.join(sorted({a for a, _ in found.ptx}))} ({texts})"
        yield Finding(kind="ptx-present", where=where, message=message)


def _host_code(where: str, seen: elf.Elf) -> Iterator[Finding]:
    if seen.machine != "EM_X86_64" or seen.bits != 64:
        message = f"is {seen.bits}-bit code for {seen.machine.removeprefix('EM_')}, not for x86_64"
        yield Finding(kind="machine", where=where, message=message)
    if seen.executable_stack:
        yield Finding(kind="executable-stack", where=where, message="asks for an executable stack")
    if seen.text_relocations:
        yield Finding(kind="text-relocations", where=where, message="has relocations in read-only code")
