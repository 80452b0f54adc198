"""An engine of our own in a root of its own: installed, hit, restarted, stopped, and built with. Needs root."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from forge_core.console import Console
from forge_core.engine import Engine, buildx, connect, daemon, install, plugin
from forge_core.engine.client import NoEngine, connect_own
from forge_core.engine.place import Place
from forge_core.engine.probe import probe
from forge_core.errors import EnvironmentFailure, UsageError

PROGRAMS = ("sh", "ls", "cat", "sleep", "dd")


def mounts(place: Place) -> list[str]:
    """Mounts of the place that this machine sees; another engine's come and go meanwhile."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in points if point == str(place.root) or point.startswith(f"{place.root}/")]


def pack_rootfs(path: Path) -> None:
    """A root file system of this machine's own shell and the libraries it needs: no registry is asked."""
    with tarfile.open(path, "w") as archive:
        added: set[str] = set()
        for program in PROGRAMS:
            found = shutil.which(program)
            assert found
            listed = subprocess.run(["ldd", found], capture_output=True, text=True, check=True).stdout
            for name in (*re.findall(r"(/\S+)", listed),):
                if name not in added:
                    added.add(name)
                    archive.add(Path(name).resolve(), arcname=name.lstrip("/"))
            archive.add(Path(found).resolve(), arcname=f"bin/{program}")


