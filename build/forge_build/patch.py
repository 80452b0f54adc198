"""Patches: a quilt series with DEP-3 headers, applied as commits with a fixed identity: the tree id is stable."""

from __future__ import annotations

import re
import shutil
import stat
import tempfile
import zipfile
from dataclasses import dataclass
from email.parser import HeaderParser
from enum import StrEnum
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from forge_build.lock import LockedPatch
from forge_core.cli import project_root
from forge_core.errors import IntegrityError, UsageError
from forge_core.model import file_sha256
from forge_core.process import CommandFailed, Completed, run

_REQUIRED = ("Description", "Author", "Forwarded", "Last-Update", "Applies-To", "Retire-When")
_IDENTITY = {
    "GIT_AUTHOR_NAME": "sm120-forge",
    "GIT_AUTHOR_EMAIL": "patches@sm120-forge.invalid",
    "GIT_COMMITTER_NAME": "sm120-forge",
    "GIT_COMMITTER_EMAIL": "patches@sm120-forge.invalid",
    # nobody's own configuration may change a tree
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
}


class Outcome(StrEnum):
    """What became of a patch against a tree."""

    APPLIES = "applies"
    UPSTREAM = "already upstream"
    CONFLICT = "conflict"
    RETIRED = "retire now"
    """It applies, but says itself that it is not for this version."""


@dataclass(frozen=True)
class Patch:
    """One patch of a series."""

    path: Path
    description: str
    last_update: str
    """ISO date; the commit's date."""
    applies_to: SpecifierSet
    retire_when: str

    @property
    def name(self) -> str:
        """File name."""
        return self.path.name


@dataclass(frozen=True)
class PatchedTree:
    """A source tree after its series."""

    name: str
    version: str
    path: Path
    tree: str
    """Git tree id before the series."""
    patched_tree: str
    series: str | None
    patches: tuple[Patch, ...]

    def locked(self) -> tuple[LockedPatch, ...]:
        """The series as a lock names it."""
        return tuple(LockedPatch(file=p.name, sha256=file_sha256(p.path)) for p in self.patches)


@dataclass(frozen=True)
class Checked:
    """What became of one patch, with the place of a conflict."""

    patch: Patch
    outcome: Outcome
    detail: str = ""


def series_folder(source: str, series: str | None) -> Path | None:
    """`patches/<source>/<series>` of the checkout; raises UsageError when it has no `series` file."""
    if series is None:
        return None
    folder = project_root() / "patches" / source / series
    if not (folder / "series").is_file():
        raise UsageError(
            f"{folder} has no file `series`", hint="the manifest's `series` names a folder below patches/<source>"
        )
    return folder


def read_series(folder: Path) -> tuple[Patch, ...]:
    """Read `series` and the headers of each patch; raises UsageError with every mistake."""
    patches, mistakes = [], []
    for line in (folder / "series").read_text(encoding="utf-8").splitlines():
        name = line.split("#", 1)[0].strip()
        if not name:
            continue
        path = folder / name
        if not path.is_file():
            mistakes.append(f"{name}: named in `series`, but there is no such file")
            continue
        headers = HeaderParser().parsestr(_head(path.read_text(encoding="utf-8")))
        missing = [field for field in _REQUIRED if not headers.get(field)]
        if missing:
            mistakes.append(f"{name}: header {', '.join(missing)} missing")
            continue
        try:
            applies_to = SpecifierSet(headers["Applies-To"])
        except InvalidSpecifier:
            mistakes.append(f"{name}: Applies-To: {headers['Applies-To']!r} is no version range (PEP 440)")
            continue
        if not re.fullmatch(r"\d{4}-\d\d-\d\d", headers["Last-Update"]):
            mistakes.append(f"{name}: Last-Update: {headers['Last-Update']!r} is no date (YYYY-MM-DD)")
            continue
        patches.append(
            Patch(
                path, headers["Description"].splitlines()[0], headers["Last-Update"], applies_to, headers["Retire-When"]
            )
        )
    if mistakes:
        raise UsageError(f"{folder / 'series'}: {len(mistakes)} mistakes", details=tuple(mistakes))
    return tuple(patches)


def apply(source: str, version: str, folder: Path, series: Path | None) -> PatchedTree:
    """Apply a series in place, one commit a patch.

    Raises UsageError (2) naming patch, file and line of a conflict, or the patch that is upstream already.
    """
    patches = read_series(series) if series else ()
    with _Repository(folder) as repository:
        tree = repository.commit_all("the source as it came", "2000-01-01")
        patched = tree
        for patch in patches:
            checked = repository.check(patch, version)
            if checked.outcome is not Outcome.APPLIES:
                raise UsageError(_explain(checked, source, version), hint=_way_out(checked), details=(checked.detail,))
            repository.git("apply", "--index", "--whitespace=nowarn", str(patch.path))
            patched = repository.commit(patch.description, patch.last_update)
    return PatchedTree(source, version, folder, tree, patched, series.name if series else None, patches)


