"""What the wheel check saw, and how it is shown."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rich.table import Table

from forge_build.wheel_check.families import C_FAMILY
from forge_core.errors import Refused
from forge_core.model import Finding
from forge_core.record import RecordedObject

# A wheel that misses torch altogether has thousands of undefined symbols.
_SHOWN_OF_A_KIND = 20


@dataclass(frozen=True)
class WheelReport:
    """What one wheel holds, and what is wrong with it."""

    file: str
    sha256: str
    size: int
    """Bytes."""
    objects: tuple[RecordedObject, ...]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """No finding of severity error."""
        return all(f.severity != "error" for f in self.findings)

    @property
    def architectures(self) -> tuple[str, ...]:
        """Cubin architectures of all objects, sorted."""
        return tuple(sorted({a for o in self.objects for a in o.cubins}))


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
    plural = "s" if len(errors) > 1 else ""
    raise Refused(f"the wheel check refuses {report.file}: {len(errors)} finding{plural}", details=tuple(details))


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
    return ", ".join(parts)


def table(report: WheelReport) -> Table:
    """The objects as a table for -v."""
    drawn = Table(title=report.file, title_justify="left", box=None, pad_edge=False)
    for heading in ("object", "size", "cubins", "PTX", "needs"):
        drawn.add_column(heading, justify="right" if heading == "size" else "left", overflow="fold")
    for item in report.objects:
        drawn.add_row(
            item.path,
            f"{item.size:,}",
            ", ".join(f"{a} x{n}" for a, n in item.cubins.items()) or "-",
            ", ".join(item.ptx) or "-",
            ", ".join(n for n in item.needed if n not in C_FAMILY) or "-",
        )
    return drawn
