"""`python -m forge_validate VERB`: the right side of the bar."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from forge_core.cli import Parser
from forge_core.console import Console
from forge_validate import receipt
from forge_validate.pipeline import Wish, known_profile, validate


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns its exit code."""
    parser = Parser("forge_validate", "boot the recorded image, judge its answers, move the tag on a pass")
    verb = parser.verb("validate", _validate, "boot the recorded image, judge its answers, move the tag on a pass")
    verb.add_argument(
        "--model", metavar="FOLDER", type=Path, help="judge this model folder instead of the recorded one"
    )
    verb.add_argument("--record", metavar="FILE", type=Path, help="the build record (default work/PROFILE)")
    verb.add_argument("--no-promote", action="store_true", help="judge, but move no tag")
    return parser.main(argv)


def _validate(options: argparse.Namespace, console: Console) -> int:
    outcome = validate(
        Wish(
            profile=known_profile(options.profile),
            model=options.model,
            record=options.record,
            no_promote=options.no_promote,
            keep=options.keep,
            offline=options.offline,
        ),
        console,
    )
    if options.json:
        sys.stdout.write(receipt.dumps(outcome.receipt))
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
