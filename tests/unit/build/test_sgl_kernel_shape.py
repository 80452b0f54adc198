"""The generated package: the series for sgl-kernel applies to it, whole, and it is made of the patches' own lines."""

import json

import pytest
import sgl_kernel_factory as shape
import sparse_patch

from forge_build import patch
from forge_build.__main__ import main


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shape")
    return shape.write(shape.Repositories(folder / "origins").files, folder / "package")


def test_the_whole_series_applies_to_the_shape(tree, tmp_path, capsys):
    asked = ["patches", str(tree), "--series", str(shape.SERIES), "--version", shape.VERSION, "--json"]
    assert main(asked) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["patch"] for row in rows] == [found.name for found in patch.read_series(shape.SERIES)]
    assert {row["outcome"] for row in rows} == {"applies"}
    one = shape.write(
        {str(p.relative_to(tree)): p.read_text() for p in tree.rglob("*") if p.is_file()}, tmp_path / "one"
    )
    assert patch.apply("sgl-kernel", shape.VERSION, one, shape.SERIES).tree == patch.tree_of(tree)
    # what is patched says so
    assert main([*asked[:1], str(one), *asked[2:]]) == 2
    assert json.loads(capsys.readouterr().out)[0]["outcome"] == "already upstream"


def test_each_hunk_fits_at_the_line_it_names(tree):
    for file, known in sparse_patch.before(shape.SERIES).items():
        lines = (tree / file).read_text().splitlines()
        assert {n: lines[n - 1] for n in known} == known


def test_a_patch_that_no_longer_follows_the_ones_before_it_is_noticed(tmp_path):
    first = "--- a/f\n+++ b/f\n@@ -1,3 +1,3 @@\n a\n-b\n+c\n d\n"
    (tmp_path / "series").write_text("1.patch\n2.patch\n")
    (tmp_path / "1.patch").write_text(first)
    (tmp_path / "2.patch").write_text("--- a/f\n+++ b/f\n@@ -2,3 +2,4 @@\n c\n+x\n d\n e\n")
    assert sparse_patch.before(tmp_path) == {"f": {1: "a", 2: "b", 3: "d", 4: "e"}}
    (tmp_path / "2.patch").write_text("--- a/f\n+++ b/f\n@@ -2,3 +2,4 @@\n b\n+x\n d\n e\n")
    with pytest.raises(AssertionError, match=r"2\.patch|1\.patch: f:2: the patch leaves 'c', a later one finds 'b'"):
        sparse_patch.before(tmp_path)


@pytest.mark.parametrize(
    ("gaps", "told"),
    [
        ({}, "nothing is written for the 2 lines before line 3"),
        ({"three": "1\n2\n3"}, "3 lines before 'three', there is room for 2"),
        ({"three": "1", "four": "2"}, r"leave no gap for \['four'\]"),
    ],
)
def test_a_gap_that_is_not_written_for_is_noticed(gaps, told):
    with pytest.raises(AssertionError, match=told):
        sparse_patch.filled({3: "three", 4: "four"}, gaps)
    assert sparse_patch.filled({3: "three", 4: "four"}, {"three": "1", "": "5"}) == "1\n\nthree\nfour\n5\n"
