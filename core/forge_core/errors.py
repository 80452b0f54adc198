"""The error classes of the line: each carries its exit code, a message, a hint and the place of a log."""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path


class ExitCode(IntEnum):
    """Exit codes are an interface; CI may retry only `ENVIRONMENT`."""

    PASSED = 0
    REFUSED = 1
    USAGE = 2
    ENVIRONMENT = 3
    INCONCLUSIVE = 4
    INTEGRITY = 5
    INTERRUPTED = 130


class ForgeError(Exception):
    """Base of every error that a user sees.

    `message` names the place and the cause, `hint` the way out, `log` the file to read. `details` are further
    messages of the same kind (all mistakes of a manifest, the last lines of a log).
    """

    exit_code: ExitCode = ExitCode.ENVIRONMENT

    def __init__(
        self, message: str, *, hint: str | None = None, log: Path | None = None, details: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.log = log
        self.details = details


class Refused(ForgeError):
    """The gate, the compiler or a check says no (exit 1)."""

    exit_code = ExitCode.REFUSED


class UsageError(ForgeError):
    """A manifest, lock, patch, flag or option is wrong (exit 2)."""

    exit_code = ExitCode.USAGE


class EnvironmentFailure(ForgeError):
    """The machine, the engine, the network or the disk is not as needed (exit 3); a retry may help."""

    exit_code = ExitCode.ENVIRONMENT


class Inconclusive(ForgeError):
    """Neither yes nor no could be established (exit 4)."""

    exit_code = ExitCode.INCONCLUSIVE


class IntegrityError(ForgeError):
    """Bytes are not the bytes that were named (exit 5)."""

    exit_code = ExitCode.INTEGRITY
