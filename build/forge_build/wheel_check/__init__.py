"""The wheel check: what a wheel's bytes prove without a GPU, against what the manifest allows and demands."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from forge_build.manifest import CompileCheck
from forge_build.wheel_check import archive, cubin, elf, metadata, symbols
from forge_build.wheel_check.archive import Object
from forge_build.wheel_check.cubin import DeviceCode
from forge_build.wheel_check.environment import Environment
from forge_build.wheel_check.report import WheelReport, raise_for, summary, table
from forge_core.model import Finding, file_sha256
from forge_core.record import RecordedObject

__all__ = ["WheelReport", "check", "raise_for", "summary", "table"]

_NAMED_CUBINS = 5


def check(
    wheel: Path,
    spec: CompileCheck,
    *,
    epoch: int | None = None,
    environment: Sequence[Path] = (),
    platform: str | None = None,
) -> WheelReport:
    """Look into a wheel; everything found is in the report, nothing is raised for what is wrong inside it.

    `environment` are the wheel files (or folders) that will be installed beside it: they resolve its NEEDED libraries and
    undefined symbols. `epoch` is the newest time stamp allowed, in seconds; `platform` the target's newest platform
    tag as uv spells it. Objects are streamed to a temporary folder as large as they are.

    Raises UsageError when there is no such file, Refused when it is no zip, IntegrityError when its bytes or those of the
    environment are damaged, EnvironmentFailure when cuobjdump or a file of the environment is missing.
    """
    cubin.tool()
    with tempfile.TemporaryDirectory(prefix="sm120-forge-wheel-") as scratch, archive.opened(wheel) as opened:
        folder = Path(scratch)
        for name in ("objects", "environment"):
            (folder / name).mkdir()
        named, findings = metadata.named(wheel.name)
        findings += archive.check_names(opened, wheel.name, epoch)
        dist_info, more = metadata.dist_info(opened, wheel.name)
        objects, wrong = archive.unpack(opened, dist_info, folder / "objects")
        findings += [*more, *wrong]
        if dist_info is not None:
            findings += metadata.check(opened, named, dist_info, wheel.name, [o.member for o in objects])
        limits = list(metadata.glibc_limits(named, platform))
        recorded, found = _objects(objects, wheel, spec, limits, Environment(environment, folder / "environment"))
        return WheelReport(
            file=wheel.name,
            sha256=file_sha256(wheel),
            size=wheel.stat().st_size,
            objects=recorded,
            findings=(*findings, *found),
        )


def _objects(
    objects: Sequence[Object],
    wheel: Path,
    spec: CompileCheck,
    limits: Sequence[tuple[str, tuple[int, int]]],
    environment: Environment,
) -> tuple[tuple[RecordedObject, ...], list[Finding]]:
    """Everything about the objects, device code and host code."""
    findings: list[Finding] = []
    read: dict[str, elf.Elf] = {}
    device: dict[str, DeviceCode] = {}
    for item in objects:
        try:
            device[item.member] = _device_code(item, read)
        except elf.BrokenObject as error:
            findings.append(Finding(kind="broken-object", where=item.member, message=str(error)))
            continue
        findings += _architectures(item.member, device[item.member], spec)
    if spec.demand and not any(device.values()):
        message = f"no object holds device code, but {', '.join(spec.demand)} is demanded"
        findings.append(Finding(kind="no-device-code", where=wheel.name, message=message))
    own = {o.soname or member.rsplit("/", 1)[-1]: o for member, o in read.items() if o.dynamic}
    own |= {member.rsplit("/", 1)[-1]: o for member, o in read.items() if o.dynamic}
    for member, seen in read.items():
        findings += _host_code(member, seen)
        if not seen.dynamic:
            continue
        findings += symbols.check_needed(member, seen, own, spec, environment)
        findings += symbols.check_search(member, seen)
        findings += symbols.check_glibc(member, seen, limits)
        findings += symbols.check_undefined(member, seen, list(own.values()), environment)
    recorded = tuple(
        RecordedObject(
            path=item.member,
            size=item.size,
            cubins=device.get(item.member, DeviceCode()).counts(),
            ptx=tuple(sorted({a for a, _ in device.get(item.member, DeviceCode()).ptx})),
            needed=read[item.member].needed if item.member in read else (),
        )
        for item in objects
    )
    return recorded, findings


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


def _architectures(where: str, found: DeviceCode, spec: CompileCheck) -> Iterator[Finding]:
    """Cubins and PTX against what is allowed and demanded; an object without device code is fine by itself."""
    if not found:
        return
    counts = found.counts()
    for architecture in counts:
        if architecture not in spec.allow:
            cubins = _some([name for a, name in found.cubins if a == architecture])
            allowed = ", ".join(spec.allow) or "none"
            message = f"holds {architecture} ({cubins}); allowed: {allowed}"
            yield Finding(kind="foreign-architecture", where=where, message=message)
    for architecture in spec.demand:
        if architecture not in counts:
            holds = ", ".join(f"{a} ({_some([n for b, n in found.cubins if b == a])})" for a in counts) or "PTX only"
            message = f"has no cubin for {architecture}; it holds {holds}"
            yield Finding(kind="architecture-missing", where=where, message=message)
    if found.ptx and spec.ptx == "forbid":
        message = f"holds PTX for {', '.join(sorted({a for a, _ in found.ptx}))} ({_some([n for _, n in found.ptx])})"
        yield Finding(kind="ptx-present", where=where, message=message)


def _host_code(where: str, seen: elf.Elf) -> Iterator[Finding]:
    if seen.machine != "EM_X86_64" or seen.bits != 64:
        message = f"is {seen.bits}-bit code for {seen.machine.removeprefix('EM_')}, not for x86_64"
        yield Finding(kind="machine", where=where, message=message)
    if seen.executable_stack:
        yield Finding(kind="executable-stack", where=where, message="asks for an executable stack")
    if seen.text_relocations:
        yield Finding(kind="text-relocations", where=where, message="has relocations in read-only code")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED_CUBINS} more" if len(names) > _NAMED_CUBINS else ""
    return ", ".join(names[:_NAMED_CUBINS]) + more
