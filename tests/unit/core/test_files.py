"""Half-written stays invisible."""

import shutil
from pathlib import Path

import pytest

from forge_core.files import atomic_folder, atomic_path, write_text


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_file_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "new" / "x.txt"
    with atomic_path(target, mode=0o444) as aside:
        aside.write_text("whole")
        assert not target.exists() and aside.parent == target.parent
    assert target.read_text() == "whole" and target.stat().st_mode & 0o777 == 0o444
    assert names(target.parent) == ["x.txt"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "x.txt"
    write_text(target, "old")
    with pytest.raises(error), atomic_path(target) as aside:
        aside.write_text("half")
        raise error
    assert target.read_text() == "old" and names(tmp_path) == ["x.txt"]


def test_text_is_utf_8(tmp_path: Path) -> None:
    write_text(tmp_path / "x", "é✓\n")
    assert (tmp_path / "x").read_bytes() == "é✓\n".encode()
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o644


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    target = tmp_path / "tree"
    for content in ("one", "two"):
        with atomic_folder(target) as aside:
            (aside / content).write_text(content)
        assert names(target) == [content] and names(tmp_path) == ["tree"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_the_old_folder(tmp_path: Path, error: type[BaseException]) -> None:
    target = tmp_path / "tree"
    with atomic_folder(target) as aside:
        (aside / "old").touch()
    with pytest.raises(error), atomic_folder(target) as aside:
        (aside / "half").touch()
        raise error
    assert names(target) == ["old"] and names(tmp_path) == ["tree"]


def test_an_old_folder_is_never_seen_half_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted while the old one is removed: by then the new one is in its place."""
    target = tmp_path / "tree"
    with atomic_folder(target) as aside:
        (aside / "old").touch()

    def interrupted(path: Path, ignore_errors: bool = False) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), atomic_folder(target) as aside:
        (aside / "new").touch()
        monkeypatch.setattr(shutil, "rmtree", interrupted)
    assert names(target) == ["new"]


def test_the_old_folder_comes_back_when_the_new_one_cannot_be_placed(tmp_path: Path) -> None:
    target = tmp_path / "tree"
    with atomic_folder(target) as aside:
        (aside / "old").touch()
    with pytest.raises(FileNotFoundError), atomic_folder(target) as aside:
        kept = aside.with_name("moved")
        original = Path.chmod

        def moves(self: Path, mode: int, *, follow_symlinks: bool = True) -> None:
            original(self, mode)
            self.rename(kept)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "chmod", moves)
            aside.chmod(0o755)
        aside.mkdir()
        aside.rmdir()
    assert names(target) == ["old"]
