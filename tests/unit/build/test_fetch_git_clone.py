"""Clones of real repositories, over the file transport and from mirrors."""

import os
import subprocess

import pytest
from git_factory import Origin

from forge_build import patch
from forge_build.__main__ import main
from forge_build.fetch.git.clone import Clone
from forge_build.fetch.git.command import NoSuchCommit, Unanswered, commit_of_tag
from forge_build.fetch.git.mirror import repositories
from forge_core.errors import EnvironmentFailure, UsageError

NOWHERE = "file:///nowhere/at/all"


@pytest.fixture
def origin(tmp_path):
    return Origin(tmp_path / "origin")


@pytest.fixture
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return folder


def objects(clone):
    argv = ["git", "--git-dir", str(clone), "cat-file", "--batch-all-objects", "--batch-check"]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def test_the_tree_of_a_commit_that_no_branch_names_any_more(origin, tmp_path):
    first = origin.commit({"a": "1\n", "kernel/b.cu": "x\n"})
    whole, kernel = origin.tree(first), origin.tree(first, "kernel")
    origin.git("commit", "-q", "--amend", "-m", "y")
    clone = Clone.fetch(origin.url, first, tmp_path / "one")
    assert (clone.root, clone.tree(None), clone.tree("kernel")) == (whole, whole, kernel)


def test_files_come_only_when_checked_out(origin, tmp_path):
    commit = origin.commit({"kernel/b.cu": "a file of its own\n"})
    blob = origin.tree(commit, "kernel/b.cu")
    clone = Clone.fetch(origin.url, commit, tmp_path / "clone")
    assert blob not in objects(tmp_path / "clone")
    assert (clone.check_out(clone.root, tmp_path / "tree") / "kernel/b.cu").read_text() == "a file of its own\n"


def test_files_are_written_as_they_were_committed(origin, tmp_path, home):
    origin.folder.joinpath("run.sh").write_text("#!/bin/sh\n")
    origin.folder.joinpath("run.sh").chmod(0o755)
    origin.folder.joinpath("link").symlink_to("run.sh")
    attributes = "*.txt text eol=crlf ident\nhidden export-ignore\nv.py export-subst\n*.bin filter=lfs\n"
    commit = origin.commit(
        {".gitattributes": attributes, "a.txt": "$Id$\nb\n", "hidden": "h\n", "v.py": "$Format:%H$\n", "x.bin": "x"}
    )
    (home / ".gitconfig").write_text(
        '[core]\n autocrlf = true\n symlinks = false\n fileMode = false\n[filter "lfs"]\n smudge = false\n required = true\n'
    )
    clone = Clone.fetch(origin.url, commit, tmp_path / "clone")
    tree = clone.check_out(clone.root, tmp_path / "tree")
    assert (tree / "a.txt").read_bytes() == b"$Id$\nb\n"
    assert (tree / "v.py").read_bytes() == b"$Format:%H$\n"
    assert (tree / "hidden").is_file()
    assert (tree / "link").is_symlink()
    assert os.access(tree / "run.sh", os.X_OK)
    assert patch.tree_of(tree) == clone.root == origin.tree(commit)


def test_the_users_git_may_send_an_address_elsewhere(origin, tmp_path, home):
    commit = origin.commit({"a": "1\n"})
    (home / ".gitconfig").write_text(f'[url "{origin.url}"]\n insteadOf = https://upstream.invalid/x\n')
    assert Clone.fetch("https://upstream.invalid/x", commit, tmp_path / "clone").root == origin.tree(commit)


def test_a_server_that_names_only_branches(origin, tmp_path, home):
    first = origin.commit({"a": "1\n"})
    origin.commit({"a": "2\n"})
    (home / ".gitconfig").write_text("[protocol]\n version = 0\n")
    clone = Clone.fetch(origin.url, first, tmp_path / "clone")
    assert clone.root == origin.tree(first)
    assert (clone.check_out(clone.root, tmp_path / "tree") / "a").read_text() == "1\n"


