"""Trees from git in the store: packed, verified at every use, carried to another machine, unpacked for a build."""

import io
import json
import os
import random
import tarfile

import pytest
from git_factory import Origin

from forge_build import lock as locks
from forge_build import manifest as manifests
from forge_build import patch, steps
from forge_build.fetch import Inputs, fetch, git
from forge_build.fetch.git import archive
from forge_build.fetch.git.mirror import repositories
from forge_build.lock import Lock, LockedDependency, LockedSource
from forge_build.manifest import Source
from forge_build.record import _dependencies
from forge_core.__main__ import main as core
from forge_core.console import Console
from forge_core.errors import EnvironmentFailure, IntegrityError, UsageError
from forge_core.store import Store
from forge_core.store.names import TREE

QUIET = Console(quiet=True)


class Line:
    """A source with a dependency, and a lock that names both."""

    def __init__(self, tmp_path):
        self.source = Origin(tmp_path / "source")
        self.commit = self.source.commit({"kernel/a.cu": "one\n", "other": "x\n"})
        self.dependency = Origin(tmp_path / "dependency")
        self.needed = self.dependency.commit({"include/h.h": "h\n", "docs/d": "d\n"})
        self.tree = self.source.tree(self.commit, "kernel")
        (self.dependency.folder / "docs/d").unlink()
        self.taken = self.dependency.tree(self.dependency.commit())
        self.whole = self.dependency.tree(self.needed)
        self.store = Store.open()
        self.plan = manifests.load("rehearsal")

    def lock(self, **dependencies):
        given = LockedDependency(
            url=self.dependency.url,
            commit=self.needed,
            tree=self.whole,
            paths=("include",),
            taken=self.taken,
        )
        source = LockedSource(
            url=self.source.url,
            commit=self.commit,
            subfolder="kernel",
            tree=self.tree,
            patched_tree=self.tree,
            dependencies={"repo-x": given, **dependencies},
        )
        return Lock(schema_version=1, profile="trial", manifest="0" * 64, wheels={}, sources={"kernel": source})

    def fetch(self, lock=None, *, offline=False, mirrors=(), kind="rehearsal", console=QUIET):
        plan = self.plan.model_copy(update={"kind": kind})
        return fetch(plan, lock or self.lock(), self.store, offline=offline, console=console, mirrors=mirrors)

    def gone(self):
        self.source.gone()
        self.dependency.gone()


