from __future__ import annotations

import hashlib
import subprocess
import tarfile
from pathlib import Path

import pytest

from forge_build import base as stage
from forge_build import manifest as manifests
from forge_build.fetch import Inputs
from forge_build.lock import LockedDeb
from forge_build.manifest import Manifest
from forge_core.console import Console
from forge_core.errors import EnvironmentFailure, IntegrityError, Refused
from forge_core.process import CommandFailed, Completed
from forge_core.store import Store

REHEARSAL = manifests.load("rehearsal")
DIGEST = "sha256:" + "a" * 64


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("FORGE_STORE", str(tmp_path / "store"))
    return Store.open()


@pytest.fixture
def deb(store: Store, tmp_path: Path) -> LockedDeb:
    tree = tmp_path / "tree"
    (tree / "DEBIAN").mkdir(parents=True)
    (tree / "DEBIAN/control").write_text(
        "Package: thing\nVersion: 1:2-3\nArchitecture: all\nMaintainer: x <x@y>\nDescription: thing\n"
    )
    made = tmp_path / "thing.deb"
    subprocess.run(["dpkg-deb", "--build", tree, made], check=True, capture_output=True)
    sha256 = store.add_file(made)
    return LockedDeb(name="thing", version="1:2-3", architecture="all", sha256=sha256, size=made.stat().st_size)


def given(store: Store, *debs: LockedDeb) -> Inputs:
    return Inputs(store, {}, {"builder": debs, "runtime": debs}, ())


def build(manifest: Manifest, inputs: Inputs, tmp_path: Path) -> stage.Base:
    return stage.build("runtime", manifest, inputs, log=tmp_path / "log", console=Console(quiet=True))


def test_a_registry_image_is_taken_by_its_digest(store: Store, tmp_path: Path) -> None:
    named = REHEARSAL.base.model_copy(update={"runtime": None, "runtime_image": f"registry.invalid/base@{DIGEST}"})
    made = build(REHEARSAL.model_copy(update={"base": named}), given(store), tmp_path)
    assert (made.identity, made.rootfs, made.image) == (DIGEST, None, f"registry.invalid/base@{DIGEST}")


def test_the_repository_names_every_package_with_the_locked_bytes(store: Store, deb: LockedDeb, tmp_path: Path) -> None:
    folder = tmp_path / "repository"
    folder.mkdir(mode=0o700)
    stage._repository(given(store, deb), (deb,), folder)
    index = (folder / "Packages").read_text()
    assert (folder / "thing_1%3a2-3_all.deb").is_file()
    assert f"SHA256: {deb.sha256}\n" in index
    assert "Filename: ./thing_1%3a2-3_all.deb\n" in index
    assert index.startswith("Package: thing\n")
    assert folder.stat().st_mode & 0o777 == 0o755  # another user id of a name space reads it


def test_a_package_with_other_bytes_never_gets_into_the_repository(
    store: Store, deb: LockedDeb, tmp_path: Path
) -> None:
    path = store.path(deb.sha256)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    folder = tmp_path / "repository"
    folder.mkdir()
    with pytest.raises(IntegrityError, match=r"thing_1%3a2-3_all\.deb"):
        stage._repository(given(store, deb), (deb,), folder)
    assert list(folder.iterdir()) == []
    assert not path.exists()
    assert list((store.root / "partial").iterdir()) == []


def archive_with(tmp_path: Path, status: str) -> Path:
    path = tmp_path / "rootfs.tar"
    inside = tmp_path / "status"
    inside.write_text(status)
    with tarfile.open(path, "w") as archive:
        archive.add(inside, "./var/lib/dpkg/status")
    return path


@pytest.mark.parametrize(
    ("status", "wrong"),
    [
        ("Package: thing\nStatus: install ok installed\nVersion: 1:2-3\n", None),
        ("Package: thing\nStatus: install ok installed\nVersion: 1:2-4\n", "thing 1:2-4"),
        ("Package: thing\nVersion: 1:2-3\n\nPackage: more\nPriority: low\nVersion: 1\n", "more 1"),
        ("", "thing 1:2-3"),
    ],
)
def test_the_archive_must_hold_exactly_the_given_packages(
    deb: LockedDeb, tmp_path: Path, status: str, wrong: str | None
) -> None:
    archive = archive_with(tmp_path, status)
    if wrong is None:
        stage._prove(archive, (deb,))
        return
    with pytest.raises(IntegrityError) as caught:
        stage._prove(archive, (deb,))
    assert wrong in caught.value.details


