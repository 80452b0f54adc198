"""Root file systems made by the real mmdebstrap from the rehearsal's real packages; takes the distribution's mirror and minutes."""

from __future__ import annotations

import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from forge_build import base as stage
from forge_build import lock as locks
from forge_build import manifest as manifests
from forge_build.fetch import Inputs, debian
from forge_build.fetch.download import Download, download
from forge_build.fetch.indexes import new_client
from forge_build.lock import LockedDeb
from forge_core.console import Console
from forge_core.errors import IntegrityError
from forge_core.store import Store

MANIFEST = manifests.load("rehearsal")
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """The runtime base's packages, in the user's store; those that moved on are taken as they are now."""
    store = Store.open()
    locked = locks.load(MANIFEST).debs["runtime"]
    missing = [deb for deb in locked if not store.has(deb.sha256)]
    used = {deb: deb for deb in locked}
    if missing:
        located = debian.locate(MANIFEST.base, missing, tmp_path_factory.mktemp("apt"))
        items = [(deb, url) for deb, url in located.urls.items()]
        for old, new in located.moved.items():
            assert new is not None, f"{old.file} is gone"
            used[old] = new[0]
            items.append(new)
        with QUIET.step("fetch") as step, new_client() as client:
            download([Download(d.file, url, d.sha256, d.size) for d, url in items], store, client, step)
    for deb in used.values():
        store.get(deb.sha256)
    return Inputs(store, {}, {"runtime": tuple(used.values())}, ())


def elsewhere(inputs: Inputs, root: Path) -> Inputs:
    """The same packages in another store, where nothing was made yet."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FORGE_STORE", str(root))
        store = Store.open()
    for deb in inputs.debs["runtime"]:
        store.add_file(inputs.path(deb.sha256))
    return Inputs(store, {}, inputs.debs, ())


def build(inputs: Inputs, log: Path) -> stage.Base:
    return stage.build("runtime", MANIFEST, inputs, log=log, console=QUIET)


@pytest.fixture(scope="module")
def made(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> stage.Base:
    place = tmp_path_factory.mktemp("made")
    return build(elsewhere(inputs, place / "store"), place / "log")


def test_two_bases_in_two_places_are_one_archive_of_the_packages_alone(
    made: stage.Base, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("LANG", "C")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # whoever asks the network fails
    other = elsewhere(inputs, tmp_path / "a longer name than the other")
    other_umask = os.umask(0o077)
    try:
        second = build(other, tmp_path / "log")
    finally:
        os.umask(other_umask)
    assert made.identity == second.identity
    assert (made.cached, second.cached, build(other, tmp_path / "log").cached) == (False, False, True)
    assert made.tools["mmdebstrap"].startswith("mmdebstrap 1.")
    assert made.rootfs is not None
    assert made.rootfs.stat().st_size == made.size
    with tarfile.open(made.rootfs) as archive:
        members = {member.name.removeprefix("./"): member for member in archive}
        machine_id = archive.extractfile("./etc/machine-id")
        assert machine_id is not None
        assert machine_id.read() == b""
    assert max(member.mtime for member in members.values()) <= MANIFEST.epoch
    assert "usr/bin/python3" in members
    assert "usr/share/doc/python3/copyright" in members
    for absent in ("etc/resolv.conf", "etc/hostname", "etc/apt/sources.list", "var/log/dpkg.log"):
        assert absent not in members, absent
    for folder in ("var/lib/apt/", "var/cache/", "usr/share/man/man", "usr/share/locale/de", "tmp/"):
        assert [name for name in members if name.startswith(folder) and members[name].isfile()] == [], folder
    assert [path for path in tmp_path.iterdir() if path.name.startswith(("mmdebstrap", "packages-"))] == []


def test_one_byte_changed_on_the_way_stops_the_base(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill = stage._repository

    def fill_and_flip(given: Inputs, debs: tuple[LockedDeb, ...], folder: Path) -> None:
        fill(given, debs, folder)
        flip(next(folder.glob("zlib1g_*.deb")))

    other = elsewhere(inputs, tmp_path / "store")
    monkeypatch.setattr(stage, "_repository", fill_and_flip)
    with pytest.raises(IntegrityError, match="other bytes than the lock names") as caught:
        build(other, tmp_path / "log")
    assert any("zlib1g" in line and "Hash Sum mismatch" in line for line in caught.value.details)
    assert list((tmp_path / "store/derived").rglob("*.json")) == []
    assert list((tmp_path / "store/partial").iterdir()) == []


def flip(path: Path) -> None:
    path.chmod(0o644)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_the_archive_is_a_system_that_runs(made: stage.Base, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    subprocess.run(["tar", "-xf", str(made.rootfs), "-C", root], check=True)
    said = subprocess.run(
        ["chroot", root, "/usr/bin/python3", "-c", "import ssl, ctypes, sys; print(sys.version_info[:2])"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert said.strip() == str(tuple(int(part) for part in MANIFEST.target.python.split(".")))