@pytest.fixture
def line(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGE_STORE", str(tmp_path / "store"))
    return Line(tmp_path)


def rewritten(path, change):
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def test_trees_come_once_and_are_there_offline_afterwards(line, tmp_path):
    inputs = line.fetch()
    assert inputs.trees == {"kernel": line.tree, "kernel/repo-x": line.taken}
    line.gone()
    assert line.fetch(offline=True) == inputs
    assert (inputs.tree("kernel", tmp_path / "out") / "a.cu").read_text() == "one\n"
    assert patch.tree_of(tmp_path / "out") == line.tree
    assert not (tmp_path / "out/other").exists()
    given = inputs.tree("kernel/repo-x", tmp_path / "given")
    assert [path.relative_to(given).as_posix() for path in given.rglob("*")] == ["include", "include/h.h"]
    assert not list((line.store.root / "partial").iterdir())


def test_offline_names_what_is_missing(line):
    with pytest.raises(EnvironmentFailure, match="2 of 2 source trees are not in") as caught:
        line.fetch(offline=True)
    assert [detail.split(" ")[0] for detail in caught.value.details] == ["kernel", "kernel/repo-x"]


def test_mirrors_serve_and_leave_no_trace(line, tmp_path):
    line.source.mirror(tmp_path / "mirrors/secret+place/repo")
    line.dependency.mirror(tmp_path / "mirrors/secret/deep/x.git")
    line.gone()
    with pytest.raises(EnvironmentFailure, match="does not give commit"):
        line.fetch()
    inputs = line.fetch(mirrors=repositories([tmp_path / "mirrors"]))
    for entry in (line.store.root / "derived").rglob("*.json"):
        assert "secret" not in entry.read_text()
    for path in (line.store.root / "objects").rglob("*"):
        assert path.is_dir() or b"secret" not in path.read_bytes()
    assert line.fetch(offline=True) == inputs


@pytest.mark.parametrize("name", ["kernel", "kernel/repo-x"])
def test_an_archive_with_other_bytes_is_an_integrity_error_and_comes_again(line, tmp_path, name):
    tree = line.fetch().trees[name]
    path = line.store.derived_get(TREE, tree).path

    def flip(data):
        data[512] ^= 1

    rewritten(path, flip)
    with pytest.raises(IntegrityError, match="has other bytes") as caught:
        line.fetch(offline=True)
    assert caught.value.exit_code == 5
    assert line.fetch().trees[name] == tree
    assert line.fetch(offline=True)


def test_an_archive_of_another_tree_under_the_same_key_is_an_integrity_error(line, tmp_path):
    inputs = line.fetch()
    for change in ("bytes", "mode", "name"):
        (tmp_path / change).mkdir()
        (tmp_path / change / ("b.cu" if change == "name" else "a.cu")).write_text(
            "two\n" if change == "bytes" else "one\n"
        )
        if change == "mode":
            (tmp_path / change / "a.cu").chmod(0o755)
        archive.pack(tmp_path / change, tmp_path / "other.tar")
        line.store.derived_put(TREE, line.tree, tmp_path / "other.tar", {})
        with pytest.raises(IntegrityError, match=f"the lock says {line.tree}"):
            inputs.tree("kernel", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        line.store.derived_put(TREE, line.tree, tmp_path / "other.tar", {})
        with pytest.raises(IntegrityError, match="nothing used it"):
            line.fetch(offline=True)
    assert line.fetch() == inputs


def test_a_lock_that_names_another_tree_for_the_commit_is_an_integrity_error(line):
    lock = line.lock()
    source = lock.sources["kernel"]
    wrong = source.model_copy(update={"tree": line.taken})
    with pytest.raises(IntegrityError, match=f"has the tree {line.tree}, the lock says {line.taken}"):
        line.fetch(lock.model_copy(update={"sources": {"kernel": wrong}}))
    item = source.dependencies["repo-x"]
    for field, other in (("tree", line.tree), ("taken", "f" * 40)):
        wrong = source.model_copy(update={"dependencies": {"repo-x": item.model_copy(update={field: other})}})
        with pytest.raises(IntegrityError, match="kernel/repo-x: "):
            line.fetch(lock.model_copy(update={"sources": {"kernel": wrong}}))


def test_production_refuses_what_is_unlocked_and_a_rehearsal_records_it(line):
    lock = line.lock(
        **{
            "repo-y": LockedDependency(url="https://y.invalid/y", unlocked="its repository does not answer"),
            "repo-z": LockedDependency(url="https://z.invalid/z", dropped="compiled for other GPUs"),
        }
    )
    with pytest.raises(UsageError, match="1 dependencies are unlocked") as caught:
        line.fetch(lock, kind="production")
    assert caught.value.details == ("kernel/repo-y: its repository does not answer",)
    assert not list((line.store.root / "derived").rglob("*.json"))
    inputs = line.fetch(lock)
    assert [(d.kind, d.subject, d.detail) for d in inputs.deviations] == [
        ("unlocked", "kernel/repo-y", "its repository does not answer")
    ]
    assert set(inputs.trees) == {"kernel", "kernel/repo-x"}


def test_what_arrives_is_shown(line, capsys):
    line.fetch(console=Console())
    said = capsys.readouterr().err
    assert "2 trees from git" in said
    assert "2 were missing" in said
    assert "sources done" in said


def test_what_is_on_its_way_is_counted(line, capsys, monkeypatch):
    monkeypatch.setattr("forge_build.fetch.git.clone._TICK_S", 0.001)
    monkeypatch.setattr("forge_core.console._PLAIN_INTERVAL_S", 0.0)
    line.fetch(console=Console())
    assert "kernel/repo-x, " in (said := capsys.readouterr().err)
    assert " received" in said


def test_lfs_pointers_are_named(tmp_path, line, capsys):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 5\n"
    line.commit = line.source.commit({"kernel/w.bin": pointer, ".gitattributes": "*.bin filter=lfs -text\n"})
    line.tree = line.source.tree(line.commit, "kernel")
    inputs = line.fetch(console=Console())
    assert "kernel: 1 files are Git LFS pointers, not what they point to: w.bin" in capsys.readouterr().err
    assert (inputs.tree("kernel", tmp_path / "out") / "w.bin").read_text() == pointer


NAMES = [b"plain", b"sp ace", b"new\nline", b"tab\t", b"quote\"'", b"back\\slash", b"\xff\xfe", "é—漢".encode(), b"-dash",
         b"x" * 200, b"deep/" + b"y" * 120 + b"/z", b"\xe2\x80\xa8line", b"#hash", b"git~1", b"a.b", b"a/b", b"a-b"]  # fmt: skip


def test_names_of_any_bytes_links_and_programs_are_kept(line, tmp_path):
    root = os.fsencode(line.source.folder / "kernel")
    for name in NAMES:
        path = root + b"/" + name
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as sink:
            sink.write(name * 3 + b"\r\n\0")
    os.chmod(root + b"/\xff\xfe", 0o755)
    os.symlink(b"../\xff/nowhere", root + b"/li\xffnk")
    os.symlink("/etc", root + b"/absolute")
    line.commit = line.source.commit()
    line.tree = line.source.tree(line.commit, "kernel")
    inputs = line.fetch()
    out = os.fsencode(inputs.tree("kernel", tmp_path / "out"))
    for name in NAMES:
        with open(out + b"/" + name, "rb") as stream:
            assert stream.read() == name * 3 + b"\r\n\0"
    assert os.readlink(out + b"/li\xffnk") == b"../\xff/nowhere"
    assert [os.access(out + b"/" + name, os.X_OK) for name in (b"\xff\xfe", b"plain")] == [True, False]
    assert patch.tree_of(tmp_path / "out") == line.tree


def test_our_tree_id_is_gits(tmp_path):
    rng = random.Random(5)
    for number in range(5):
        folder = tmp_path / f"{number}"
        for _ in range(rng.randrange(1, 20)):
            # names that git sorts as folders and as files: `a`, `a.`, `a/`, `a0`
            parts = ["".join(rng.choices("a.0-", k=rng.randrange(1, 3))) + "f" for _ in range(rng.randrange(3))]
            target = folder.joinpath(*parts, "".join(rng.choices("a.0-", k=3)))
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.is_dir():
                target.write_bytes(rng.randbytes(rng.randrange(3)))
                target.chmod(rng.choice([0o600, 0o755]))
        archive.pack(folder, tmp_path / "a.tar")
        assert archive.tree_id(tmp_path / "a.tar") == patch.tree_of(folder)
    (tmp_path / "empty").mkdir()
    archive.pack(tmp_path / "empty", tmp_path / "a.tar")
    assert archive.tree_id(tmp_path / "a.tar") == "4b825dc642cb6eb9a060e54bf8d69288fbee4904"


def test_equal_trees_give_equal_archives(tmp_path):
    for name, order, stamp in (("one", "abc", 1), ("two", "cba", 2_000_000_000)):
        for file in order:
            path = tmp_path / name / file / file
            path.parent.mkdir(parents=True)
            path.write_text(file)
            path.chmod(0o640 if stamp == 1 else 0o644)
            os.utime(path, (stamp, stamp))
        archive.pack(tmp_path / name, tmp_path / f"{name}.tar")
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()


def crafted(path, members):
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name, kind in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "x" if kind != tarfile.REGTYPE else ""
            tar.addfile(member, io.BytesIO())
    return path


@pytest.mark.parametrize(
    "members",
    [
        [("../out", tarfile.REGTYPE)],
        [("/abs", tarfile.REGTYPE)],
        [("a/./b", tarfile.REGTYPE)],
        [(".git/hooks/x", tarfile.REGTYPE)],
        [("a/.GIT/x", tarfile.REGTYPE)],
        [("a", tarfile.LNKTYPE)],
        [("a", tarfile.DIRTYPE)],
        [("a", tarfile.CHRTYPE)],
        [("a", tarfile.REGTYPE), ("a", tarfile.REGTYPE)],
        [("a", tarfile.SYMTYPE), ("a/b", tarfile.REGTYPE)],
        [("a/b", tarfile.REGTYPE), ("a", tarfile.SYMTYPE)],
    ],
)
def test_what_no_tree_holds_is_refused(tmp_path, members):
    with pytest.raises(IntegrityError):
        archive.tree_id(crafted(tmp_path / "a.tar", members))


def test_what_is_no_archive_is_refused(tmp_path):
    (tmp_path / "a.tar").write_bytes(b"x" * 5000)
    with pytest.raises(IntegrityError, match="no whole archive"):
        archive.tree_id(tmp_path / "a.tar")


def test_a_source_goes_patched_and_with_its_dependencies_into_the_compile(line, tmp_path, monkeypatch):
    plan = line.plan
    (tmp_path / "patches/kernel/s").mkdir(parents=True)
    (tmp_path / "patches/kernel/s/series").write_text("0001-two.patch\n")
    (tmp_path / "patches/kernel/s/0001-two.patch").write_text(
        "Description: two\nAuthor: x <x@y.invalid>\nForwarded: not-needed\nLast-Update: 2026-01-01\nApplies-To: >=1,<2\n"
        "Retire-When: never\n---\n--- a/a.cu\n+++ b/a.cu\n@@ -1 +1 @@\n-one\n+two\n"
    )
    monkeypatch.setenv("FORGE_ROOT", str(tmp_path))
    folder = line.fetch().tree("kernel", tmp_path / "plain")
    patched = patch.apply("kernel", "1.0", folder, tmp_path / "patches/kernel/s")
    lock = line.lock()
    source = lock.sources["kernel"].model_copy(
        update={"series": "s", "patches": patched.locked(), "patched_tree": patched.patched_tree}
    )
    lock = lock.model_copy(update={"sources": {"kernel": source}})
    wanted = Source(git=line.source.source(line.commit, "kernel"), series="s")
    plan = plan.model_copy(update={"sources": {"kernel": wanted}})
    made = steps.patch_sources(plan, lock, line.fetch(lock), tmp_path / "scratch", QUIET)["kernel"]
    assert (made.path / "a.cu").read_text() == "two\n"
    assert (made.version, made.tree, made.patched_tree) == ("1.0", line.tree, patched.patched_tree)
    assert {name: item.tree for name, item in made.dependencies.items()} == {"repo-x": line.taken}
    assert (made.dependencies["repo-x"].path / "include/h.h").read_text() == "h\n"

    (recorded,) = _dependencies(source)
    assert (recorded.name, recorded.commit, recorded.taken) == ("repo-x", line.needed, line.taken)
    assert recorded.tree == line.dependency.tree(line.needed)


def test_trees_that_a_lock_names_are_kept_and_carried(line, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORGE_ROOT", str(tmp_path))
    (tmp_path / "build/manifests").mkdir(parents=True)
    locks.save(line.lock())
    assert core(["store", "export", str(tmp_path / "carried")]) == 3
    assert "2 of 2 source trees are not in" in capsys.readouterr().err
    inputs = line.fetch()
    assert core(["store", "gc", "--older-than", "0"]) == 0
    assert line.fetch(offline=True) == inputs
    assert core(["store", "export", str(tmp_path / "carried")]) == 0
    index = json.loads((tmp_path / "carried/forge-store.json").read_text())
    assert {entry["key"] for entry in index["entries"]} == {line.tree, line.taken}
    monkeypatch.setenv("FORGE_STORE", str(tmp_path / "elsewhere"))
    assert core(["store", "import", str(tmp_path / "carried")]) == 0
    line.store = Store.open()
    line.gone()
    assert line.fetch(offline=True).trees == inputs.trees
    for path in (tmp_path / "build/manifests").iterdir():
        path.unlink()
    assert core(["store", "gc", "--older-than", "0"]) == 0
    with pytest.raises(EnvironmentFailure, match="2 of 2 source trees"):
        line.fetch(offline=True)


def test_inputs_of_a_line_without_git_have_no_trees(line):
    lock = Lock(schema_version=1, profile="trial", manifest="0" * 64, wheels={})
    assert isinstance(line.fetch(lock, offline=True), Inputs)
    assert git.wanted(lock) == ()
