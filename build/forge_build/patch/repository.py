"""A scratch git directory over a folder, cut off from the user's git: what it says depends on the files alone."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from forge_build.patch.series import Patch
from forge_core.process import CommandFailed, Completed, run

_ENVIRONMENT = {
    "GIT_AUTHOR_NAME": "sm120-forge",
    "GIT_AUTHOR_EMAIL": "patches@sm120-forge.invalid",
    "GIT_COMMITTER_NAME": "sm120-forge",
    "GIT_COMMITTER_EMAIL": "patches@sm120-forge.invalid",
    # nobody's own configuration may change a tree
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    # its complaints are read here
    "LC_ALL": "C",
}
_SETTINGS = (
    "autocrlf = false", "fileMode = true", "symlinks = true", "ignoreCase = false",
    # names that Windows or macOS would read as others are names here
    "protectNTFS = false", "protectHFS = false",
)  # fmt: skip
"""Of the section `core`."""
_FAILED = re.compile(r"^patch failed: (.+):(\d+)$")


class Outcome(StrEnum):
    """What became of a patch against a tree."""

    APPLIES = "applies"
    UPSTREAM = "already upstream"
    CONFLICT = "conflict"
    RETIRED = "retire now"
    """It applies, but says itself that it is not for this version."""


@dataclass(frozen=True)
class Checked:
    """What became of one patch, with the place of a conflict."""

    patch: Patch
    outcome: Outcome
    detail: str = ""


class Repository:
    """Context manager; the folder itself stays free of `.git`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Repository:
        self._scratch = tempfile.TemporaryDirectory(prefix="git-")
        self._env = _ENVIRONMENT | {"GIT_DIR": self._scratch.name, "GIT_WORK_TREE": str(self._folder)}
        self._git("-c", "init.defaultBranch=main", "init", "--quiet")
        # written at once: `git config` is a process for each
        with (Path(self._scratch.name) / "config").open("a", encoding="utf-8") as config:
            config.write(
                "[core]\n" + "".join(f"\t{setting}\n" for setting in _SETTINGS) + "[maintenance]\n\tauto = false\n"
            )
        # Highest precedence: what a tree's own .gitattributes says must not change bytes.
        info = Path(self._scratch.name) / "info"
        info.mkdir(exist_ok=True)
        (info / "attributes").write_text("* -text -eol -ident -filter -working-tree-encoding\n", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch.cleanup()

    def commit_all(self, message: str, date: str) -> str:
        """Commit the folder as it is, ignored files included; returns the tree id."""
        self._git("add", "--all", "--force", ".")
        return self._commit(message, date)

    def check(self, patch: Patch, version: str) -> Checked:
        """What applying would do; nothing changes. Context must match exactly, at whatever line."""
        completed = self._git("apply", "--check", str(patch.path), check=False)
        if completed.returncode != 0:
            if self._git("apply", "--check", "--reverse", str(patch.path), check=False).returncode == 0:
                return Checked(patch, Outcome.UPSTREAM, f"{patch.name}: every hunk is in the tree already")
            return Checked(patch, Outcome.CONFLICT, _conflict(patch, completed.stderr))
        if not patch.applies_to.contains(version, prereleases=True):
            detail = f"{patch.name} is for {patch.applies_to}; it says: retire when {patch.retire_when}"
            return Checked(patch, Outcome.RETIRED, detail)
        return Checked(patch, Outcome.APPLIES)

    def apply(self, patch: Patch) -> str:
        """Apply and commit a patch that was checked; returns the tree id."""
        self._git("apply", "--index", "--whitespace=nowarn", str(patch.path))
        return self._commit(patch.description, patch.last_update)

    def _commit(self, message: str, date: str) -> str:
        self._git("commit", "--quiet", "--allow-empty", "--no-verify", "--no-gpg-sign", "--message", message, date=date)
        return self._git("rev-parse", "HEAD^{tree}").stdout.strip()

    def _git(self, *argv: str, check: bool = True, date: str | None = None) -> Completed:
        stamp = f"{date}T00:00:00+0000"
        dates = {"GIT_AUTHOR_DATE": stamp, "GIT_COMMITTER_DATE": stamp} if date else {}
        completed = run(["git", *argv], cwd=self._folder, env=self._env | dates, check=False)
        if check and completed.returncode != 0:
            raise CommandFailed(completed, None)
        return completed


def _conflict(patch: Patch, stderr: str) -> str:
    """File and hunk of each of git's complaints."""
    lines = [line.removeprefix("error: ") for line in stderr.splitlines() if line.startswith("error: ")]
    text = patch.path.read_text(encoding="utf-8", errors="replace")
    places = [_hunk(text, match[1], int(match[2])) for line in lines if (match := _FAILED.match(line))]
    return "; ".join((places or lines)[:4]) or stderr.strip()


def _hunk(text: str, file: str, line: int) -> str:
    """Which hunk of a patch is the one that git names by the file's line."""
    number, current = 0, ""
    for row in text.splitlines():
        if match := re.match(r"^\+\+\+ (?:b/)?(\S+)", row):
            number, current = 0, match[1]
        elif current == file and (match := re.match(r"^(@@ -(\d+)\S* \+\S+ @@)", row)):
            number += 1
            if int(match[2]) == line:
                return f"{file}: hunk {number} ({match[1]}) does not fit"
    return f"{file}: the hunk for line {line} does not fit"
