"""A commit of a git repository in a scratch clone: its trees at once, files when they are checked out."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from forge_build.fetch.git.command import NoSuchCommit, Unanswered, git, init
from forge_build.fetch.git.mirror import Heap
from forge_core.console import Step, size
from forge_core.errors import UsageError
from forge_core.process import Completed

# What may keep git from writing a tree as it was committed.
_AS_COMMITTED = (
    "core.bare=false", "core.symlinks=true", "core.fileMode=true", "core.ignoreCase=false", "core.sparseCheckout=false",
    "core.protectNTFS=false", "core.protectHFS=false",
)  # fmt: skip
_TICK_S = 0.5
# What a server answers that has no such commit, or gives a commit only when a branch names it.
_NO_SUCH = re.compile(r"not our ref|unadvertised object|no such remote ref|couldn't find remote ref", re.IGNORECASE)
_HINT = (
    "`--mirror FOLDER` takes it from clones below a folder; another address goes into git's own configuration:"
    " git config --global url.<other>.insteadOf <address>"
)


class Clone:
    """A scratch bare repository that holds one commit; every object was hashed on its way in."""

    def __init__(self, url: str, commit: str, folder: Path, *, step: Step | None = None, name: str = "") -> None:
        self._url, self._commit, self._folder = url, commit, folder
        self._step, self._name = step, name or url
        self._heap: Heap | None = None
        """The mirror's clone that it came from."""

    @classmethod
    def fetch(
        cls,
        url: str,
        commit: str,
        folder: Path,
        *,
        mirrors: Sequence[Path] = (),
        step: Step | None = None,
        name: str = "",
    ) -> Clone:
        """Bring the commit and its trees into the new folder, from the first of `mirrors` (git directories) that has
        them, else from `url`. `step` is told, under `name`, what arrives.

        Raises NoSuchCommit when the repository has no such commit, Unanswered when it does not answer.
        """
        clone = cls(url, commit, folder, step=step, name=name)
        init(folder)
        # Highest precedence: what the tree's own .gitattributes says must not change bytes at the checkout.
        (folder / "info").mkdir(exist_ok=True)
        (folder / "info/attributes").write_text(
            "* -text -eol -ident -filter -working-tree-encoding\n", encoding="utf-8"
        )
        if not any(clone._take_from(place) for place in mirrors):
            clone._from_address()
        return clone

    @property
    def root(self) -> str:
        """Git tree id of the whole commit."""
        return self.tree(None)

    def tree(self, subfolder: str | None) -> str:
        """Git tree id of the commit, or of a folder in it; raises UsageError when it has no such folder."""
        found = self._object(subfolder or "")
        if found is None or found[1] != "tree":
            raise UsageError(f"commit {self._commit[:12]} of {self._url} has no folder {subfolder!r}")
        return found[2]

    def taken(self, paths: Sequence[str]) -> str:
        """Git tree id of the tree that holds nothing of the commit but these files and folders, at their places.

        None: the whole commit. No file is needed for it. Raises UsageError naming the paths that are not there.
        """
        if not paths:
            return self.root
        entries = {path: self._object(path) for path in paths}
        if gone := [path for path, entry in entries.items() if entry is None or entry[1] == "commit"]:
            raise UsageError(
                f"commit {self._commit[:12]} of {self._url} has no file or folder of that name",
                details=tuple(repr(path) for path in gone),
            )
        # git wants a work tree for a prefix, and leaves it alone
        index = {"GIT_INDEX_FILE": str(self._folder / "taken"), "GIT_WORK_TREE": str(self._folder)}
        (self._folder / "taken").unlink(missing_ok=True)
        for path, entry in entries.items():
            assert entry is not None
            mode, kind, oid = entry
            if kind == "tree":
                self._git("-c", "core.bare=false", "read-tree", f"--prefix={path}/", oid, env=index)
            else:
                self._git("update-index", "--add", "--cacheinfo", f"{mode},{oid},{path}", env=index)
        return self._git("write-tree", "--missing-ok", env=index).stdout.strip()

    def refuse_submodules(self, tree: str) -> None:
        """Raise UsageError naming the submodules of a tree: its id names their commits, not their content."""
        listing = self._git("ls-tree", "-r", tree).stdout.splitlines()
        if modules := [line.split("\t", 1)[1] for line in listing if line.startswith("160000 ")]:
            raise UsageError(
                f"the tree of {self._url} holds submodules, whose content its id does not name",
                details=tuple(modules),
                hint="name a `subfolder`, or the `paths` of a dependency, without them, and each of them as a source of"
                " its own",
            )

    def check_out(self, tree: str, into: Path) -> Path:
        """Write a tree's files into the new folder `into`, as they were committed.

        Raises UsageError for a tree with submodules, Unanswered when the repository does not give the files. Whether
        they give the tree id again is seen where they are packed (`forge_build.fetch.git.keep`).
        """
        self.refuse_submodules(tree)
        if self._heap is not None:
            listing = self._git("ls-tree", "-r", tree).stdout.splitlines()
            with self._watched():
                whole = self._heap.carry((line.split()[2] for line in listing), self._folder)
            if not whole:
                self._say("the mirror does not have all of its files; taken from its address")
                self._from_address()
        into.mkdir(parents=True)
        index = {"GIT_INDEX_FILE": str(self._folder / "index"), "GIT_WORK_TREE": str(into)}
        settings = [word for setting in _AS_COMMITTED for word in ("-c", setting)]
        with self._watched():
            done = self._git(*settings, "read-tree", "-u", "--reset", tree, check=False, env=index, cwd=into)
        if done.returncode:
            shutil.rmtree(into, ignore_errors=True)
            raise Unanswered(
                f"{self._url} does not give the files of {self._commit[:12]}",
                details=tuple(done.stderr.strip().splitlines()[-4:]),
                hint=_HINT,
            )
        return into

    def _object(self, path: str) -> tuple[str, str, str] | None:
        """Mode, kind and id of a path in the commit; none when there is nothing."""
        if not path:
            done = self._git("rev-parse", "--verify", "--quiet", f"{self._commit}^{{tree}}", check=False)
            return ("040000", "tree", done.stdout.strip()) if done.returncode == 0 else None
        done = self._git("ls-tree", "--full-tree", self._commit, path, check=False)
        rows = [line.split("\t", 1)[0].split() for line in done.stdout.splitlines()]
        return (rows[0][0], rows[0][1], rows[0][2]) if len(rows) == 1 else None

    def _take_from(self, place: Path) -> bool:
        """Take commit and trees out of a clone on this machine, if it has them."""
        heap = Heap(place, self._folder.with_name(f"{self._folder.name}-mirror"))
        trees = heap.trees(self._commit)
        if trees is None:
            return False
        with self._watched():
            carried = heap.carry(trees, self._folder)
        if not carried:
            self._say("a mirror has the commit, but not its right and whole bytes; passed over")
            return False
        self._heap = heap
        return True

    def _from_address(self) -> None:
        self._heap = None
        promisor = "\tpromisor = true\n\tpartialclonefilter = blob:none\n"
        config = self._folder / "config"
        plain = config.read_text(encoding="utf-8")
        quoted = self._url.replace("\\", "\\\\").replace('"', '\\"')
        remote = f'[maintenance]\n\tauto = false\n[remote "origin"]\n\turl = "{quoted}"\n'
        config.write_text(plain + remote + promisor, encoding="utf-8")
        done = self._fetch(["--depth=1", "--filter=blob:none"], self._commit)
        if done.returncode and _NO_SUCH.search(done.stderr):
            # Servers of old give a commit, and later a file, only by the name of a branch or tag: so all of it.
            config.write_text(plain + remote, encoding="utf-8")
            done = self._fetch([], "+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*")
        if done.returncode:
            raise Unanswered(
                f"{self._url} does not give commit {self._commit[:12]}",
                details=tuple(done.stderr.strip().splitlines()[-4:]),
                hint=_HINT,
            )
        if self._git("cat-file", "-t", self._commit, check=False).stdout.strip() != "commit":
            raise NoSuchCommit(
                f"{self._url} has no commit {self._commit}", hint="`commit` wants the full id of a commit, not of a tag"
            )

    def _fetch(self, options: list[str], *refs: str) -> Completed:
        command = ["fetch", "--quiet", "--no-tags", "--no-write-fetch-head"]
        with self._watched():
            return self._git(*command, *options, "origin", *refs, check=False)

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Tell the step how much has arrived: git's own progress is a line that is drawn over and over."""
        step, ended = self._step, threading.Event()
        if step is None:
            yield
            return

        def watch() -> None:
            while not ended.wait(_TICK_S):
                step.waiting(f"{self._name}, {size(_bytes(self._folder / 'objects'))} received")

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()

    def _say(self, text: str) -> None:
        if self._step is not None:
            self._step.say(f"{self._name}: {text}")

    def _git(
        self,
        *argv: str | Path,
        check: bool = True,
        env: dict[str, str] | None = None,
        cwd: Path | None = None,
    ) -> Completed:
        return git(self._folder, *argv, check=check, env=env, cwd=cwd)


def _bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue  # git renames what has arrived whole
    return total
