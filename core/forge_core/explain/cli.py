"""The verb `explain`: any log, from a file or stdin. To be told is not to be judged: it ends with 0 with and without a finding."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from forge_core.cli import Parser
from forge_core.console import Console, Step
from forge_core.console import size as shown_size
from forge_core.errors import EnvironmentFailure
from forge_core.explain import bundle, chunks_of, read, read_file
from forge_core.explain.model import Evidence, LogFinding, Reading

_BIG = 50_000_000
"""Bytes from which on a log is worth a progress line."""


def register(parser: Parser) -> None:
    """Add the verb."""
    verb = parser.verb("explain", _explain, "say why a build or a server died, from its log")
    verb.add_argument("log", metavar="LOG", help="a log file, or - for stdin")
    verb.add_argument("--bundle", metavar="FILE", type=Path, help="also write a redacted report of it")
    verb.add_argument("--stage", choices=("build", "boot"), help="whose log it is, where its lines do not tell")
    verb.add_argument("--exit-code", metavar="N", type=int, help="what the process or container ended with")
    verb.add_argument("--oom-killed", action="store_true", help="the container's state says OOMKilled")
    verb.add_argument(
        "--memory-events", metavar="FILE", type=Path, help="memory.events of its cgroup, which counts oom_kill"
    )


def _explain(options: argparse.Namespace, console: Console) -> None:
    evidence = Evidence(
        stage=options.stage,
        exit_code=options.exit_code,
        oom_killed=options.oom_killed,
        oom_kill=oom_kill(options.memory_events) if options.memory_events else None,
    )
    log = None if options.log == "-" else Path(options.log)
    if log is None:
        reading = read(chunks_of(sys.stdin.buffer), evidence)
    elif log.is_file() and (total := log.stat().st_size) > _BIG:
        with console.step("explain", f"{log}, {shown_size(total)}") as step:
            reading = read_file(log, evidence, on_bytes=_telling(step, total))
            step.result(f"{reading.lines:,} lines")
    else:
        reading = read_file(log, evidence)
    if options.bundle is not None:
        regular = log if log is not None and log.is_file() else None
        bundle.write(options.bundle.absolute(), reading, evidence, regular)
        console.say(f"a redacted report: {options.bundle}")
    if options.json:
        print(json.dumps(reading.model_dump(mode="json"), ensure_ascii=False))
    else:
        print("\n".join(told(reading)))


def _telling(step: Step, total: int) -> Any:
    return lambda done: step.progress(done, total, unit="B")


def oom_kill(events: Path) -> int:
    """The counter `oom_kill` of a cgroup's memory.events. Raises EnvironmentFailure when it is none."""
    try:
        rows = dict(line.split() for line in events.read_text(encoding="ascii").splitlines())
        return int(rows["oom_kill"])
    except (OSError, ValueError, KeyError) as error:
        raise EnvironmentFailure(f"{events} is no memory.events of a cgroup: {error}") from error


def told(reading: Reading) -> list[str]:
    """A reading for people: the cause first."""
    finding = reading.finding
    if finding is None:
        reached = f", the last phase is {reading.phase}" if reading.phase else ""
        return [f"no finding in {reading.lines:,} lines{reached}"]
    return told_finding(finding)


def told_finding(finding: LogFinding) -> list[str]:
    """A finding for people."""
    phase = f", phase {finding.phase}" if finding.phase else ""
    lines = [
        f"{finding.kind} ({finding.severity}, confidence {finding.confidence}): {finding.where}{phase}",
        f"  {finding.message}",
        f"  remedy: {finding.remedy}",
        *(f"  evidence: {word}" for word in finding.evidence),
        *((f"  source: {finding.source}",) if finding.source else ()),
    ]
    for other in finding.others:
        place = f"line {other.line}" + (f", {other.rank}" if other.rank else "")
        lines.append(f"  also: {other.kind}, {place}: {other.message[:160]}")
    if finding.last:
        lines += [f"  the last {len(finding.last)} lines:", *(f"    {line}" for line in finding.last)]
    return lines
