"""The lock of a source from git: its tree, what its CMake files would fetch, and where manifest and tree disagree."""

from pathlib import Path

import pytest
import yaml
from git_factory import Origin
from pydantic import ValidationError

from forge_build import patch
from forge_build.fetch.git.mirror import repositories
from forge_build.lock import LockedSource, git
from forge_build.lock.cmake import declarations
from forge_build.manifest import GitDependency, Source
from forge_core.console import Console
from forge_core.errors import EnvironmentFailure, UsageError
from forge_core.store import Store
from forge_core.store.names import TREE

QUIET = Console(quiet=True)


def declared(name, url, tag):
    return f"FetchContent_Declare(\n  {name}\n  GIT_REPOSITORY {url}\n  GIT_TAG        {tag}\n)\n"


class Line:
    def __init__(self, tmp_path):
        self.tmp_path = tmp_path
        self.dependency = Origin(tmp_path / "dependency")
        self.needed = self.dependency.commit({"include/h.h": "h\n", "docs/d": "d\n", "CMakeLists.txt": "\n"})
        self.source = Origin(tmp_path / "source")
        self.store = Store.open()

    def lock(self, dependencies, cmake, *, previous=None, mirrors=(), console=QUIET, **files):
        commit = self.source.commit({"k/CMakeLists.txt": cmake, **{f"k/{name}": text for name, text in files.items()}})
        source = Source(git=self.source.source(commit, "k", dependencies=dependencies))
        with console.step("resolve") as step:
            return git.lock("kernel", source, previous, self.store, mirrors, step)

    def given(self, **more):
        return {"repo-x": {"url": self.dependency.url, "commit": self.needed, **more}}


