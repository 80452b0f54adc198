"""Examining: a server that answers, however it came to be, is asked what it offers, then a suite, and judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from forge_core.console import Console, Step, duration
from forge_validate import report
from forge_validate.checks import CheckResult
from forge_validate.exchange import Exchange
from forge_validate.families import runner
from forge_validate.families.runner import Sender
from forge_validate.judge import Bench
from forge_validate.offers import UNSEEN, Offers
from forge_validate.offers.ask import ask
from forge_validate.offers.see import see
from forge_validate.probe import probe
from forge_validate.resolved import resolved
from forge_validate.server import Server


@dataclass(frozen=True)
class Tried:
    """What came of a trial; times in seconds."""

    results: tuple[CheckResult, ...]
    exchanges: tuple[Exchange, ...] = ()
    offers: Offers = UNSEEN
    resolved: dict[str, str] = field(default_factory=dict)
    """What the server really ran with (see `resolved`)."""
    boot: float = 0.0
    probe: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    families: dict[str, float] = field(default_factory=dict)
    """Of asking, by family."""


def examine(
    server: Server, bench: Bench, work: Path, console: Console, tells: Mapping[str, str] | None = None
) -> Tried:
    """Ask and judge; writes `work/exchanges/`. `tells` are the patterns for the server's log, where there is one."""
    folder = work / "exchanges"
    for old in folder.glob("*.json"):
        old.unlink()
    with console.step("offers", server.url) as step:
        asked = ask(server, folder)
        server = replace(server, offers=server.offers.joined(see(asked)))
        bench = replace(bench, offers=server.offers)
        for seen in server.offers.seen:
            if seen.state != "offered":
                step.say(f"{seen.state:<7}  {seen.name:<15}  {seen.evidence}")
        names = [seen.name for seen in server.offers.seen if seen.state == "offered"]
        step.result(f"{server.offers.software or 'an unknown server'}: {', '.join(names) or 'nothing'}")
    with console.step("probe", f"{len(bench.suite.cases)} cases") as step:
        exchanges, results = _ask(server, bench, folder, step)
        probed = step.elapsed
        step.result(report.counts(results, bench.policy))
    recorded = {one.name: one for one in exchanges}
    answers, took = _ask_families(server, bench, recorded, folder, console)
    info = next((e.response for e in (*exchanges, *asked.values()) if e.request.path == "/server_info"), None)
    lines = server.log.read_text(encoding="utf-8").splitlines() if server.log and server.log.exists() else []
    return Tried(
        results=results + answers,
        exchanges=tuple(recorded.values()),
        offers=server.offers,
        resolved=resolved(info, lines, tells or {}),
        probe=round(probed, 3),
        families=took,
    )


def _ask(
    server: Server, bench: Bench, folder: Path, step: Step
) -> tuple[tuple[Exchange, ...], tuple[CheckResult, ...]]:
    """Ask and judge case by case, so that the user sees each answer when it comes."""
    cases = bench.suite.cases
    recorded: dict[str, Exchange] = {}
    results: list[CheckResult] = []

    def draw() -> None:
        waits = cases[min(len(recorded), len(cases) - 1)]
        step.progress(len(recorded), len(cases), unit="cases", note=waits.name)

    with step.ticking(draw):
        for case, exchange in probe(server, bench.suite, bench.answers, folder):
            recorded[case.name] = exchange
            judged = bench.judge_case(case, recorded)
            results += judged
            step.say(*_line(case.name, exchange, judged, bench))
    return tuple(recorded.values()), tuple(results)


def _ask_families(
    server: Server, bench: Bench, recorded: dict[str, Exchange], folder: Path, console: Console
) -> tuple[tuple[CheckResult, ...], dict[str, float]]:
    """Ask and judge family by family, one after another: what one asks would blur what the next one measures.

    Adds the exchanges to `recorded`; returns the results and the seconds of each family.
    """
    if not bench.families:
        return (), {}
    results: list[CheckResult] = []
    took: dict[str, float] = {}
    with Sender(server, folder) as sender:
        for family, settings in bench.families:
            with console.step(family.name, family.checks) as step:
                runner.run(sender, bench, family, settings, recorded, lambda wave, _: step.waiting(wave.asks[0].name))
                judged = runner.reproduce(
                    sender,
                    bench,
                    family,
                    settings,
                    family.judge(settings, bench, recorded),
                    recorded,
                    lambda wave, _: step.waiting(f"smaller: {wave.asks[0].name}"),
                )
                for one in judged:
                    mark, style = report.mark(one, bench.policy)
                    step.say(f"{mark:<4}  {one.check:<24}  {report.told(one)}", style)
                took[family.name] = round(step.elapsed, 3)
                step.result(report.counts(judged, bench.policy))
            results += judged
    return tuple(results), took


def _line(name: str, exchange: Exchange, judged: Sequence[CheckResult], bench: Bench) -> tuple[str, str]:
    """The live line of a case: its worst check, how long it took, and what the model said."""
    # Of equals the last: a case names its checks from the plain to the telling.
    worst = max(reversed(judged), key=lambda result: report.weight(result, bench.policy))
    mark, style = report.mark(worst, bench.policy)
    return f"{mark:<4}  {name:<24}  {duration(exchange.seconds):>7}  {report.told(worst)}", style
