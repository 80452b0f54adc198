"""The line as its user runs it: exit codes through nox, changed bytes in the store, two builds at once, interrupts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from filelock import FileLock

from forge_build import compile, lock, manifest
from forge_core import record
from forge_core.cli import project_root, work_folder
from forge_core.console import Console
from forge_core.engine import Engine, install
from forge_core.record import BuildRecord
from forge_core.store import Store

NOX = [sys.executable, "-m", "nox"]
BUILD = [sys.executable, "-m", "forge_build", "build", "--profile", "rehearsal"]


def run(argv: list[str], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, cwd=project_root(), env={**os.environ, **(env or {})}, capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="module")
def store(built: BuildRecord, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """A copy of the store, whose bytes may be changed; the staging registry stays the real one."""
    used = Store.open()
    copy = tmp_path_factory.mktemp("store")
    for name in ("objects", "derived"):
        shutil.copytree(used.root / name, copy / name)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("FORGE_STORE", str(copy))
        patched.setenv("FORGE_STAGING", built.image.repository)
        yield Store.open()
    shutil.rmtree(copy)


def flip(path: Path) -> None:
    """Change one byte in the middle of a file, and nothing of its size or time."""
    before = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as stream:
        stream.seek(before.st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(before.st_size // 2)
        stream.write(bytes([byte ^ 1]))
    path.chmod(0o444)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def derived(store: Store, kind: str) -> list[str]:
    """Sha256 of the objects that were made as `kind`."""
    return [json.loads(p.read_text())["sha256"] for p in sorted((store.root / "derived" / kind).glob("*.json"))]


@pytest.mark.parametrize("kind", ["wheel", "deb", "source", "model wheel", "rootfs", "built wheel", "model"])
def test_a_changed_byte_is_noticed_before_use(kind: str, store: Store, tmp_path: Path) -> None:
    plan = manifest.load("rehearsal")
    locked = lock.load(plan)
    source = locked.sources["flashinfer"].wheel
    assert source is not None
    victims = {
        "wheel": [locked.wheels["runtime"][0].sha256],
        "deb": [locked.debs["runtime"][0].sha256],
        "source": [source.sha256],
        "model wheel": [locked.wheels["model"][0].sha256],
        "rootfs": derived(store, "rootfs"),
        "built wheel": derived(store, "wheel"),
        "model": derived(store, "model"),
    }[kind]
    objects = {sha: store.path(sha) for sha in victims if store.path(sha).exists()}
    assert objects
    for sha, path in objects.items():
        shutil.copyfile(path, tmp_path / sha)
        flip(path)
    try:
        done = run(BUILD)
        assert done.returncode == 5, done.stderr
        assert "other bytes" in done.stderr
        # a failed build leaves nothing to validate
        assert not (work_folder("rehearsal") / record.FILE_NAME).exists()
    finally:
        for sha, path in objects.items():
            path.unlink(missing_ok=True)
            shutil.copyfile(tmp_path / sha, path)
    done = run(BUILD)
    assert done.returncode == 0, done.stderr


def test_two_checkouts_build_at_once_on_one_store(built: BuildRecord, store: Store, tmp_path: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=project_root(), capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(project_root() / name, tmp_path / name)
    shutil.rmtree(store.root / "derived" / "wheel")
    with ThreadPoolExecutor(2) as pool:
        builds = list(pool.map(lambda env: run([*BUILD, "--json"], env), [{}, {"FORGE_ROOT": str(tmp_path)}]))
    assert [build.returncode for build in builds] == [0, 0], "\n---\n".join(build.stderr for build in builds)
    records = [json.loads(build.stdout) for build in builds]
    assert {r["image"]["digest"] for r in records} == {built.image.digest}
    assert {r["wheels"][0]["sha256"] for r in records} == {built.wheels[0].sha256}
    # one compiled, the other waited and took it up
    assert sorted(r["wheels"][0]["cached"] for r in records) == [False, True]


def test_two_builds_in_one_checkout_go_one_after_the_other(built: BuildRecord, store: Store) -> None:
    with FileLock(work_folder("rehearsal") / "build.lock"):
        build = subprocess.Popen(BUILD, cwd=project_root(), stderr=subprocess.PIPE, text=True)
        assert build.stderr is not None
        assert "another build is using" in build.stderr.readline()
    rest = build.communicate(timeout=600)[1]
    assert build.returncode == 0, rest


def test_an_unchanged_build_works_offline_and_names_the_same_image(built: BuildRecord) -> None:
    # A proxy that nobody serves: whatever asks the network would fail.
    closed = {name: "http://127.0.0.1:9" for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")}
    done = run([*BUILD, "--offline", "--json"], closed | {"NO_PROXY": "127.0.0.1"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["image"] == built.image.model_dump()


def test_an_empty_store_offline_names_what_is_missing(tmp_path: Path, built: BuildRecord) -> None:
    done = run([*BUILD, "--offline"], {"FORGE_STORE": str(tmp_path), "FORGE_STAGING": built.image.repository})
    assert done.returncode == 3
    assert "--offline" in done.stderr and "store import" in done.stderr
    run(BUILD)


def test_the_recorded_wheel_holds_sm_120a_and_nothing_else(built: BuildRecord) -> None:
    assert built.architectures == ("sm_120a",)
    cubins = [o.cubins for w in built.wheels for o in w.objects]
    assert cubins and all(set(found) == {"sm_120a"} for found in cubins)
    assert all(o.ptx == () for w in built.wheels for o in w.objects)


def test_exit_codes_come_through_nox() -> None:
    done = run([*NOX, "-s", "build", "validate"])
    assert done.returncode == 2
    assert "rehearsal" in done.stderr and "sm120" in done.stderr
    assert "session validate" not in done.stderr

    done = run([*NOX, "-s", "build", "--", "--profile", "rehearsal"], {"DOCKER_HOST": "tcp://127.0.0.1:9"})
    assert done.returncode == 3
    assert "127.0.0.1:9" in done.stderr

    done = run([*NOX, "-s", "build", "--", "--profile", "rehearsal", "--model", "x"])
    assert done.returncode == 2


def test_an_edited_record_is_refused_through_nox() -> None:
    # A build that failed before, as one without an engine does, has left no record.
    assert run(BUILD).returncode == 0
    path = work_folder("rehearsal") / record.FILE_NAME
    whole = path.read_text(encoding="utf-8")
    try:
        path.write_text(whole.replace('"sm_120a"', '"sm_121a"', 1), encoding="utf-8")
        done = run([*NOX, "-s", "validate", "--", "--profile", "rehearsal"])
        assert done.returncode == 5
        path.unlink()
        done = run([*NOX, "-s", "validate", "--", "--profile", "rehearsal"])
        assert done.returncode == 2
    finally:
        path.write_text(whole, encoding="utf-8")


def compiling(engine: Engine, store: Store) -> list[str]:
    """Names of the containers that compile for this store."""
    found = engine.client.containers.list(all=True, filters={"label": compile.STORE_LABEL})
    return [str(c.name) for c in found if c.labels[compile.STORE_LABEL].endswith(f":{store.root}")]


def test_an_interrupt_ends_with_130_and_leaves_no_record(built: BuildRecord, store: Store) -> None:
    shutil.rmtree(store.root / "derived" / "wheel", ignore_errors=True)
    engine = install.ensure(Console(quiet=True))
    argv = [*NOX, "-s", "build", "--", "--profile", "rehearsal"]
    build = subprocess.Popen(argv, cwd=project_root(), stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert build.stderr is not None
    for line in build.stderr:
        if "==> compile" in line:
            break
    # With a warm compiler cache it takes seconds: the signal comes as soon as the container is there.
    while build.poll() is None and not compiling(engine, store):
        time.sleep(0.05)
    os.killpg(build.pid, signal.SIGINT)
    rest = build.stderr.read()
    assert build.wait(60) == 130, rest
    assert not (work_folder("rehearsal") / record.FILE_NAME).exists()
    assert not list((store.root / "derived").glob("wheel/*.json"))
    assert not compiling(engine, store)
    done = run(BUILD)
    assert done.returncode == 0, done.stderr