def test_a_commit_that_is_not_there(origin, tmp_path):
    origin.commit({"a": "1\n"})
    with pytest.raises(NoSuchCommit, match="has no commit bbbb"):
        Clone.fetch(origin.url, "b" * 40, tmp_path / "clone")


def test_neither_a_tree_nor_a_tag_is_a_commit(origin, tmp_path):
    commit = origin.commit({"a": "1\n"})
    origin.git("tag", "-a", "-m", "x", "v1")
    for number, other in enumerate((origin.tree(commit), origin.git("rev-parse", "v1"))):
        with pytest.raises(NoSuchCommit, match="has no commit"):
            Clone.fetch(origin.url, other, tmp_path / f"clone{number}")


@pytest.mark.parametrize("subfolder", ["nowhere", "a"])
def test_a_subfolder_that_is_not_there_or_is_a_file(origin, tmp_path, subfolder):
    clone = Clone.fetch(origin.url, origin.commit({"a": "1\n"}), tmp_path / "clone")
    with pytest.raises(UsageError, match=f"has no folder '{subfolder}'"):
        clone.tree(subfolder)


def test_submodules_are_named(origin, tmp_path):
    commit = origin.commit({"a": "1\n", "sub/b": "2\n"})
    origin.git("update-index", "--add", "--cacheinfo", f"160000,{commit},third/party")
    origin.git("commit", "-qm", "module")
    clone = Clone.fetch(origin.url, origin.git("rev-parse", "HEAD"), tmp_path / "clone")
    with pytest.raises(UsageError, match="submodules") as caught:
        clone.check_out(clone.root, tmp_path / "tree")
    assert caught.value.details == ("third/party",)
    assert (clone.check_out(clone.tree("sub"), tmp_path / "subtree") / "b").read_text() == "2\n"
    with pytest.raises(UsageError, match="no file or folder") as caught:
        clone.taken(["a", "third/party"])
    assert caught.value.details == ("'third/party'",)


def test_a_repository_that_is_not_there(tmp_path):
    with pytest.raises(Unanswered, match="does not give commit aaaa") as caught:
        Clone.fetch(NOWHERE, "a" * 40, tmp_path / "clone")
    assert isinstance(caught.value, EnvironmentFailure)
    assert "--mirror" in (caught.value.hint or "")
    assert "insteadOf" in (caught.value.hint or "")
    assert caught.value.details


def test_what_is_taken_is_a_tree_of_its_own_that_the_commit_proves(origin, tmp_path):
    commit = origin.commit(
        {"include/a.h": "a", "include/in/b.h": "b", "tools/util/c.h": "c", "tools/d": "d", "LICENSE": "l", "e": "e"}
    )
    clone = Clone.fetch(origin.url, commit, tmp_path / "clone")
    taken = clone.taken(["LICENSE", "tools/util", "include"])
    assert origin.tree(commit, "e") not in objects(tmp_path / "clone")
    tree = clone.check_out(taken, tmp_path / "tree")
    files = sorted(path.relative_to(tree).as_posix() for path in tree.rglob("*") if path.is_file())
    assert files == ["LICENSE", "include/a.h", "include/in/b.h", "tools/util/c.h"]
    assert patch.tree_of(tree) == taken
    assert clone.taken(["include", "LICENSE", "tools/util"]) == taken
    assert clone.taken([]) == clone.root
    # what was not taken does not decide the tree; what was does
    origin.commit({"e": "other", "tools/d": "other"})
    assert (
        Clone.fetch(origin.url, origin.git("rev-parse", "HEAD"), tmp_path / "two").taken(
            ["include", "LICENSE", "tools/util"]
        )
        == taken
    )
    origin.commit({"include/in/b.h": "other"})
    assert (
        Clone.fetch(origin.url, origin.git("rev-parse", "HEAD"), tmp_path / "three").taken(
            ["include", "LICENSE", "tools/util"]
        )
        != taken
    )


