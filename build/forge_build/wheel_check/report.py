"""What the wheel check saw, and how it is shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from forge_build.wheel_check.families import C_FAMILY
from forge_build.wheel_check.hints import HINTS
from forge_core.console import size
from forge_core.errors import Refused
from forge_core.model import Finding
from forge_core.record import RecordedObject

# A wheel that misses torch altogether has thousands of undefined symbols.
_SHOWN_OF_A_KIND = 20


@dataclass(frozen=True)
class ObjectDetail:
    """What an object's device code is for."""

    ops: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Registered op (torch's library or tvm-ffi) -> units it leads to; none where they cannot be followed."""
    units: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Unit of compilation -> architectures for which it holds every one of its kernels."""
    instructions: Mapping[str, int] = field(default_factory=dict)
    """Demanded pattern -> how often it is there for the demanded architectures."""


@dataclass(frozen=True)
class WheelReport:
    """What one wheel holds, and what is wrong with it."""

    file: str
    sha256: str
    size: int
    """Bytes."""
    objects: tuple[RecordedObject, ...]
    findings: tuple[Finding, ...]
    details: Mapping[str, ObjectDetail] = field(default_factory=dict)
    """By path of the object, where there is device code."""

    @property
    def ok(self) -> bool:
        """No finding of severity error."""
        return all(f.severity != "error" for f in self.findings)

    @property
    def architectures(self) -> tuple[str, ...]:
        """Cubin architectures of all objects, sorted."""
        return tuple(sorted({a for o in self.objects for a in o.cubins}))

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        return {
            "file": self.file,
            "sha256": self.sha256,
            "size": self.size,
            "ok": self.ok,
            "objects": [
                {
                    **item.model_dump(mode="json"),
                    "ops": dict(detail.ops),
                    "units": dict(detail.units),
                    "instructions": dict(detail.instructions),
                }
                for item in self.objects
                for detail in [self.details.get(item.path, ObjectDetail())]
            ],
            "findings": [{**f.model_dump(mode="json"), "hint": HINTS.get(f.kind)} for f in self.findings],
        }


def raise_for(report: WheelReport) -> None:
    """Raise Refused (exit 1) with every finding, unless the report is ok."""
    if report.ok:
        return
    errors = [f for f in report.findings if f.severity == "error"]
    details = []
    for kind, count in Counter(f.kind for f in errors).items():
        of_kind = [f for f in errors if f.kind == kind][:_SHOWN_OF_A_KIND]
        details += [f"{f.kind}: {f.where}: {f.message}" for f in of_kind]
        if count > len(of_kind):
            details.append(f"{kind}: and {count - len(of_kind)} more")
    hint = HINTS.get(errors[0].kind) if len({f.kind for f in errors}) == 1 else None
    plural = "s" if len(errors) > 1 else ""
    raise Refused(
        f"the wheel check refuses {report.file}: {len(errors)} finding{plural}", details=tuple(details), hint=hint
    )


def summary(report: WheelReport) -> str:
    """One line: `1 shared object, sm_120a x1, no PTX, needs libcudart.so.13`."""
    count = len(report.objects)
    cubins: Counter[str] = Counter()
    for item in report.objects:
        cubins.update(item.cubins)
    parts = [f"{count} shared object{'' if count == 1 else 's'}"]
    parts += [f"{architecture} x{number}" for architecture, number in sorted(cubins.items())] or ["no cubins"]
    ptx = sorted({p for o in report.objects for p in o.ptx})
    parts.append(f"PTX {', '.join(ptx)}" if ptx else "no PTX")
    inside = {o.path.rsplit("/", 1)[-1] for o in report.objects}
    needed = sorted({n for o in report.objects for n in o.needed} - C_FAMILY - inside)
    parts.append(f"needs {', '.join(needed)}" if needed else "needs only the C library's family")
    instructions: Counter[str] = Counter()
    for detail in report.details.values():
        instructions.update(detail.instructions)
    parts += [f"{pattern} x{number}" for pattern, number in sorted(instructions.items())]
    return ", ".join(parts)


def table(report: WheelReport) -> Table:
    """The objects as a table."""
    drawn = Table(title=report.file, title_justify="left", box=None, pad_edge=False)
    for heading in ("object", "size", "cubins", "PTX", "ops", "needs"):
        drawn.add_column(heading, justify="right" if heading in ("size", "ops") else "left", overflow="fold")
    for item in report.objects:
        drawn.add_row(
            item.path,
            size(item.size),
            ", ".join(f"{a} x{n}" for a, n in item.cubins.items()) or "-",
            ", ".join(item.ptx) or "-",
            str(len(report.details[item.path].ops)) if item.path in report.details else "-",
            ", ".join(n for n in item.needed if n not in C_FAMILY) or "-",
        )
    return drawn


def lines(report: WheelReport) -> list[str]:
    """The findings for people: by kind, in the order of `HINTS`; the cause, then its places, then the hint."""
    shown = []
    order = {kind: number for number, kind in enumerate(HINTS)}
    kinds = sorted({f.kind for f in report.findings}, key=lambda kind: order.get(kind, len(order)))
    for kind in kinds:
        found = [f for f in report.findings if f.kind == kind]
        shown.append(f"{kind} ({found[0].severity}, {len(found)})")
        # One sentence for all places that have it.
        places: dict[str, list[str]] = {}
        for finding in found:
            places.setdefault(finding.message, []).append(finding.where)
        for message, where in list(places.items())[:_SHOWN_OF_A_KIND]:
            shown.append(f"  {message}")
            shown.append(f"    in {', '.join(where)}")
        if len(places) > _SHOWN_OF_A_KIND:
            shown.append(f"  and {len(places) - _SHOWN_OF_A_KIND} more (--json has them all)")
        if kind in HINTS:
            shown.append(f"  hint: {HINTS[kind]}")
    return shown
