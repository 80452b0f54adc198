"""The first half of the line for a server that runs already: attach, ask, judge. No engine, no registry, no GPU of ours."""

from __future__ import annotations

from pathlib import Path

from forge_core.console import Console
from forge_core.errors import UsageError
from forge_validate.bench import bench_of_others, rules_of
from forge_validate.examine import examine
from forge_validate.line import Walked, Wish
from forge_validate.receipt import ServerSubject
from forge_validate.target.address import attach


def walk(wish: Wish, url: str, work: Path, console: Console) -> Walked:
    """Reach the server at `url` and judge it; raises as `attach`, and UsageError (2) for what `--url` cannot take."""
    refused = {"--model": wish.model, "--record": wish.record, "--keep": wish.keep}
    if given := [name for name, value in refused.items() if value]:
        raise UsageError(f"{given[0]} does not go with --url: nothing is started", hint="leave it out")
    with console.step("attach", url.rpartition("@")[2]) as step:
        target, server = attach(
            url, profile=wish.profile, served=wish.served, key_variable=wish.api_key_env, offline=wish.offline
        )
        judged = bench_of_others(wish.profile, target.served, suite_name=wish.suite, answers=wish.answers)
        step.result(f"serves {target.served}; suite {judged.suite.suite}, answers {judged.answers.model}")
    tried = examine(server, judged, work, console)
    subject = ServerSubject(model=target.served, url=target.url, software=tried.offers.software, **rules_of(judged))
    return Walked(target=target, bench=judged, tried=tried, subject=subject)
