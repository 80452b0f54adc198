"""Against real repositories, over the file transport."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from forge_build import patch
from forge_build.lock.git import Clone
from forge_build.manifest import GitSource
from forge_core.errors import EnvironmentFailure, UsageError


class Origin:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.git("init", "-q", "-b", "main")
        self.git("config", "uploadpack.allowFilter", "true")

    def git(self, *argv: str) -> str:
        identity = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        return subprocess.run(
            ["git", *argv], cwd=self.folder, env=os.environ | identity, check=True, capture_output=True, text=True
        ).stdout.strip()

    def commit(self, files: dict[str, str]) -> str:
        for name, text in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(text.encode())
        self.git("add", "--all", "--force")
        self.git("commit", "-qm", "x")
        return self.git("rev-parse", "HEAD")

    def source(self, commit: str, subfolder: str | None = None) -> GitSource:
        return GitSource(url=self.folder.as_uri(), commit=commit, version="1.0", subfolder=subfolder)


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    return Origin(tmp_path / "origin")


def test_the_tree_of_a_commit_that_no_branch_names_any_more(origin: Origin, tmp_path: Path) -> None:
    first = origin.commit({"a": "1\n", "kernel/b.cu": "x\n"})
    whole, kernel = origin.git("rev-parse", f"{first}^{{tree}}", f"{first}:kernel").split()
    origin.git("commit", "-q", "--amend", "-m", "y")
    assert Clone.fetch(origin.source(first), tmp_path / "one").tree == whole
    assert Clone.fetch(origin.source(first, "kernel"), tmp_path / "two").tree == kernel


def test_files_come_only_when_checked_out(origin: Origin, tmp_path: Path) -> None:
    commit = origin.commit({"kernel/b.cu": "a file of its own\n"})
    blob = origin.git("rev-parse", f"{commit}:kernel/b.cu")
    clone = Clone.fetch(origin.source(commit), tmp_path / "clone")
    listed = ["git", "--git-dir", str(tmp_path / "clone"), "cat-file", "--batch-all-objects", "--batch-check"]
    assert blob not in subprocess.run(listed, check=True, capture_output=True, text=True).stdout
    assert (clone.check_out(tmp_path / "tree") / "kernel/b.cu").read_text() == "a file of its own\n"


def test_files_are_written_as_they_were_committed(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (origin.folder / ".git/info/attributes").write_text("* -text\n")
    origin.folder.joinpath("run.sh").write_text("#!/bin/sh\n")
    origin.folder.joinpath("run.sh").chmod(0o755)
    origin.folder.joinpath("link").symlink_to("run.sh")
    commit = origin.commit(
        {".gitattributes": "*.txt text eol=crlf ident\nhidden export-ignore\n", "a.txt": "$Id$\nb\n", "hidden": "h\n"}
    )
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text('[core]\n autocrlf = true\n[filter "x"]\n smudge = false\n')
    monkeypatch.setenv("HOME", str(home))
    clone = Clone.fetch(origin.source(commit), tmp_path / "clone")
    tree = clone.check_out(tmp_path / "tree")
    assert (tree / "a.txt").read_bytes() == b"$Id$\nb\n"
    assert (tree / "hidden").is_file()
    assert (tree / "link").is_symlink()
    assert os.access(tree / "run.sh", os.X_OK)
    assert patch.tree_of(tree) == clone.tree == origin.git("rev-parse", f"{commit}^{{tree}}")


def test_the_users_git_may_send_an_address_to_a_mirror(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = origin.commit({"a": "1\n"})
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text(f'[url "{origin.folder.as_uri()}"]\n insteadOf = https://upstream.invalid/x\n')
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    source = GitSource(url="https://upstream.invalid/x", commit=commit, version="1")
    assert Clone.fetch(source, tmp_path / "clone").tree == origin.git("rev-parse", f"{commit}^{{tree}}")


def test_a_server_that_names_only_branches(origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = origin.commit({"a": "1\n"})
    origin.commit({"a": "2\n"})
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text("[protocol]\n version = 0\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    clone = Clone.fetch(origin.source(first), tmp_path / "clone")
    assert clone.tree == origin.git("rev-parse", f"{first}^{{tree}}")
    assert (clone.check_out(tmp_path / "tree") / "a").read_text() == "1\n"


def test_a_commit_that_is_not_there(origin: Origin, tmp_path: Path) -> None:
    origin.commit({"a": "1\n"})
    with pytest.raises(UsageError, match="has no commit bbbb"):
        Clone.fetch(origin.source("b" * 40), tmp_path / "clone")


def test_a_tree_is_no_commit(origin: Origin, tmp_path: Path) -> None:
    commit = origin.commit({"a": "1\n"})
    with pytest.raises(UsageError, match="has no commit"):
        Clone.fetch(origin.source(origin.git("rev-parse", f"{commit}^{{tree}}")), tmp_path / "clone")


@pytest.mark.parametrize("subfolder", ["nowhere", "a"])
def test_a_subfolder_that_is_not_there_or_is_a_file(origin: Origin, tmp_path: Path, subfolder: str) -> None:
    clone = Clone.fetch(origin.source(origin.commit({"a": "1\n"}), subfolder), tmp_path / "clone")
    with pytest.raises(UsageError, match=f"has no folder '{subfolder}'"):
        _ = clone.tree


def test_submodules_are_named(origin: Origin, tmp_path: Path) -> None:
    commit = origin.commit({"a": "1\n", "sub/b": "2\n"})
    origin.git("update-index", "--add", "--cacheinfo", f"160000,{commit},third/party")
    origin.git("commit", "-qm", "module")
    head = origin.git("rev-parse", "HEAD")
    with pytest.raises(UsageError, match="submodules") as caught:
        Clone.fetch(origin.source(head), tmp_path / "clone").check_out(tmp_path / "tree")
    assert caught.value.details == ("third/party",)
    tree = Clone.fetch(origin.source(head, "sub"), tmp_path / "other").check_out(tmp_path / "subtree")
    assert (tree / "b").read_text() == "2\n"


def test_a_repository_that_is_not_there(tmp_path: Path) -> None:
    source = GitSource(url=(tmp_path / "nowhere").as_uri(), commit="a" * 40, version="1")
    with pytest.raises(EnvironmentFailure, match="does not give commit aaaa") as caught:
        Clone.fetch(source, tmp_path / "clone")
    assert "insteadOf" in (caught.value.hint or "")
    assert caught.value.details
