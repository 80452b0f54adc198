"""The store: whole or not at all, verified at every use, safe for others at the same time."""

import errno
import json
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from forge_core.errors import EnvironmentFailure, IntegrityError
from forge_core.model import file_sha256
from forge_core.store import Store, access, sha256_of_text
from forge_core.store.access import InUse, alone, hold, writing


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGE_STORE", str(tmp_path / "store"))
    return Store.open()


def put(store, text):
    source = store.root / "partial" / "source"
    source.write_text(text)
    return store.add_file(source, move=True)


def flip(path):
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_an_object_is_named_by_its_bytes_and_read_only(store, tmp_path):
    source = tmp_path / "a.whl"
    source.write_bytes(b"wheel")
    os.utime(source, (1, 1))
    sha256 = store.add_file(source)
    path = store.get(sha256)
    assert sha256 == file_sha256(source) == path.name
    assert path.read_bytes() == b"wheel"
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert source.exists()
    assert not list((store.root / "partial").iterdir())


@pytest.mark.parametrize("move", [True, False])
def test_a_clamped_time_stamp_does_not_make_a_new_object_old(store, tmp_path, move):
    source = tmp_path / "a"
    source.write_bytes(b"x")
    os.utime(source, (1, 1))
    path = store.path(store.add_file(source, move=move))
    assert time.time() - path.stat().st_mtime < 60
    assert source.exists() is not move


def test_a_link_is_never_moved_into_the_store(store, tmp_path):
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    path = store.path(store.add_file(tmp_path / "link", move=True))
    assert path.is_file() and not path.is_symlink()
    assert (tmp_path / "real").exists()


@pytest.mark.parametrize("move", [True, False])
def test_other_bytes_than_named_do_not_come_in(store, tmp_path, move):
    source = tmp_path / "a.whl"
    source.write_bytes(b"wheel")
    with pytest.raises(IntegrityError, match=r"a\.whl: sha256 is .*, expected"):
        store.add_file(source, sha256=sha256_of_text("other"), move=move)
    assert source.exists()
    assert not list((store.root / "objects").rglob("*"))
    assert not list((store.root / "partial").iterdir())


def test_a_flipped_byte_is_found_and_deleted(store):
    sha256 = put(store, "some bytes")
    flip(store.path(sha256))
    with pytest.raises(IntegrityError, match=r"stored numpy\.whl \(" + sha256[:12]) as caught:
        store.get(sha256, "numpy.whl")
    assert caught.value.exit_code == 5
    assert caught.value.hint
    assert not store.has(sha256)


def test_a_missing_object_is_no_integrity_error(store):
    with pytest.raises(EnvironmentFailure, match=r"numpy\.whl .* is not in the store"):
        store.get("0" * 64, "numpy.whl")


def test_right_bytes_take_the_place_of_wrong_ones(store):
    sha256 = put(store, "some bytes")
    flip(store.path(sha256))
    put(store, "some bytes")
    assert store.get(sha256).read_text() == "some bytes"


def test_a_use_is_seen_in_the_time_stamp(store):
    path = store.path(put(store, "x"))
    os.utime(path, (1, 1))
    store.get(path.name, touch=False)
    assert path.stat().st_mtime == 1
    store.get(path.name)
    assert time.time() - path.stat().st_mtime < 60


def test_unreadable_sectors_count_as_wrong_bytes(store, monkeypatch):
    sha256 = put(store, "x")

    def broken(path):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("forge_core.store.file_sha256", broken)
    with pytest.raises(IntegrityError, match="unreadable"):
        store.get(sha256)
    assert not store.has(sha256)


def test_derived_objects_are_found_by_their_key(store, tmp_path):
    made = tmp_path / "made.tar"
    made.write_bytes(b"rootfs")
    assert store.derived_get("rootfs", "k1") is None
    put_in = store.derived_put("rootfs", "k1", made, {"seconds": 3})
    found = store.derived_get("rootfs", "k1")
    assert found == put_in
    assert found.meta == {"seconds": 3}
    assert found.path.read_bytes() == b"rootfs"


def test_a_derived_object_with_a_flipped_byte_is_an_integrity_error_once(store, tmp_path):
    made = tmp_path / "made.tar"
    made.write_bytes(b"rootfs")
    flip(store.derived_put("rootfs", "k1", made, {}).path)
    with pytest.raises(IntegrityError, match="rootfs k1"):
        store.derived_get("rootfs", "k1")
    assert store.derived_get("rootfs", "k1") is None