def test_a_tag_is_what_its_address_says(origin, tmp_path):
    commit = origin.commit({"a": "1\n"})
    origin.git("tag", "light")
    origin.git("tag", "-a", "-m", "x", "heavy")
    assert commit_of_tag(origin.url, "light") == commit_of_tag(origin.url, "heavy") == commit
    with pytest.raises(NoSuchCommit, match="has no tag none"):
        commit_of_tag(origin.url, "none")
    with pytest.raises(Unanswered, match="does not say"):
        commit_of_tag(NOWHERE, "light")


@pytest.mark.parametrize("layout", ["NAME+REPO/repo", "NAME/REPO.git", "a/b/c/clone", "."])
def test_mirrors_of_any_layout_serve_commits_without_a_network(origin, tmp_path, layout):
    commit = origin.commit({"sub/a": "1\n", "b": "2\n"})
    place = tmp_path / "mirrors" / layout
    place.parent.mkdir(parents=True, exist_ok=True)
    origin.mirror(place)
    clone = Clone.fetch(NOWHERE, commit, tmp_path / "clone", mirrors=repositories([tmp_path / "mirrors"]))
    assert clone.root == origin.tree(commit)
    # nothing but trees was taken so far
    assert origin.tree(commit, "b") not in objects(tmp_path / "clone")
    assert (clone.check_out(clone.tree("sub"), tmp_path / "tree") / "a").read_text() == "1\n"
    assert origin.tree(commit, "b") not in objects(tmp_path / "clone")


def test_a_work_tree_is_a_mirror_too(origin, tmp_path):
    commit = origin.commit({"a": "1\n"})
    assert repositories([tmp_path]) == (origin.folder / ".git",)
    clone = Clone.fetch(NOWHERE, commit, tmp_path / "clone", mirrors=repositories([tmp_path]))
    assert (clone.check_out(clone.root, tmp_path / "tree") / "a").read_text() == "1\n"


def test_a_mirror_folder_must_hold_a_clone(tmp_path):
    with pytest.raises(UsageError, match="is no folder"):
        repositories([tmp_path / "none"])
    (tmp_path / "empty/objects").mkdir(parents=True)
    with pytest.raises(UsageError, match="no git directory"):
        repositories([tmp_path / "empty"])


@pytest.mark.parametrize("verb", ["lock", "build"])
def test_a_mirror_that_is_none_is_refused_before_anything_else(tmp_path, capsys, verb):
    assert main([verb, "--profile", "rehearsal", "--mirror", str(tmp_path), "--mirror", str(tmp_path / "none")]) == 2
    assert f"--mirror {tmp_path}: there is no git directory" in capsys.readouterr().err


def test_a_fork_serves_and_a_mirror_without_the_commit_is_passed_over(origin, tmp_path):
    first = origin.commit({"a": "1\n"})
    origin.mirror(tmp_path / "mirrors/old")
    second = origin.commit({"a": "2\n"})
    fork = Origin(tmp_path / "fork")
    fork.git("fetch", "-q", origin.url, "main")
    fork.git("reset", "-q", "--hard", "FETCH_HEAD")
    fork.commit({"ours": "of the fork\n"})
    fork.mirror(tmp_path / "mirrors/someone+else/repo")
    places = repositories([tmp_path / "mirrors"])
    assert len(places) == 2
    for number, commit in enumerate((first, second)):
        clone = Clone.fetch(NOWHERE, commit, tmp_path / f"clone{number}", mirrors=places)
        assert clone.root == origin.tree(commit)
        assert (clone.check_out(clone.root, tmp_path / f"tree{number}") / "a").read_text() == f"{number + 1}\n"
    third = origin.commit({"a": "3\n"})
    clone = Clone.fetch(origin.url, third, tmp_path / "clone2", mirrors=places)
    assert (clone.check_out(clone.root, tmp_path / "tree2") / "a").read_text() == "3\n"


