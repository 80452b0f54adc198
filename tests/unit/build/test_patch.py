from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from forge_build import patch
from forge_build.lock import LockedSource
from forge_build.patch import Outcome
from forge_core.errors import IntegrityError, UsageError

HEADER = """Description: Count to three
 in a longer way
Author: sm120-forge maintainers
Forwarded: not-needed
Last-Update: 2026-11-30
Applies-To: >=1.0,<2
Retire-When: the source counts by itself
---
"""
DIFF = """diff --git a/count.txt b/count.txt
--- a/count.txt
+++ b/count.txt
@@ -1,3 +1,3 @@
 one
-two
+TWO
 three
@@ -8,3 +8,3 @@ eight
 eight
-nine
+NINE
 ten
"""
NUMBERS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "tree"
    (folder / "sub").mkdir(parents=True)
    (folder / "count.txt").write_text("\n".join(NUMBERS) + "\n")
    (folder / "sub" / "run.sh").write_bytes(b"#!/bin/sh\r\n")
    (folder / "sub" / "run.sh").chmod(0o755)
    return folder


def series(tmp_path: Path, **files: str) -> Path:
    folder = tmp_path / "fixes"
    folder.mkdir(exist_ok=True)
    (folder / "series").write_text("# ours\n" + "".join(f"{name}.patch\n" for name in files))
    for name, text in files.items():
        (folder / f"{name}.patch").write_text(text)
    return folder


def oid(kind: str, data: bytes) -> bytes:
    return hashlib.sha1(f"{kind} {len(data)}\0".encode() + data).digest()


def expected_tree(folder: Path) -> bytes:
    """Git's tree id, computed without git."""
    rows = []
    for path in folder.iterdir():
        if path.is_dir():
            rows.append((path.name + "/", b"40000 " + path.name.encode() + b"\0" + expected_tree(path)))
        else:
            mode = b"100755" if os.access(path, os.X_OK) else b"100644"
            rows.append((path.name, mode + b" " + path.name.encode() + b"\0" + oid("blob", path.read_bytes())))
    return oid("tree", b"".join(row for _, row in sorted(rows)))