@pytest.mark.parametrize("text", ["", "{", "[]", '{"sha256": "x"}'])
def test_a_torn_entry_is_deleted_and_said(store, text):
    entry = store.entry("wheel", "k")
    entry.parent.mkdir()
    entry.write_text(text)
    with pytest.raises(IntegrityError):
        store.derived_get("wheel", "k")
    assert store.derived_get("wheel", "k") is None


def test_notes_hold_facts(store):
    assert store.note_get("image", "k") is None
    store.note_put("image", "k", {"digest": "sha256:1"})
    assert store.note_get("image", "k") == {"digest": "sha256:1"}
    store.entry("image", "k").write_text("[1]")
    assert store.note_get("image", "k") is None


def test_one_at_a_time_holds_a_lock_and_the_others_are_told(store):
    inside, waited, most = [], [], []

    def work():
        with store.lock("thing", waiting=lambda: waited.append(1)):
            inside.append(1)
            most.append(len(inside))
            time.sleep(0.3)
            inside.pop()

    threads = [threading.Thread(target=work) for _ in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert most == [1, 1, 1]
    assert waited


def test_who_waits_can_be_told_to_stop(store):
    def stop():
        raise InterruptedError

    with store.lock("thing"), pytest.raises(InterruptedError), store.lock("thing", waiting=stop):
        pass
    with store.lock("thing", waiting=stop):
        pass


def test_processes_add_the_same_object_at_once(store, tmp_path):
    source = tmp_path / "source"
    source.write_bytes(os.urandom(5_000_000))
    script = (
        "import sys, pathlib; from forge_core.store import Store; s = Store.open()\n"
        "for _ in range(5):\n"
        "    sha = s.add_file(pathlib.Path(sys.argv[1])); s.get(sha)\n"
        "print(sha)"
    )
    children = [
        subprocess.Popen([sys.executable, "-c", script, str(source)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert {child.communicate(timeout=60)[0].strip() for child in children} == {file_sha256(source)}
    assert not list((store.root / "partial").iterdir())


def test_nobody_is_alone_while_another_process_has_the_store(store):
    script = "from forge_core.store import Store; Store.open(); print('here', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "here\n"
        with pytest.raises(InUse, match=rf"in use \(processes: .*{child.pid}"), alone(store.root):
            pass
        child.kill()
        child.wait()
        with alone(store.root):
            pass
    finally:
        child.kill()
        child.communicate()


def test_the_shared_lock_comes_back_after_being_alone(store):
    with alone(store.root):
        pass
    assert hold(store.root) == access._HELD[store.root]
    other = os.open(store.root / "locks" / "in-use", os.O_RDWR)
    try:
        with pytest.raises(BlockingIOError):
            access.fcntl.flock(other, access.fcntl.LOCK_EX | access.fcntl.LOCK_NB)
    finally:
        os.close(other)


@pytest.fixture
def somebody_else():
    """What belongs to root cannot be written by who runs now."""
    # Root writes anywhere, so it must become another; a user owns the files and cannot give them away. CI is root.
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    os.seteuid(65534)
    yield
    os.seteuid(0)


def test_a_store_of_somebody_else_is_an_environment_error(store, tmp_path, request):
    sha256 = put(store, "x")
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents:
        if folder.name.startswith(("pytest-", "popen-")):
            folder.chmod(0o755)
    source = store.root / "partial" / "mine"
    source.write_text("y")
    request.getfixturevalue("somebody_else")
    access._HELD.pop(store.root)
    with pytest.raises(EnvironmentFailure, match=r"cannot be written by user 65534 .*belongs to user 0"):
        Store.open()
    with pytest.raises(EnvironmentFailure, match="cannot be written"):
        store.add_file(source)
    with pytest.raises(EnvironmentFailure, match="cannot be written"):
        store.note_put("image", "k", {})
    assert store.get(sha256).read_text() == "x"


def test_a_file_where_the_store_should_be(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FORGE_STORE", str(tmp_path / "file"))
    with pytest.raises(EnvironmentFailure, match="is no folder"):
        Store.open()


def test_a_full_disk_is_named():
    with pytest.raises(EnvironmentFailure, match="no space left on the disk of /somewhere") as caught:
        with writing(Path("/somewhere")):
            raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.exit_code == 3
    with pytest.raises(OSError, match="else"), writing(Path("/somewhere")):
        raise OSError(errno.ENOENT, "else")


def test_the_entry_is_written_after_its_object(store, tmp_path, monkeypatch):
    made = tmp_path / "made"
    made.write_bytes(b"x")

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("forge_core.store.write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.derived_put("wheel", "k", made, {})
    assert store.derived_get("wheel", "k") is None
    monkeypatch.undo()
    entry = json.loads(store.entry("wheel", "k").read_text()) if store.entry("wheel", "k").exists() else None
    assert entry is None
