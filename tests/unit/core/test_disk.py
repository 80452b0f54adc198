from pathlib import Path

from forge_core import disk


def test_a_place_that_is_not_there_yet_is_on_its_parents_disk(tmp_path: Path) -> None:
    here, later = disk.free(tmp_path), disk.free(tmp_path / "not" / "yet")
    assert here is not None and later is not None
    assert abs(here - later) < 2**30  # others write meanwhile
    assert here > 0


def test_tight_names_each_disk_once_and_only_when_it_is(tmp_path: Path) -> None:
    assert disk.tight((tmp_path, tmp_path / "x"), 1) == []
    ((place, amount),) = disk.tight((tmp_path, tmp_path / "x"), 2**80)
    assert place == tmp_path
    assert amount > 0


def test_what_cannot_be_asked_is_not_called_tight(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert disk.free(file / "below") is None
    assert disk.tight((file / "below",), 2**80) == []