def test_the_tree_id_depends_on_the_files_alone(tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tree / ".gitattributes").write_text("* text=auto eol=crlf\n*.txt filter=lfs ident\n")
    (tree / ".gitignore").write_text("*\n")
    (tree / "idents.txt").write_text("$Id$\r\n")
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text("[core]\n autocrlf = true\n fileMode = false\n[commit]\n gpgSign = true\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("LANG", "de_DE.UTF-8")
    assert patch.tree_of(tree) == expected_tree(tree).hex()
    assert not (tree / ".git").exists()


def test_a_series_is_applied_as_commits(tree: Path, tmp_path: Path) -> None:
    second = HEADER + DIFF.replace("-two\n+TWO", "-TWO\n+2").replace("-nine\n+NINE", "-NINE\n+9")
    folder = series(tmp_path, one=HEADER + DIFF, two=second)
    before = expected_tree(tree).hex()
    patched = patch.apply("counter", "1.4", tree, folder)
    assert (tree / "count.txt").read_text().split() == [{"two": "2", "nine": "9"}.get(n, n) for n in NUMBERS]
    assert (patched.tree, patched.patched_tree) == (before, expected_tree(tree).hex())
    assert patched.series == "fixes"
    assert [p.file for p in patched.locked()] == ["one.patch", "two.patch"]
    assert patched.patches[0].description == "Count to three"


def test_without_a_series_the_tree_stays(tree: Path) -> None:
    patched = patch.apply("counter", "1.4", tree, None)
    assert patched.tree == patched.patched_tree
    assert patched.patches == ()


def test_a_conflict_names_patch_file_and_hunk(tree: Path, tmp_path: Path) -> None:
    (tree / "count.txt").write_text("\n".join(n if n != "ten" else "zehn" for n in NUMBERS) + "\n")
    with pytest.raises(UsageError) as caught:
        patch.apply("counter", "1.4", tree, series(tmp_path, one=HEADER + DIFF))
    assert "fixes/one.patch on counter 1.4: conflict" in caught.value.message
    assert "count.txt: hunk 2 (@@ -8,3 +8,3 @@) does not fit" in caught.value.details[0]
    assert "two" in (tree / "count.txt").read_text().split(), "a patch that conflicts must change nothing"


def test_a_file_that_is_gone_is_a_conflict(tree: Path, tmp_path: Path) -> None:
    (tree / "count.txt").unlink()
    with pytest.raises(UsageError) as caught:
        patch.apply("counter", "1.4", tree, series(tmp_path, one=HEADER + DIFF))
    assert "conflict" in caught.value.message
    assert "count.txt" in caught.value.details[0]


def test_context_is_exact(tree: Path, tmp_path: Path) -> None:
    """quilt and patch(1) would take this with fuzz 1."""
    (tree / "count.txt").write_text("\n".join("THREE" if n == "three" else n for n in NUMBERS) + "\n")
    with pytest.raises(UsageError, match="conflict"):
        patch.apply("counter", "1.4", tree, series(tmp_path, one=HEADER + DIFF))


def test_already_upstream_is_told_apart(tree: Path, tmp_path: Path) -> None:
    text = (tree / "count.txt").read_text().replace("two", "TWO").replace("nine", "NINE")
    (tree / "count.txt").write_text(text)
    with pytest.raises(UsageError) as caught:
        patch.apply("counter", "1.4", tree, series(tmp_path, one=HEADER + DIFF))
    assert "one.patch on counter 1.4: already upstream" in caught.value.message
    assert "series" in (caught.value.hint or "")


def test_a_patch_for_other_versions_is_to_be_retired(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        patch.apply("counter", "2.0", tree, series(tmp_path, one=HEADER + DIFF))
    assert "retire now" in caught.value.message
    assert "the source counts by itself" in caught.value.details[0]


def test_the_table_leaves_the_tree_alone(tree: Path, tmp_path: Path) -> None:
    upstream = HEADER + "--- a/sub/new\n+++ b/sub/new\n@@ -0,0 +1 @@\n+new\n"
    (tree / "sub" / "new").write_text("new\n")
    broken = HEADER + DIFF.replace("-two\n+TWO", "-zwei\n+ZWEI")
    later = (HEADER + DIFF).replace("-two\n+TWO", "-TWO\n+2").replace("-nine\n+NINE", "-NINE\n+9")
    folder = series(tmp_path, a=HEADER + DIFF, b=upstream, c=broken, d=later.replace("<2", "<1.2"))
    before = patch.tree_of(tree)
    rows = patch.table("1.4", tree, folder)
    assert [(row.patch.name, row.outcome) for row in rows] == [
        ("a.patch", Outcome.APPLIES),
        ("b.patch", Outcome.UPSTREAM),
        ("c.patch", Outcome.CONFLICT),
        ("d.patch", Outcome.RETIRED),
    ]
    assert patch.tree_of(tree) == before


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("Author: sm120-forge maintainers\n", "", "Author: missing"),
        ("Forwarded: not-needed", "Forwarded:", "Forwarded: missing"),
        ("Forwarded: not-needed", "Forwarded: maybe", "Forwarded: 'maybe'"),
        ("2026-11-30", "2026-13-30", "Last-Update: '2026-13-30'"),
        (">=1.0,<2", "1.x", "Applies-To: '1.x'"),
        ("Retire-When: the", "Retire-When the", "Retire-When: missing"),
        ("Retire-When: the", "Retire-When the", "'Retire-When the source counts by itself' is no header field"),
        ("Author: s", "Author: a\nAuthor: s", "Author: given 2 times"),
    ],
)
def test_malformed_headers_name_file_and_field(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert old in HEADER
    with pytest.raises(UsageError) as caught:
        patch.read_series(series(tmp_path, good=HEADER + DIFF, bad=HEADER.replace(old, new) + DIFF))
    assert any(detail.startswith("bad.patch: ") and told in detail for detail in caught.value.details)
    assert not any(detail.startswith("good.patch") for detail in caught.value.details)


def test_every_mistake_of_a_series_is_told(tmp_path: Path) -> None:
    folder = series(tmp_path, a=HEADER + DIFF, b=HEADER)
    with (folder / "series").open("a") as file:
        file.write("a.patch\ngone.patch\n../outside.patch\na.patch -p0\n")
    (tmp_path / "outside.patch").write_text(HEADER + DIFF)
    with pytest.raises(UsageError) as caught:
        patch.read_series(folder)
    told = "\n".join(caught.value.details)
    for part in ("b.patch: holds no diff", "a.patch: named twice", "gone.patch: named", "../outside.patch:", "`-p0`"):
        assert part in told


def locked(tree: Path, tmp_path: Path, folder: Path) -> LockedSource:
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in tree.rglob("*"):
        if path.is_file():
            target = copy / path.relative_to(tree)
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(path.read_bytes())
            target.chmod(path.stat().st_mode)
    done = patch.apply("counter", "1.4", copy, folder)
    return LockedSource(tree=done.tree, series="fixes", patches=done.locked(), patched_tree=done.patched_tree)


def test_the_lock_is_held_to(tree: Path, tmp_path: Path) -> None:
    folder = series(tmp_path, one=HEADER + DIFF)
    lock = locked(tree, tmp_path, folder)
    assert patch.apply("counter", "1.4", tree, folder, locked=lock).patched_tree == lock.patched_tree


def test_one_changed_byte_of_the_source_is_an_integrity_violation(tree: Path, tmp_path: Path) -> None:
    folder = series(tmp_path, one=HEADER + DIFF)
    lock = locked(tree, tmp_path, folder)
    (tree / "count.txt").write_text((tree / "count.txt").read_text().replace("two", "twO"))
    with pytest.raises(IntegrityError, match=r"counter: the tree is .*, the lock says"):
        patch.apply("counter", "1.4", tree, folder, locked=lock)


def test_patches_changed_since_the_lock_are_named(tree: Path, tmp_path: Path) -> None:
    folder = series(tmp_path, one=HEADER + DIFF)
    lock = locked(tree, tmp_path, folder)
    (folder / "one.patch").write_text(HEADER.replace("three", "four") + DIFF)
    with pytest.raises(UsageError) as caught:
        patch.apply("counter", "1.4", tree, folder, locked=lock)
    assert "changed since the lock" in caught.value.message
    assert caught.value.details == ("one.patch",)
    assert "two" in (tree / "count.txt").read_text().split()


def test_another_result_of_the_same_patches_is_an_integrity_violation(tree: Path, tmp_path: Path) -> None:
    folder = series(tmp_path, one=HEADER + DIFF)
    lock = locked(tree, tmp_path, folder).model_copy(update={"patched_tree": "0" * 40})
    with pytest.raises(IntegrityError, match="after the series"):
        patch.apply("counter", "1.4", tree, folder, locked=lock)


def make_wheel(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            member = zipfile.ZipInfo(name)
            member.compress_type = zipfile.ZIP_DEFLATED
            member.external_attr = (0o100775 if name.endswith(".sh") else 0o100600) << 16
            archive.writestr(member, data)
    return path


def test_a_wheel_is_unpacked_with_fixed_modes(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "a.whl", **{"a/b.py": b"b", "a/c.sh": b"c"})
    folder = patch.unpack_wheel(wheel, tmp_path / "out")
    assert {p.name: p.stat().st_mode & 0o777 for p in (folder / "a").iterdir()} == {"b.py": 0o644, "c.sh": 0o755}


def test_a_wheel_that_leaves_its_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match=r"\.\./evil"):
        patch.unpack_wheel(make_wheel(tmp_path / "a.whl", **{"../evil": b"x"}), tmp_path / "out")
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_a_damaged_wheel_is_refused(tmp_path: Path, damage: str) -> None:
    wheel = make_wheel(tmp_path / "a.whl", **{"a.py": bytes(range(256)) * 8})
    data = bytearray(wheel.read_bytes())
    data[45] ^= 0x10
    wheel.write_bytes(data if damage == "flipped" else data[:-30])
    with pytest.raises(IntegrityError):
        patch.unpack_wheel(wheel, tmp_path / "out")