def table(version: str, folder: Path, series: Path) -> list[Checked]:
    """What each patch of a series would do to a tree, which is left alone; later patches see the earlier ones."""
    rows = []
    with tempfile.TemporaryDirectory(prefix="patches-") as scratch:
        copy = Path(scratch) / "tree"
        shutil.copytree(folder, copy, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        with _Repository(copy) as repository:
            repository.commit_all("the source as it came", "2000-01-01")
            for patch in read_series(series):
                checked = repository.check(patch, version)
                rows.append(checked)
                if checked.outcome in (Outcome.APPLIES, Outcome.RETIRED):
                    repository.git("apply", "--index", "--whitespace=nowarn", str(patch.path))
                    repository.commit(patch.description, patch.last_update)
    return rows


def tree_of(folder: Path) -> str:
    """Git tree id of a folder's content, whatever the user's git is configured to do."""
    with _Repository(folder) as repository:
        return repository.commit_all("tree", "2000-01-01")


def unpack_wheel(wheel: Path, into: Path) -> Path:
    """Unpack a wheel's files with fixed modes; returns `into`.

    Raises IntegrityError for a member that would leave the folder, or a broken archive.
    """
    into.mkdir(parents=True)
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                target = (into / member.filename).resolve()
                if not target.is_relative_to(into.resolve()):
                    raise IntegrityError(f"{wheel.name}: member {member.filename!r} leaves the folder")
                if member.is_dir():
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, target.open("wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
                executable = (member.external_attr >> 16) & stat.S_IXUSR
                target.chmod(0o755 if executable else 0o644)
    except zipfile.BadZipFile as error:
        raise IntegrityError(f"{wheel} is no wheel: {error}") from error
    return into


class _Repository:
    """A scratch git directory over a folder; the folder itself stays free of `.git`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> _Repository:
        self._scratch = tempfile.TemporaryDirectory(prefix="git-")
        self._env = _IDENTITY | {"GIT_DIR": self._scratch.name, "GIT_WORK_TREE": str(self._folder)}
        self.git("-c", "init.defaultBranch=main", "init", "--quiet")
        for setting in ("core.autocrlf=false", "core.fileMode=true", "core.symlinks=true", "gc.auto=0"):
            self.git("config", *setting.split("="))
        # highest precedence: what a tree's own .gitattributes says must not change bytes
        info = Path(self._scratch.name) / "info"
        info.mkdir(exist_ok=True)
        (info / "attributes").write_text("* -text -eol -ident -filter\n", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        self._scratch.cleanup()

    def git(self, *argv: str, check: bool = True, date: str | None = None) -> Completed:
        stamp = f"{date}T00:00:00+0000"
        dates = {"GIT_AUTHOR_DATE": stamp, "GIT_COMMITTER_DATE": stamp} if date else {}
        return run(["git", *argv], cwd=self._folder, env=self._env | dates, check=check)

    def commit_all(self, message: str, date: str) -> str:
        self.git("add", "--all", "--force", ".")
        return self.commit(message, date)

    def commit(self, message: str, date: str) -> str:
        self.git("commit", "--quiet", "--allow-empty", "--no-gpg-sign", "--message", message, date=date)
        return self.git("rev-parse", "HEAD^{tree}").stdout.strip()

    def check(self, patch: Patch, version: str) -> Checked:
        try:
            self.git("apply", "--check", str(patch.path))
        except CommandFailed as error:
            if self.git("apply", "--check", "--reverse", str(patch.path), check=False).returncode == 0:
                return Checked(patch, Outcome.UPSTREAM, f"{patch.name}: every hunk is in the tree already")
            return Checked(patch, Outcome.CONFLICT, _conflict(error.completed.stderr))
        if not patch.applies_to.contains(version, prereleases=True):
            return Checked(
                patch, Outcome.RETIRED, f"{patch.name} is for {patch.applies_to}; retire when {patch.retire_when}"
            )
        return Checked(patch, Outcome.APPLIES)


def _head(text: str) -> str:
    """The header part: everything before the first diff."""
    return re.split(r"^(?:---|diff --git |Index: )", text, maxsplit=1, flags=re.MULTILINE)[0].strip() + "\n"


def _conflict(stderr: str) -> str:
    """git's first complaint, which names file and line: `error: patch failed: setup.py:12`."""
    lines = [line.removeprefix("error: ") for line in stderr.splitlines() if line.startswith("error: ")]
    return "; ".join(lines[:4]) or stderr.strip()


def _explain(checked: Checked, source: str, version: str) -> str:
    return f"patch {checked.patch.path.parent.name}/{checked.patch.name} on {source} {version}: {checked.outcome}"


def _way_out(checked: Checked) -> str:
    if checked.outcome is Outcome.CONFLICT:
        return "write the patch anew against this version, or move the source back; the context must match exactly"
    return "take its line out of `series`, then `nox -s lock`"