@pytest.mark.parametrize(
    ("said", "kind", "hint"),
    [
        ("Err:1 copy:/x ./ thing\n  Hash Sum mismatch\nE: Failed to fetch copy:/x", IntegrityError, None),
        ("E: File has unexpected size (10 != 12). Mirror sync in progress?", IntegrityError, None),
        ("E: newuidmap 4711 0 100000 failed", EnvironmentFailure, "run as root"),
        ("E: cannot unshare the namespaces", EnvironmentFailure, "run as root"),
        ("dpkg: error: write: No space left on device\nE: failed", EnvironmentFailure, "free space"),
        ("E: thing: Depends: other but it is not installable", Refused, None),
    ],
)
def test_what_mmdebstrap_says_decides_the_exit_code(
    store: Store,
    deb: LockedDeb,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    kind: type[Exception],
    hint: str | None,
) -> None:
    def fail(argv: list[str], **_: object) -> Completed:
        raise CommandFailed(Completed(tuple(map(str, argv)), 1, said, "", 0.1), None)

    monkeypatch.setattr(stage, "run", fail)
    with pytest.raises(kind) as caught:
        stage._mmdebstrap(REHEARSAL, (deb,), tmp_path, tmp_path / "rootfs.tar", tmp_path / "log")
    assert isinstance(caught.value, IntegrityError | EnvironmentFailure | Refused)
    assert caught.value.details
    assert (hint or "") in (caught.value.hint or "")
    assert caught.value.log == tmp_path / "log"


def test_equal_packages_are_made_once_and_other_ones_anew(
    store: Store, deb: LockedDeb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[int] = []

    def made(manifest: Manifest, inputs: Inputs, debs: tuple[LockedDeb, ...], scratch: Path, log: Path) -> Path:
        runs.append(manifest.epoch)
        path = scratch / "rootfs.tar"
        path.write_bytes(f"{manifest.epoch} {sorted(d.sha256 for d in debs)}".encode())
        return path

    monkeypatch.setattr(stage, "_bootstrap", made)
    monkeypatch.setattr(stage, "run", lambda argv, **_: Completed(tuple(argv), 0, "mmdebstrap 1.3.5\n", "", 0.1))
    first = build(REHEARSAL, given(store, deb), tmp_path)
    again = build(REHEARSAL, given(store, deb), tmp_path)
    assert (first.cached, again.cached) == (False, True)
    assert first.identity == again.identity == hashlib.sha256(first.rootfs.read_bytes()).hexdigest()  # type: ignore[union-attr]
    other = deb.model_copy(update={"sha256": "0" * 64})
    assert not build(REHEARSAL, given(store, other), tmp_path).cached
    assert not build(REHEARSAL.model_copy(update={"epoch": 1795910401}), given(store, deb), tmp_path).cached
    assert len(runs) == 3
    assert first.tools == {"mmdebstrap": "mmdebstrap 1.3.5"}
    assert list((store.root / "partial").iterdir()) == []


def test_a_stored_archive_with_other_bytes_is_never_used(
    store: Store, deb: LockedDeb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(manifest: Manifest, inputs: Inputs, debs: tuple[LockedDeb, ...], scratch: Path, log: Path) -> Path:
        path = scratch / "rootfs.tar"
        path.write_bytes(b"root file system")
        return path

    monkeypatch.setattr(stage, "_bootstrap", made)
    monkeypatch.setattr(stage, "run", lambda argv, **_: Completed(tuple(argv), 0, "mmdebstrap 1.3.5\n", "", 0.1))
    rootfs = build(REHEARSAL, given(store, deb), tmp_path).rootfs
    assert rootfs is not None
    rootfs.chmod(0o644)
    rootfs.write_bytes(b"Root file system")
    with pytest.raises(IntegrityError):
        build(REHEARSAL, given(store, deb), tmp_path)
    assert not build(REHEARSAL, given(store, deb), tmp_path).cached