def loose(git_dir, oid):
    return git_dir / "objects" / oid[:2] / oid[2:]


def unpacked(origin, place):
    """A mirror whose objects are files of their own, to be meddled with."""
    origin.mirror(place)
    for pack in (place / "objects/pack").glob("*"):
        pack.unlink()
    for folder in (origin.folder / ".git/objects").glob("??"):
        (place / "objects" / folder.name).mkdir(exist_ok=True)
        for item in folder.iterdir():
            target = place / "objects" / folder.name / item.name
            target.unlink(missing_ok=True)
            target.write_bytes(item.read_bytes())
    return place


@pytest.mark.parametrize("what", ["file", "tree"])
def test_a_mirror_with_other_bytes_under_the_same_id_is_passed_over(origin, tmp_path, what):
    commit = origin.commit({"sub/a": "1\n", "sub/b": "2\n", "tub/a": "3\n"})
    mirror = unpacked(origin, tmp_path / "mirror")
    right, wrong = ("sub", "tub") if what == "tree" else ("sub/a", "sub/b")
    loose(mirror, origin.tree(commit, right)).write_bytes(loose(mirror, origin.tree(commit, wrong)).read_bytes())
    clone = Clone.fetch(origin.url, commit, tmp_path / "clone", mirrors=[mirror])
    tree = clone.check_out(clone.root, tmp_path / "tree")
    assert patch.tree_of(tree) == origin.tree(commit)
    origin.gone()
    with pytest.raises(Unanswered):
        clone = Clone.fetch(origin.url, commit, tmp_path / "clone2", mirrors=[mirror])
        clone.check_out(clone.root, tmp_path / "tree2")


def test_a_mirror_that_lacks_files_is_completed_from_the_address(origin, tmp_path):
    commit = origin.commit({"a": "1\n", "b": "2\n"})
    mirror = unpacked(origin, tmp_path / "mirror")
    loose(mirror, origin.tree(commit, "b")).unlink()
    clone = Clone.fetch(origin.url, commit, tmp_path / "clone", mirrors=[mirror])
    assert (clone.check_out(clone.root, tmp_path / "tree") / "b").read_text() == "2\n"


def test_nothing_of_a_mirrors_own_settings_is_obeyed(origin, tmp_path):
    commit = origin.commit({"a": "1\n"})
    mirror = origin.mirror(tmp_path / "mirror")
    marker = tmp_path / "was-run"
    script = tmp_path / "script"
    script.write_text(f"#!/bin/sh\ntouch {marker}\nexit 1\n")
    script.chmod(0o755)
    for setting in ("core.fsmonitor", "core.alternateRefsCommand", "uploadpack.packObjectsHook", "core.sshCommand"):
        subprocess.run(["git", "--git-dir", mirror, "config", setting, str(script)], check=True)
    clone = Clone.fetch(NOWHERE, commit, tmp_path / "clone", mirrors=[mirror])
    assert (clone.check_out(clone.root, tmp_path / "tree") / "a").read_text() == "1\n"
    assert not marker.exists()


def test_a_replaced_object_of_a_mirror_is_not_believed(origin, tmp_path):
    commit = origin.commit({"a": "1\n"})
    mirror = origin.mirror(tmp_path / "mirror")
    other = origin.commit({"a": "2\n"})
    subprocess.run(["git", "--git-dir", mirror, "fetch", "-q", origin.url, "main"], check=True, capture_output=True)
    subprocess.run(["git", "--git-dir", mirror, "replace", commit, other], check=True)
    clone = Clone.fetch(NOWHERE, commit, tmp_path / "clone", mirrors=[mirror])
    assert (clone.check_out(clone.root, tmp_path / "tree") / "a").read_text() == "1\n"
