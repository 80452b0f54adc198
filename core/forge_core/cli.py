"""The command line that every package shares: one parent parser, and one place where errors become exit codes."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from forge_core.console import Console
from forge_core.errors import EnvironmentFailure, ExitCode, ForgeError, Inconclusive

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
    """Run `action`; turn what it raises into a message and an exit code. The only place that does.

    A defect of ours ends with 4, never with Python's 1: a crash is not the gate saying no.
    """
    # A CI system ends a job with SIGTERM: clean up as for Ctrl-C. Only the main thread may say so.
    main_thread = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _interrupt) if main_thread else None
    try:
        return action() or ExitCode.PASSED
    except KeyboardInterrupt:
        return _interrupted(console)
    except Exception as error:
        # A clean-up that fails after Ctrl-C is still an interrupt, not an environment worth a retry.
        if _follows_interrupt(error):
            return _interrupted(console)
        known = _explained(error)
        if console.verbose or not isinstance(error, ForgeError | OSError):
            traceback.print_exception(error, file=sys.stderr)
        console.failure(known)
        return known.exit_code
    finally:
        if main_thread:
            signal.signal(signal.SIGTERM, before)


def _interrupted(console: Console) -> int:
    console.say("interrupted", "bold red")
    return ExitCode.INTERRUPTED


def _follows_interrupt(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _explained(error: Exception) -> ForgeError:
    """The error to show for what was raised."""
    if isinstance(error, ForgeError):
        return error
    if isinstance(error, OSError):
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return disk_full(error)
        return EnvironmentFailure(str(error), hint="-v shows where it came from")
    return Inconclusive(
        f"{type(error).__name__}: {error}", hint="a defect of this program: report it with the lines above"
    )


def disk_full(error: OSError) -> EnvironmentFailure:
    """The error for a full disk, with the place that was full."""
    place = f"the disk of {os.fsdecode(error.filename)}" if isinstance(error.filename, str | bytes) else "a disk"
    return EnvironmentFailure(
        f"no space left on {place}",
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
