"""The numeric test: the image's FP4 kernels asked in a container of their own, before a server is started on them."""

from __future__ import annotations

from pathlib import Path

from forge_core.console import Console
from forge_core.engine import Engine
from forge_validate.checks import CheckResult
from forge_validate.numeric.container import FILE_NAME, ask
from forge_validate.numeric.document import Document, Measured, parse
from forge_validate.numeric.judge import judge, unmeasured
from forge_validate.policy import Policy
from forge_validate.serving import Serving

__all__ = ["FILE_NAME", "Document", "Measured", "ask", "judge", "parse", "run", "unmeasured"]


def run(
    engine: Engine, image: str, serving: Serving, policy: Policy, work: Path, console: Console
) -> tuple[CheckResult, ...]:
    """Ask and judge the kernels that a policy demands; nothing where it demands none. Raises as `ask`."""
    demand = policy.numeric
    if demand is None:
        return ()
    if not serving.has_devices:
        return unmeasured(demand, "the serving has no devices to run kernels on")
    with console.step("numeric", f"{len(demand.kernels)} kernels, before the weights are loaded") as step:
        found, why = ask(engine, image, serving, demand, work, step)
        results = unmeasured(demand, why) if found is None else judge(found, demand)
        for result in results:
            step.say(f"{result.outcome:<10}  {result.check}  {result.explanation}")
        step.result(f"{sum(r.outcome == 'passed' for r in results)} of {len(results)} kernels passed")
    return results
