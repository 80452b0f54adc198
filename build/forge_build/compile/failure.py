"""Why a compile failed, and whose fault it is: the machine's when memory or disk gave out, else what the compiler says."""

from __future__ import annotations

from pathlib import Path

from forge_build.compile.progress import Progress
from forge_build.compile.recipe import Order
from forge_core.console import size
from forge_core.errors import EnvironmentFailure, ForgeError, Refused, UsageError
from forge_core.explain import Evidence, explain, read_file


def failure(order: Order, progress: Progress, status: int, out_of_memory: bool, memory: int, log: Path) -> ForgeError:
    """The error for a compile that ended with `status`; `memory` are the bytes it might take."""
    details = tuple(progress.errors) or (progress.last,)
    unit = f"the unit {progress.failed}" if progress.failed else order.spec.recipe
    if out_of_memory or progress.killed or status in (137, 143):
        return EnvironmentFailure(
            f"{order.name}: {unit} was killed, most likely for want of memory ({size(memory)} were free for it)",
            hint="free memory or take a larger machine; fewer compilers run side by side where less is free",
            details=(progress.killed or details[0],),
            log=log,
        )
    if progress.disk_full:
        return EnvironmentFailure(
            f"{order.name}: no space left on the engine's disk while compiling",
            hint="free space: `docker system df` shows who has it",
            details=(progress.disk_full,),
            log=log,
        )
    if status == 3:
        return UsageError(f"{order.name}: the plan does not fit the source", details=details, log=log)
    # Of a unit that failed its own words; where none did, before or after the units, all of the log.
    evidence = Evidence(stage="build", exit_code=status)
    found = explain(details, evidence) if progress.errors else read_file(log, evidence).finding
    if found is not None and found.line is not None and not progress.errors:
        details = (found.message,)
    hint = found.hint if found is not None and found.kind != "compile_error" else None
    return Refused(f"{order.name}: {unit} does not compile", hint=hint, details=details, log=log)