def running(*command: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == list(command)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    number = os.getpid() % 10000
    place = Place(Path(f"/var/lib/forge-engine-test-{number}"), f"forge{number}", "10.209.8.1/24")
    install.start(Console(), place).client.close()
    yield place
    install.stop(Console(), place)
    assert place.processes() == []
    assert mounts(place) == []
    shutil.rmtree(place.root)


@pytest.fixture
def engine(place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Engine]:
    monkeypatch.setenv("FORGE_STORE", str(tmp_path / "store"))
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    engine = install.start(Console(), place)
    yield engine
    engine.client.close()


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    pack_rootfs(folder / "rootfs.tar")
    return folder


def build(
    engine: Engine, context: Path, tmp_path: Path, *steps: str, output: str = "type=cacheonly"
) -> buildx.BuildResult:
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text("\n".join(["FROM scratch", "ADD rootfs.tar /", *steps]) + "\n")
    return buildx.build(
        engine, dockerfile=dockerfile, context=context, output=output, epoch=1_700_000_000, log=tmp_path / "build.log"
    )


@pytest.fixture
def image(engine: Engine, context: Path, tmp_path: Path) -> str:
    build(engine, context, tmp_path, output=f"type=docker,dest={tmp_path / 'image.tar'},name=forge-test:1")
    with (tmp_path / "image.tar").open("rb") as stream:
        engine.client.images.load(stream)
    return "forge-test:1"


def test_it_is_ours_and_starting_again_changes_nothing(engine: Engine, place: Place) -> None:
    before = place.dockerd()
    assert before is not None
    again = install.start(Console(), place)
    assert again.id == engine.id and place.dockerd() == before
    assert again.owned and not again.remote and again.store == "containerd"
    again.client.close()


def test_connect_finds_it_without_any_variable(
    engine: Engine, place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The socket is the machine's: nothing here may move it. CI's machine has none.
    if Path("/var/run/docker.sock").exists():
        pytest.skip("another engine answers on the default socket and goes first")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    found = connect(place)
    assert found.address == place.address
    found.client.close()


def test_the_probe_is_paid_once(engine: Engine) -> None:
    assert probe(engine) is False
    assert probe(engine) is True


def test_one_digest_whatever_the_times_of_files(engine: Engine, context: Path, tmp_path: Path) -> None:
    digests = set()
    for turn in (1, 2):
        os.utime(context / "rootfs.tar", (turn * 1e6, turn * 1e6))
        output = f"type=oci,dest={tmp_path / 'image.tar'},rewrite-timestamp=true"
        result = build(engine, context, tmp_path, "RUN echo x >/made", output=output)
        with tarfile.open(tmp_path / "image.tar") as archive:
            stream = archive.extractfile("index.json")
            assert stream is not None
            index = json.load(stream)
        assert index["manifests"][0]["digest"] == result.digest
        digests.add((result.digest, result.config_digest))
    assert len(digests) == 1
    assert result.cached_steps > 0


def test_containers_see_the_hosts_folders(engine: Engine, image: str, tmp_path: Path) -> None:
    (tmp_path / "seen").write_text("by the container\n")
    said = engine.client.containers.run(
        image,
        ["cat", "/x/seen"],
        volumes={str(tmp_path): {"bind": "/x", "mode": "ro"}},
        remove=True,
        network_mode="none",
    )
    assert said == b"by the container\n"


def test_a_step_has_no_network(engine: Engine, context: Path, tmp_path: Path) -> None:
    with pytest.raises(buildx.StepFailed) as caught:
        build(engine, context, tmp_path, "RUN cat /proc/net/dev && exit 7")
    devices = [line.split(":")[0].strip() for line in caught.value.details if ":" in line and "|" not in line]
    assert devices == ["lo"]


def test_a_failed_step_shows_its_first_errors_and_the_log(engine: Engine, context: Path, tmp_path: Path) -> None:
    noise = "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do echo noise $i; done"
    with pytest.raises(buildx.StepFailed) as caught:
        build(engine, context, tmp_path, "RUN echo fine", f"RUN {noise}; echo 'a.cu(3): error: no'; {noise}; exit 1")
    assert caught.value.exit_code == 1
    assert caught.value.details[0] == "a.cu(3): error: no"
    assert "[4/4]" in caught.value.step or "[3/3]" in caught.value.step
    assert caught.value.log == tmp_path / "build.log" and "noise 15" in caught.value.log.read_text()


def test_a_dockerfile_that_cannot_be_read_is_a_usage_error(engine: Engine, context: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        build(engine, context, tmp_path, "NONSENSE yes")


def test_a_full_disk_in_a_step(engine: Engine, context: Path, tmp_path: Path) -> None:
    step = "RUN --mount=type=tmpfs,target=/t,size=1048576 dd if=/dev/zero of=/t/x bs=1024 count=4096"
    with pytest.raises(EnvironmentFailure, match="no space left"):
        build(engine, context, tmp_path, step)


def test_a_full_disk_under_the_output_leaves_nothing(engine: Engine, context: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", small], check=True)
    try:
        with pytest.raises(EnvironmentFailure, match="no space left"):
            build(engine, context, tmp_path, output=f"type=oci,dest={small / 'image.tar'}")
        assert list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", small], check=True)


INTERRUPTED = """
import sys
from pathlib import Path
from forge_core.cli import guarded
from forge_core.console import Console
from forge_core.engine import buildx
from forge_core.engine.client import connect_own
from forge_core.engine.place import Place
root, context, folder = map(Path, sys.argv[1:])
def action():
    engine = connect_own(Place(root))
    buildx.build(engine, dockerfile=folder / "Dockerfile", context=context, output=f"type=oci,dest={folder}/out/i.tar",
                 epoch=1, log=folder / "build.log", on_line=lambda line: print(line, flush=True))
sys.exit(guarded(action, Console()))
"""


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_behind(
    engine: Engine, place: Place, context: Path, tmp_path: Path, sign: signal.Signals
) -> None:
    (tmp_path / "Dockerfile").write_text(
        f"FROM scratch\nADD rootfs.tar /\nRUN echo be{sign.value}gun; sleep 61.{sign.value}\n"
    )
    argv = [sys.executable, "-c", INTERRUPTED, str(place.root), str(context), str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert any(line.endswith(f"be{sign.value}gun\n") for line in child.stdout)
        child.send_signal(sign)
        child.stdout.read()
        assert child.wait(30) == 130
    assert list((tmp_path / "out").iterdir()) == []
    deadline = time.monotonic() + 15
    while sleeping := running("sleep", f"61.{sign.value}"):
        assert time.monotonic() < deadline, sleeping
        time.sleep(0.2)


def test_an_engine_that_goes_away_while_building(engine: Engine, place: Place, context: Path, tmp_path: Path) -> None:
    def hit() -> None:
        process = place.dockerd()
        assert process is not None
        process.kill()

    lines: list[str] = []

    def follow(line: str) -> None:
        if line.endswith(" begun") and not lines:
            lines.append(line)
            hit()

    (tmp_path / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\nRUN echo begun; sleep 62\n")
    with pytest.raises(EnvironmentFailure, match="went away") as caught:
        buildx.build(
            engine,
            dockerfile=tmp_path / "Dockerfile",
            context=context,
            output="type=cacheonly",
            epoch=1,
            log=tmp_path / "build.log",
            on_line=follow,
        )
    assert lines and "nox -s engine" in (caught.value.hint or "")
    install.start(Console(), place).client.close()


def test_a_hard_stop_is_survived(engine: Engine, place: Place, image: str) -> None:
    container = engine.client.containers.run(image, ["sleep", "63.5"], detach=True, network_mode="none")
    inside = running("sleep", "63.5")
    assert len(inside) == 1
    for process in place.processes():
        if process.name() in ("dockerd", "containerd", "containerd-shim-runc-v2"):
            process.kill()
    time.sleep(0.5)
    assert inside[0].is_running(), "the container outlives its engine, so that clearing it up is really tried"
    with pytest.raises(NoEngine):
        connect_own(place)
    # The number in the stale pid file may be another process's by now.
    place.pidfile.write_text(str(os.getpid()))
    assert place.dockerd() is None
    again = install.start(Console(), place)
    assert not inside[0].is_running() or inside[0].status() == psutil.STATUS_ZOMBIE
    assert again.client.containers.get(container.id).status == "exited"
    assert again.client.images.get(image)
    again.client.containers.get(container.id).remove()
    again.client.close()


def test_stop_leaves_no_process_no_mount_no_socket(engine: Engine, place: Place, image: str) -> None:
    engine.client.containers.run(image, ["sleep", "64.5"], detach=True, ports={"80/tcp": ("127.0.0.1", None)})
    assert install.stop(Console(), place) is True
    assert place.processes() == []
    assert mounts(place) == []
    assert not place.socket.exists() and not place.pidfile.exists() and not place.state.exists()
    assert running("sleep", "64.5") == []
    assert place.bridge is not None and not Path("/sys/class/net", place.bridge).exists()
    assert install.stop(Console(), place) is False
    again = install.start(Console(), place)
    assert again.client.images.get(image), "images survive a stop"
    again.client.containers.prune()
    again.client.close()


def test_stop_leaves_foreign_engines_alone(engine: Engine, place: Place, tmp_path: Path) -> None:
    other = Place(tmp_path / "other")
    other.run.mkdir(parents=True)
    process = place.dockerd()
    assert process is not None
    other.pidfile.write_text(str(process.pid))
    assert install.stop(Console(), other) is False
    assert process.is_running() and daemon.answers(place)


def test_a_published_port_reaches_the_container(engine: Engine, image: str) -> None:
    container = engine.client.containers.run(
        image, ["sleep", "65"], detach=True, ports={"8080/tcp": ("127.0.0.1", None)}
    )
    try:
        container.reload()
        port = int(container.ports["8080/tcp"][0]["HostPort"])
        socket.create_connection(("127.0.0.1", port), 5).close()
    finally:
        container.remove(force=True)


class Forwarder(threading.Thread):
    """A TCP port in front of a Unix socket: an engine reached over the network."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        self.path = path
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self.listener.getsockname()[1]}"

    def run(self) -> None:
        while True:
            try:
                near, _ = self.listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            far.connect(str(self.path))
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=self.pump, args=(source, sink), daemon=True).start()

    @staticmethod
    def pump(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass


def test_an_engine_over_tcp(engine: Engine, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    forwarder = Forwarder(place.socket)
    forwarder.start()
    monkeypatch.setenv("DOCKER_HOST", forwarder.address)
    found = connect(place)
    assert found.id == engine.id and found.address == forwarder.address and not found.owned
    assert probe(found) is False
    found.client.close()
    forwarder.listener.close()


def test_an_engine_over_ssh(engine: Engine, place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Stands in for ssh alone: what docker-py and buildx send through it is the real thing.
    script = tmp_path / "bin" / "ssh"
    script.parent.mkdir()
    script.write_text(
        f"#!{sys.executable}\n"
        "import os, socket, threading\n"
        f"s = socket.socket(socket.AF_UNIX); s.connect({str(place.socket)!r})\n"
        "def back():\n"
        "    while d := s.recv(65536): os.write(1, d)\n"
        "    os._exit(0)\n"
        "threading.Thread(target=back, daemon=True).start()\n"
        "while d := os.read(0, 65536): s.sendall(d)\n"
        "s.shutdown(socket.SHUT_WR)\n"
        "threading.Event().wait(5)\n"
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_HOST", "ssh://builder@elsewhere")
    found = connect(place)
    assert found.id == engine.id and found.remote and not found.owned
    assert probe(found) is False
    found.client.close()


def test_the_classic_store_is_told_what_to_change(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FORGE_STORE", str(tmp_path / "store"))
    install.stop(Console(), place)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(daemon, "DAEMON_JSON", {"features": {"containerd-snapshotter": False}})
            classic = install.start(Console(), place)
        assert classic.store == "classic"
        with pytest.raises(EnvironmentFailure, match="OCI archive") as caught:
            probe(classic)
        assert "containerd-snapshotter" in (caught.value.hint or "")
        classic.client.close()
    finally:
        install.stop(Console(), place)


def test_a_dead_engine_named_by_the_user_ends_with_3(tmp_path: Path) -> None:
    env = os.environ | {"DOCKER_HOST": f"unix://{tmp_path}/none.sock", "FORGE_STORE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", "forge_core", "engine"], env=env, capture_output=True, text=True)
    assert done.returncode == 3
    assert "does not answer" in done.stderr and "nox -s engine" in done.stderr
    assert done.stdout == ""


def test_buildx_of_the_newer_suite_runs_here(place: Place) -> None:
    # Only Debian 12 needs programs of a newer suite; on 13 there is nothing to look at.
    if not place.system.is_dir():
        pytest.skip("the distribution's own engine is new enough")
    found = plugin.find(place)
    assert tuple(map(int, found.version.split(".")[:2])) >= (0, 13)
