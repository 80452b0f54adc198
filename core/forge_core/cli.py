"""The command line that every package shares: one parent parser, and one place where errors become exit codes."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from forge_core.console import Console
from forge_core.errors import EnvironmentFailure, ExitCode, ForgeError

Command = Callable[[argparse.Namespace, Console], int | None]


def walk_parser() -> argparse.ArgumentParser:
    """The options of every verb of a walk: posargs reach each session of a nox call, so all take them."""
    parent = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parent.add_argument("--profile", metavar="NAME", help="names a manifest, a serving and a policy")
    parent.add_argument("--offline", action="store_true", help="take inputs from the store alone")
    parent.add_argument("--keep", action="store_true", help="leave containers and scratch folders for a post-mortem")
    parent.add_argument("-v", "--verbose", action="store_true")
    parent.add_argument("--json", action="store_true", help="print the result as JSON on stdout")
    return parent


class Parser:
    """A package's verbs; each verb takes the walk's options and its own, and refuses all others."""

    def __init__(self, package: str, description: str) -> None:
        self._parser = argparse.ArgumentParser(prog=f"python -m {package}", description=description, allow_abbrev=False)
        self._verbs = self._parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    def verb(self, name: str, command: Command, summary: str) -> argparse.ArgumentParser:
        """Add a verb; returns its parser for the verb's own options."""
        parser = self._verbs.add_parser(
            name, help=summary, description=summary, parents=[walk_parser()], allow_abbrev=False
        )
        parser.set_defaults(command=command)
        return parser

    def main(self, argv: Sequence[str] | None = None) -> int:
        """Run the verb that `argv` names; returns the exit code (argparse itself exits with 2)."""
        options = self._parser.parse_args(argv)
        console = Console(verbose=options.verbose)
        return guarded(lambda: options.command(options, console), console)


def guarded(action: Callable[[], int | None], console: Console) -> int:
    """Run `action`; turn what it raises into a message and an exit code. The only place that does."""
    # A CI system ends a job with SIGTERM: clean up as for Ctrl-C.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return action() or ExitCode.PASSED
    except ForgeError as error:
        console.failure(error)
        if console.verbose:
            traceback.print_exc(file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        console.say("interrupted", "bold red")
        return ExitCode.INTERRUPTED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        console.failure(disk_full(error))
        return ExitCode.ENVIRONMENT


def disk_full(error: OSError) -> EnvironmentFailure:
    """The error for a full disk, with the place that was full."""
    place = Path(error.filename) if error.filename else Path.cwd()
    return EnvironmentFailure(
        f"no space left on the disk of {place}",
        hint="free space, or move the store with FORGE_STORE; `python -m forge_core store gc` drops what no lock names",
    )


def _interrupt(signum: int, frame: object) -> None:
    """SIGTERM becomes KeyboardInterrupt, once: a second one during the clean-up must not break it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def project_root() -> Path:
    """The checkout the command runs in: `FORGE_ROOT`, else the nearest folder upwards with our Dockerfile."""
    if root := os.environ.get("FORGE_ROOT"):
        return Path(root).resolve()
    for folder in (Path.cwd(), *Path.cwd().parents):
        if (folder / "Dockerfile.sm120").is_file():
            return folder
    raise EnvironmentFailure("no Dockerfile.sm120 here or above", hint="run from a checkout, or set FORGE_ROOT")


def work_folder(profile: str) -> Path:
    """`work/<profile>` of the checkout, made if missing: record, results and logs."""
    folder = project_root() / "work" / profile
    folder.mkdir(parents=True, exist_ok=True)
    return folder
