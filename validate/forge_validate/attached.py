"""The first half of the line for a server that runs already: attach, ask, judge. No engine, no registry, no GPU of ours."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from forge_core.console import Console
from forge_core.errors import UsageError
from forge_core.model import ModelRef
from forge_validate.bench import bench_of_others, rules_of
from forge_validate.examine import examine
from forge_validate.line import Walked, Wish
from forge_validate.receipt import ServerSubject
from forge_validate.target.address import attach


def walk(wish: Wish, url: str, work: Path, console: Console) -> Walked:
    """Reach the server at `url` and judge it; raises as `attach`, and UsageError (2) for what `--url` cannot take.

    A model folder is what the server is said to serve: prompts are rendered with its template, a golden is held to its sha256.
    """
    refused = {"--record": wish.record, "--keep": wish.keep}
    if given := [name for name, value in refused.items() if value]:
        raise UsageError(f"{given[0]} does not go with --url: nothing is started", hint="leave it out")
    if wish.model is not None and not wish.model.is_dir():
        raise UsageError(f"no such folder: {wish.model}", hint="--model takes the folder of the model that is served")
    with console.step("attach", url.rpartition("@")[2]) as step:
        target, server = attach(
            url, profile=wish.profile, served=wish.served, key_variable=wish.api_key_env, offline=wish.offline
        )
        judged = bench_of_others(wish.profile, target.served, suite_name=wish.suite, answers=wish.answers)
        if wish.model is not None:
            identity = ModelRef.of_folder(judged.answers.model, wish.model)
            judged = replace(judged, model=wish.model, identity=identity)
        step.result(f"serves {target.served}; suite {judged.suite.suite}, answers {judged.answers.model}")
    tried = examine(server, judged, work, console)
    subject = ServerSubject(model=target.served, url=target.url, software=tried.offers.software, **rules_of(judged))
    return Walked(target=target, bench=judged, tried=tried, subject=subject)
