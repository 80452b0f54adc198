"""Fetch in processes of its own: interrupted, killed, on a full disk, two at once; and for real from index and mirror."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from forge_build import lock as locks
from forge_build import manifest as manifests
from forge_build.fetch import fetch
from forge_core.console import Console
from forge_core.errors import EnvironmentFailure, IntegrityError
from forge_core.store import Store

DATA = os.urandom(8_000_000)
SHA = hashlib.sha256(DATA).hexdigest()

CHILD = """
import json, sys
from forge_build.fetch.download import Download, download
from forge_build.fetch.indexes import new_client
from forge_core.cli import guarded
from forge_core.console import Console
from forge_core.store import Store

def main():
    store = Store.open()
    with new_client() as client, console.step("download") as step:
        download([Download(**item) for item in json.loads(sys.argv[1])], store, client, step)

console = Console()
sys.exit(guarded(main, console))
"""


class Slow:
    """Gives DATA by and by, honours ranges, counts requests."""

    def __init__(self, server: HTTPServer) -> None:
        self.asked: list[str | None] = []
        self.pause = 0.3  # seconds: all of it takes longer than a process needs to start on a busy machine
        self.item = {"name": "big.whl", "location": server.url_for("/big.whl"), "sha256": SHA, "size": len(DATA)}
        server.expect_request("/big.whl").respond_with_handler(self.answer)

    def answer(self, request: Request) -> Response:
        self.asked.append(request.headers.get("Range"))
        start = int(request.range.ranges[0][0]) if request.range else 0
        rest = DATA[start:]

        def pieces() -> Iterator[bytes]:
            for at in range(0, len(rest), 100_000):
                yield rest[at : at + 100_000]
                time.sleep(self.pause)

        headers = {"Content-Length": str(len(rest))}
        if request.range:
            headers["Content-Range"] = f"bytes {start}-{len(DATA) - 1}/{len(DATA)}"
        return Response(pieces(), status=206 if request.range else 200, headers=headers)

    def start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHILD, json.dumps([self.item])]
        child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert child.stderr is not None
        assert "==> download" in child.stderr.readline()
        return child

    def wait_for_bytes(self, store: Store) -> None:
        partial = store.root / "partial" / SHA
        deadline = time.monotonic() + 30
        while not (partial.exists() and partial.stat().st_size >= 300_000):
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("FORGE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return Store.open()


@pytest.fixture
def slow() -> Iterator[Slow]:
    with HTTPServer(host="127.0.0.1", threaded=True) as server:
        yield Slow(server)


def finish(child: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, err = child.communicate(timeout=60)
    finally:
        child.kill()
    return child.returncode, err


@pytest.mark.parametrize(
    ("sign", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_an_interrupted_download_is_resumed_and_never_taken_for_whole(
    store: Store, slow: Slow, sign: signal.Signals, code: int
) -> None:
    child = slow.start()
    slow.wait_for_bytes(store)
    child.send_signal(sign)
    began = time.monotonic()
    assert finish(child)[0] == code
    assert time.monotonic() - began < 5
    assert not store.has(SHA)
    left = (store.root / "partial" / SHA).read_bytes()
    assert DATA.startswith(left)
    assert [p.name for p in (store.root / "partial").iterdir()] == [SHA]
    slow.pause = 0
    assert finish(slow.start())[0] == 0
    assert slow.asked == [None, f"bytes={len(left)}-"]
    assert store.get(SHA).read_bytes() == DATA
    assert not list((store.root / "partial").iterdir())


def test_two_processes_bring_an_object_once(store: Store, slow: Slow) -> None:
    slow.pause = 0.05
    children = [slow.start(), slow.start()]
    assert [finish(child)[0] for child in children] == [0, 0]
    assert slow.asked == [None]
    assert store.get(SHA)


def test_the_second_process_takes_over_from_a_killed_one(store: Store, slow: Slow) -> None:
    first = slow.start()
    slow.wait_for_bytes(store)
    second = slow.start()
    time.sleep(0.7)
    assert len(slow.asked) == 1
    first.kill()
    slow.pause = 0
    assert finish(second)[0] == 0
    finish(first)
    assert len(slow.asked) == 2
    assert slow.asked[1]
    assert store.get(SHA)


def test_a_waiting_process_can_be_interrupted(store: Store, slow: Slow) -> None:
    first = slow.start()
    slow.wait_for_bytes(store)
    second = slow.start()
    time.sleep(0.7)
    second.send_signal(signal.SIGINT)
    assert finish(second)[0] == 130
    slow.pause = 0
    assert finish(first)[0] == 0


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disk of 4 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", place], capture_output=True, text=True)
    # Only root mounts, which CI is: a user without may run all the rest.
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    monkeypatch.setenv("FORGE_STORE", str(place / "store"))
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_a_full_disk_while_downloading(small_disk: Path, slow: Slow) -> None:
    slow.pause = 0
    code, err = finish(slow.start())
    assert code == 3
    assert f"no space left on the disk of {small_disk}" in err
    assert "store gc" in err
    assert not Store.open().has(SHA)
    subprocess.run(["mount", "-o", "remount,size=20m", small_disk], check=True)
    assert finish(slow.start())[0] == 0
    assert slow.asked[1]
    assert Store.open().get(SHA).read_bytes() == DATA


def test_a_full_disk_while_placing(small_disk: Path, tmp_path: Path) -> None:
    store = Store.open()
    source = tmp_path / "made"
    source.write_bytes(DATA)
    for place in (
        lambda: store.add_file(source),
        lambda: store.derived_put("wheel", "k", source, {}),
    ):
        with pytest.raises(EnvironmentFailure, match=f"no space left on the disk of {small_disk}"):
            place()
    assert not list((store.root / "objects").rglob("*"))
    assert not list((store.root / "partial").iterdir())
    assert store.derived_get("wheel", "k") is None
    assert source.read_bytes() == DATA


def test_for_real_from_index_and_mirror(store: Store) -> None:
    manifest = manifests.load("rehearsal")
    lock = locks.load(manifest)
    wheels = sorted((w for w in lock.wheels["runtime"] if not w.index), key=lambda w: w.size)[:6]
    debs = sorted(lock.debs["runtime"], key=lambda d: d.size)[:4]
    part = lock.model_copy(
        update={"wheels": {"runtime": tuple(wheels)}, "debs": {"runtime": tuple(debs)}, "sources": {}}
    )
    inputs = fetch(manifest, part, store, offline=False, console=Console())
    assert all(inputs.path(w.sha256).stat().st_size == w.size for w in wheels)
    assert len(inputs.debs["runtime"]) == len(debs)
    moved = {d.subject for d in inputs.deviations}
    assert {now.sha256 for now in inputs.debs["runtime"]} >= {d.sha256 for d in debs if d.name not in moved}
    assert fetch(manifest, part, store, offline=True, console=Console()) == inputs
    path = inputs.path(wheels[0].sha256)
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(IntegrityError, match=wheels[0].file.split("-")[0]):
        fetch(manifest, part, store, offline=True, console=Console())
    assert fetch(manifest, part, store, offline=False, console=Console()) == inputs