@pytest.fixture
def line(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGE_STORE", str(tmp_path / "store"))
    return Line(tmp_path)


def test_a_source_is_locked_with_what_its_cmake_files_fetch(line, tmp_path):
    locked = line.lock(line.given(paths=["include"]), declared("Repo-X", line.dependency.url, line.needed))
    assert locked.tree == locked.patched_tree == line.source.tree("HEAD", "k")
    assert (locked.url, locked.subfolder) == (line.source.url, "k")
    item = locked.dependencies["repo-x"]
    assert (item.commit, item.tree, item.paths) == (line.needed, line.dependency.tree(line.needed), ("include",))
    (tmp_path / "alone/include").mkdir(parents=True)
    (tmp_path / "alone/include/h.h").write_text("h\n")
    assert item.taken == patch.tree_of(tmp_path / "alone")
    # the source's files had to come; those of the dependency did not
    assert line.store.derived_get(TREE, locked.tree) is not None
    assert line.store.derived_get(TREE, item.taken) is None


def test_the_whole_of_a_dependency_is_taken_where_no_paths_are_named(line):
    item = line.lock(line.given(), declared("repo-x", line.dependency.url, line.needed)).dependencies["repo-x"]
    assert item.taken == item.tree == line.dependency.tree(line.needed)


def test_manifest_and_tree_must_agree_and_every_disagreement_is_named(line):
    url = line.dependency.url
    cmake = declared("repo-x", url, "a" * 40) + declared("repo-extra", url, "v1")
    with pytest.raises(
        UsageError, match=r"sources.kernel.git.dependencies: .* disagree about 3 dependencies"
    ) as caught:
        line.lock(line.given() | {"repo-gone": {"url": url, "tag": "v1"}}, cmake)
    assert caught.value.exit_code == 2
    assert caught.value.details == (
        f"repo-x: the manifest says {url} {line.needed}; CMakeLists.txt:1 says {url} {'a' * 40}",
        "repo-gone: the manifest names it, no CMake file of the tree declares it",
        f"repo-extra: the manifest does not name it; CMakeLists.txt:6 says {url} v1",
    )
    with pytest.raises(UsageError, match="disagree about 1 dependencies") as caught:
        line.lock(line.given(), declared("repo-x", "https://other.invalid/x", line.needed))
    assert "https://other.invalid/x" in caught.value.details[0]


def test_dropped_dependencies_are_held_to_the_tree_too_but_not_fetched(line):
    reason = "compiled for other GPUs alone"
    gone = {"url": "https://gone.invalid/y", "tag": "v3", "needed": False, "reason": reason}
    cmake = declared("repo-x", line.dependency.url, line.needed)
    wanted = line.given() | {"repo-y": gone}
    with pytest.raises(UsageError, match="disagree about 1"):
        line.lock(wanted, cmake + declared("repo-y", "https://gone.invalid/y", "v4"))
    locked = line.lock(wanted, cmake + declared("repo-y", '"https://gone.invalid/y.git"', "v3"))
    item = locked.dependencies["repo-y"]
    assert (item.dropped, item.unlocked, item.taken) == (reason, None, None)


def test_what_cannot_be_had_is_unlocked_in_words_that_tell_nothing_of_this_machine(line, capsys):
    lost = "b" * 40
    wanted = line.given() | {
        "repo-lost": {"url": line.dependency.url, "commit": lost, "paths": ["include"]},
        "repo-mute": {"url": "file:///nowhere/at/all", "tag": "v1"},
        "repo-untagged": {"url": line.dependency.url, "tag": "v9"},
    }
    cmake = "".join(declared(name, item["url"], item.get("commit") or item["tag"]) for name, item in wanted.items())
    locked = line.lock(wanted, cmake, console=Console())
    states = {name: item.unlocked for name, item in locked.dependencies.items()}
    assert states == {
        "repo-x": None,
        "repo-lost": "its repository has no such commit or tag",
        "repo-mute": "its repository does not answer",
        "repo-untagged": "its repository has no such commit or tag",
    }
    assert locked.dependencies["repo-lost"].commit == lost
    assert "kernel/repo-lost is unlocked, and production will refuse it" in capsys.readouterr().err
    assert LockedSource.model_validate(yaml.safe_load(yaml.safe_dump(locked.model_dump(mode="json")))) == locked


def test_what_was_locked_before_stays_when_it_cannot_be_had_now(line):
    cmake = declared("repo-x", line.dependency.url, line.needed)
    before = line.lock(line.given(paths=["include"]), cmake)
    line.dependency.gone()
    assert line.lock(line.given(paths=["include"]), cmake, previous=before).dependencies == before.dependencies
    # but not for other paths, nor without a lock
    assert line.lock(line.given(paths=["docs"]), cmake, previous=before).dependencies["repo-x"].unlocked
    assert line.lock(line.given(paths=["include"]), cmake).dependencies["repo-x"].unlocked


def test_a_source_that_was_locked_and_stored_needs_no_repository_to_be_locked_again(line, tmp_path, monkeypatch):
    cmake = declared("repo-x", line.dependency.url, line.needed)
    before = line.lock(line.given(), cmake)
    commit = line.source.git("rev-parse", "HEAD")
    source = Source(git=line.source.source(commit, "k", dependencies=line.given()))
    line.source.gone()
    line.dependency.gone()
    with QUIET.step("resolve") as step:
        assert git.lock("kernel", source, before, line.store, (), step) == before
        for other in (
            None,
            before.model_copy(update={"subfolder": None}),
            before.model_copy(update={"tree": "f" * 40}),
        ):
            with pytest.raises(EnvironmentFailure):
                git.lock("kernel", source, other, line.store, (), step)


def test_a_tag_is_locked_once_and_looked_up_again_for_an_upgrade(line, tmp_path):
    line.dependency.git("tag", "v1")
    wanted = {"repo-x": {"url": line.dependency.url, "tag": "v1"}}
    cmake = declared("repo-x", line.dependency.url, "v1")
    before = line.lock(wanted, cmake)
    assert (before.dependencies["repo-x"].tag, before.dependencies["repo-x"].commit) == ("v1", line.needed)
    # a mirror whose own tag of that name is another commit
    fork = Origin(tmp_path / "fork")
    fork.commit({"include/h.h": "of the fork\n"})
    fork.git("tag", "v1")
    fork.mirror(tmp_path / "mirrors/a")
    line.dependency.mirror(tmp_path / "mirrors/b")
    mirrors = repositories([tmp_path / "mirrors"])
    assert line.lock(wanted, cmake, mirrors=mirrors).dependencies == before.dependencies
    moved = line.dependency.commit({"include/h.h": "moved\n"})
    line.dependency.git("tag", "-f", "v1")
    assert line.lock(wanted, cmake, previous=before).dependencies == before.dependencies
    assert line.lock(wanted, cmake).dependencies["repo-x"].commit == moved
    # beside a commit the tag is only what the tree says
    assert line.lock(line.given(tag="v1"), cmake).dependencies["repo-x"].commit == line.needed


def test_mirrors_alone_suffice_and_leave_no_trace(line, tmp_path):
    wanted, cmake = line.given(), declared("repo-x", line.dependency.url, line.needed)
    direct = line.lock(wanted, cmake)
    line.source.mirror(tmp_path / "mirrors/secret+one/repo")
    line.dependency.mirror(tmp_path / "mirrors/secret/two.git")
    commit = line.source.git("rev-parse", "HEAD")
    source = Source(git=line.source.source(commit, "k", dependencies=wanted))
    line.source.gone()
    line.dependency.gone()
    with QUIET.step("resolve") as step:
        with pytest.raises(EnvironmentFailure):
            git.lock("kernel", source, None, line.store, (), step)
        again = git.lock("kernel", source, None, line.store, repositories([tmp_path / "mirrors"]), step)
    assert again == direct
    assert "secret" not in again.model_dump_json()


def test_a_dependency_of_a_dependency_may_stand_for_an_archive(line, tmp_path):
    json = Origin(tmp_path / "json")
    stands = json.commit({"include/json.hpp": "j\n"})
    line.needed = line.dependency.commit(
        {"CMakeLists.txt": "FetchContent_Declare(json URL https://x.invalid/3.tar.xz)\n"}
    )
    cmake = declared("repo-x", line.dependency.url, line.needed)
    inner = {"url": json.url, "commit": stands, "of": "repo-x"}
    wanted = line.given() | {"json": inner | {"declared": "https://x.invalid/3.tar.xz"}}
    assert line.lock(wanted, cmake).dependencies["json"].commit == stands
    for wrong in (inner, inner | {"declared": "https://x.invalid/4.tar.xz"}):
        with pytest.raises(UsageError, match="dependencies of kernel/repo-x: ") as caught:
            line.lock(line.given() | {"json": wrong}, cmake)
        assert "CMakeLists.txt:1 says https://x.invalid/3.tar.xz" in caught.value.details[0]


def test_paths_that_are_not_there_and_submodules_in_them_are_mistakes_of_the_manifest(line):
    line.dependency.git("update-index", "--add", "--cacheinfo", f"160000,{line.needed},third/party")
    line.dependency.git("commit", "-qm", "module")
    line.needed = line.dependency.git("rev-parse", "HEAD")
    cmake = declared("repo-x", line.dependency.url, line.needed)
    with pytest.raises(UsageError, match="no file or folder") as caught:
        line.lock(line.given(paths=["include", "nowhere", "docs/e"]), cmake)
    assert caught.value.details == ("'nowhere'", "'docs/e'")
    for paths in ([], ["third"]):
        with pytest.raises(UsageError, match="submodules"):
            line.lock(line.given(paths=paths), cmake)
    assert line.lock(line.given(paths=["include"]), cmake).dependencies["repo-x"].taken


def test_a_source_with_submodules_is_refused(line):
    line.source.commit({"k/a": "1\n"})
    line.source.git("update-index", "--add", "--cacheinfo", f"160000,{line.needed},k/third")
    with pytest.raises(UsageError, match="submodules"):
        line.source.folder.joinpath("k/third").mkdir()
        line.lock({}, "\n")


GOOD = {"url": "https://x.invalid/x", "commit": "a" * 40}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"commit": None}, "`commit` or `tag`"),
        ({"needed": False}, "needs a `reason`"),
        ({"reason": "because it is so, that is why"}, "needs a `reason`"),
        ({"paths": ["a", "a/b"]}, "'a/b' lies in 'a'"),
        ({"paths": ["a", "a"]}, "named twice"),
        ({"paths": ["a/../b"]}, "leaves the tree"),
        ({"paths": ["/a"]}, "pattern"),
        ({"paths": ["a/"]}, "pattern"),
        ({"tag": "--upload-pack=x y"}, "pattern"),
        ({"url": "ext::sh -c x"}, "no https"),
    ],
)
def test_mistakes_of_the_manifest(wrong, said):
    assert GitDependency.model_validate(GOOD | {"paths": ["a.b", "a", "ab/c"]})
    with pytest.raises(ValidationError, match=said):
        GitDependency.model_validate(GOOD | wrong)


