"""`python -m forge_lab VERB`: trials on one machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from forge_core.cli import Parser
from forge_core.console import Console
from forge_core.errors import UsageError
from forge_lab.plan import SUITE, Checks
from forge_lab.power import Wish, power


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns its exit code."""
    parser = Parser("forge_lab", "trials on one machine: the gate's power")
    verb = parser.verb("power", _power, "make a real server wrong in many ways and count what the gate sees")
    verb.add_argument("--plan", choices=("power", "clean", "rare"), default="power", help="mutants, clean runs, rates")
    verb.add_argument("--sample", action="store_true", help="a few mutants, the same each time, for CI")
    verb.add_argument("--only", metavar="NAME", nargs="+", default=(), help="these mutants or classes")
    verb.add_argument("--runs", metavar="N", type=int, default=0, help="so many clean runs, or runs of each rate")
    ways = verb.add_mutually_exclusive_group()
    ways.add_argument("--all-checks", action="store_true", help="ask every check (default, but for --sample)")
    ways.add_argument("--first-kill", action="store_true", help="ask until a check kills")
    verb.add_argument("--suite", metavar="NAME", default=SUITE, help="ask this suite of the servers")
    verb.add_argument("--within", metavar="MINUTES", type=float, help="begin no trial after so many minutes")
    verb.add_argument("--record", metavar="FILE", type=Path, help="the build record (default work/rehearsal)")
    verb.add_argument("--model", metavar="FOLDER", type=Path, help="the model folder (default work/rehearsal/model)")
    verb.add_argument("--write", action="store_true", help="write docs/gate-power.md and the journal it stands on")
    return parser.main(argv)


def _power(options: argparse.Namespace, console: Console) -> int:
    if options.profile not in (None, "rehearsal"):
        raise UsageError(f"faults are put into the rehearsal, not into {options.profile!r}", hint="leave --profile out")
    checks: Checks | None = "all" if options.all_checks else "first" if options.first_kill else None
    done = power(
        Wish(
            plan=options.plan,
            sample=options.sample,
            only=tuple(options.only),
            runs=options.runs,
            checks=checks,
            suite=options.suite,
            within=None if options.within is None else options.within * 60,
            record=options.record,
            model=options.model,
            write=options.write,
        ),
        console,
    )
    if options.json:
        told = [entry.model_dump(mode="json", by_alias=True) for entry in done.entries]
        sys.stdout.write(json.dumps({"left": done.left, "entries": told}, indent=1, ensure_ascii=False) + "\n")
    return done.exit_code


if __name__ == "__main__":
    sys.exit(main())
