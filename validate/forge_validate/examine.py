"""Examining: a server that answers, however it came to be, is asked what it offers, then a suite, and judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from forge_core.console import Console, Step, duration
from forge_validate import report
from forge_validate.checks import CheckResult
from forge_validate.exchange import Exchange
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
    info = next((e.response for e in (*exchanges, *asked.values()) if e.request.path == "/server_info"), None)
    lines = server.log.read_text(encoding="utf-8").splitlines() if server.log and server.log.exists() else []
    return Tried(
        results=results,
        exchanges=exchanges,
        offers=server.offers,
        resolved=resolved(info, lines, tells or {}),
        probe=round(probed, 3),
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


def _line(name: str, exchange: Exchange, judged: Sequence[CheckResult], bench: Bench) -> tuple[str, str]:
    """The live line of a case: its worst check, how long it took, and what the model said."""
    # Of equals the last: a case names its checks from the plain to the telling.
    worst = max(reversed(judged), key=lambda result: report.weight(result, bench.policy))
    mark, style = report.mark(worst, bench.policy)
    return f"{mark:<4}  {name:<24}  {duration(exchange.seconds):>7}  {report.told(worst)}", style