def test_of_names_a_needed_dependency_of_the_source(line):
    for of in ("none", "y"):
        with pytest.raises(ValidationError, match="is no needed dependency"):
            line.source.source("a" * 40, dependencies={"y": GOOD | {"of": of}})


CMAKE = """
# FetchContent_Declare(repo-no GIT_REPOSITORY https://no.invalid/no GIT_TAG v0)
#[==[ FetchContent_Declare(repo-no2 GIT_REPOSITORY https://no.invalid/no GIT_TAG v0)
]] ]==]
set(TAG v2)
set(LIST a b c)
message("FetchContent_Declare(repo-no3 GIT_TAG v0)")
if("${CUDA}" VERSION_GREATER_EQUAL "12.8" AND (ON))
  fetchcontent_declare(Repo-A GIT_REPOSITORY "https://a.invalid/a" GIT_TAG ${TAG} GIT_SHALLOW OFF) # why
else()
  FetchContent_Declare (repo-a
    GIT_REPOSITORY https://a.invalid/a
    # GIT_TAG v0
    GIT_TAG [[v1]])
endif()
FetchContent_Declare(repo-b URL https://b.invalid/${UNKNOWN}.tar URL_HASH SHA256=00)
FetchContent_Populate(repo-a)
"""


def test_what_cmake_files_declare(tmp_path):
    (tmp_path / "cmake/deeper").mkdir(parents=True)
    (tmp_path / "CMakeLists.txt").write_text(CMAKE)
    (tmp_path / "cmake/c.cmake").write_bytes(b"# \xff\n" + declared("repo-c", "https://c.invalid/c", "${TAG}").encode())
    (tmp_path / "cmake/deeper/d.cmake").write_text(declared("repo-d", "https://d.invalid/d", "v1"))
    found = declarations(tmp_path)
    assert set(found) == {"repo-a", "repo-b", "repo-c"}
    assert [(d.repository, d.tag, d.where) for d in found["repo-a"]] == [
        ("https://a.invalid/a", "v2", "CMakeLists.txt:9"),
        ("https://a.invalid/a", "v1", "CMakeLists.txt:11"),
    ]
    assert str(found["repo-b"][0]) == "https://b.invalid/${UNKNOWN}.tar"
    assert (found["repo-c"][0].tag, found["repo-c"][0].where) == ("v2", "cmake/c.cmake:2")
    assert declarations(Path(tmp_path / "nowhere")) == {}


def test_one_of_several_declarations_must_be_the_manifests(tmp_path):
    (tmp_path / "CMakeLists.txt").write_text(CMAKE)
    found = {"repo-a": declarations(tmp_path)["repo-a"]}
    for tag in ("v1", "v2"):
        git.compare("x", {"repo-a": GitDependency(url="https://a.invalid/a", tag=tag)}, found)
    with pytest.raises(UsageError):
        git.compare("x", {"repo-a": GitDependency(url="https://a.invalid/a", tag="v3")}, found)
