"""A commit of a git repository: its tree id, and the tree itself where a series is to be applied."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from forge_build import patch
from forge_build.manifest import GitSource
from forge_core.errors import EnvironmentFailure, IntegrityError, UsageError
from forge_core.process import Completed, run

# The user's own git settings count here (proxy, credentials, `insteadOf`): whatever way the commit comes, its id names its
# bytes. Only these are fixed: no prompt, no transport that runs a command, no hint in another language to read.
_ENVIRONMENT = {"GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "https:ssh:git:http:file", "LC_ALL": "C"}
_TIMEOUT_S = 1800
# What a server answers that has no such commit, or gives a commit only when a branch names it.
_NO_SUCH = re.compile(r"not our ref|unadvertised object|no such remote ref|couldn't find remote ref", re.IGNORECASE)


class Clone:
    """A scratch bare repository that holds one commit."""

    def __init__(self, source: GitSource, folder: Path) -> None:
        self._source = source
        self._folder = folder

    @classmethod
    def fetch(cls, source: GitSource, folder: Path) -> Clone:
        """Bring the commit and its trees into the new folder; files follow when they are checked out.

        Raises UsageError when the repository has no such commit or the commit no such subfolder, EnvironmentFailure
        when the repository does not answer.
        """
        clone = cls(source, folder)
        run(["git", "init", "--quiet", "--bare", folder], env=_ENVIRONMENT)
        clone._git("remote", "add", "origin", source.url)
        clone._git("config", "remote.origin.promisor", "true")
        clone._git("config", "remote.origin.partialclonefilter", "blob:none")
        # Highest precedence: what the tree's own .gitattributes says must not change bytes at the checkout.
        (folder / "info").mkdir(exist_ok=True)
        (folder / "info/attributes").write_text(
            "* -text -eol -ident -filter -working-tree-encoding\n", encoding="utf-8"
        )
        done = clone._fetch(["--depth=1", "--filter=blob:none"], source.commit)
        if done.returncode and _NO_SUCH.search(done.stderr):
            # Servers of old give a commit, and later a file, only by the name of a branch or tag: so all of it.
            clone._git("config", "--remove-section", "remote.origin")
            clone._git("remote", "add", "origin", source.url)
            done = clone._fetch([], "+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*")
        if done.returncode:
            raise EnvironmentFailure(
                f"{source.url} does not give commit {source.commit[:12]}",
                details=tuple(done.stderr.strip().splitlines()[-4:]),
                hint="a mirror goes into git's configuration: git config --global url.<mirror>.insteadOf <address>",
            )
        if clone._git("cat-file", "-e", f"{source.commit}^{{commit}}", check=False).returncode:
            raise UsageError(
                f"{source.url} has no commit {source.commit}",
                hint="`commit` wants the full id of a commit, not of a tag",
            )
        return clone

    @property
    def tree(self) -> str:
        """Git tree id of what is built: the subfolder's where the source names one."""
        where = f"{self._source.commit}:{self._source.subfolder or ''}"
        done = self._git("rev-parse", "--verify", "--quiet", f"{where}", check=False)
        tree = done.stdout.strip()
        if done.returncode or self._git("cat-file", "-t", tree).stdout.strip() != "tree":
            raise UsageError(f"commit {self._source.commit[:12]} of {self._source.url} has no folder {where[41:]!r}")
        return tree

    def check_out(self, into: Path) -> Path:
        """Write the tree's files into the new folder `into`, as they were committed.

        Raises UsageError for a tree with submodules, IntegrityError when the files do not give the tree id again.
        """
        tree = self.tree
        listing = self._git("ls-tree", "-r", "-z", tree).stdout.split("\0")
        if modules := [line.split("\t", 1)[1] for line in listing if line.startswith("160000 ")]:
            raise UsageError(
                f"the tree of {self._source.url} holds submodules, whose content its id does not name",
                details=tuple(modules),
                hint="name a `subfolder` without them, and each of them as a source of its own",
            )
        into.mkdir(parents=True)
        index = {"GIT_INDEX_FILE": str(self._folder / "index"), "GIT_WORK_TREE": str(into)}
        done = self._git("-c", "core.bare=false", "read-tree", "-u", "--reset", tree, check=False, env=index, cwd=into)
        if done.returncode:
            shutil.rmtree(into, ignore_errors=True)
            raise EnvironmentFailure(
                f"{self._source.url} does not give the files of {self._source.commit[:12]}",
                details=tuple(done.stderr.strip().splitlines()[-4:]),
            )
        if (found := patch.tree_of(into)) != tree:
            raise IntegrityError(f"the files of {self._source.url} give the tree {found}, the commit names {tree}")
        return into

    def _fetch(self, options: list[str], *refs: str) -> Completed:
        command = ["fetch", "--quiet", "--no-tags", "--no-write-fetch-head"]
        return self._git(*command, *options, "origin", *refs, check=False)

    def _git(
        self, *argv: str, check: bool = True, env: dict[str, str] | None = None, cwd: Path | None = None
    ) -> Completed:
        environment = _ENVIRONMENT | {"GIT_DIR": str(self._folder)} | (env or {})
        return run(["git", *argv], env=environment, cwd=cwd, check=check, timeout=_TIMEOUT_S)
