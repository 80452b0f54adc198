"""Finding an engine and a buildx, and where our own lies."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from docker.context import ContextAPI

from forge_core.engine import client, connect, plugin
from forge_core.engine.place import Place
from forge_core.errors import EnvironmentFailure, UsageError


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setenv("HOME", str(tmp_path))


def test_an_engine_that_the_user_named_is_not_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(EnvironmentFailure, match="does not answer: No such file") as caught:
        connect()
    assert not isinstance(caught.value, client.NoEngine)
    assert "nox -s engine" in (caught.value.hint or "") and caught.value.exit_code == 3


@pytest.mark.parametrize("address", ["ftp://nowhere", "tcp://127.0.0.1:1", "nonsense"])
def test_a_docker_host_that_cannot_be(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("DOCKER_HOST", address)
    with pytest.raises(EnvironmentFailure, match="does not answer"):
        connect()


def test_ssh_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "ssh"
    script.write_text("#!/bin/sh\necho 'ssh: connect to host elsewhere: no route' >&2\nexit 255\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("DOCKER_HOST", "ssh://elsewhere")
    with pytest.raises(EnvironmentFailure, match="no route"):
        connect()


def test_dockers_current_context_is_an_explicit_choice(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/context.sock"
    config = tmp_path / "docker" / "config.json"
    config.parent.mkdir()
    config.write_text("{}")  # docker-py takes the folder from it
    ContextAPI.create_context("builder", host=address)
    config.write_text(json.dumps({"currentContext": "builder"}))
    with pytest.raises(EnvironmentFailure, match=r"docker context builder\) does not answer"):
        connect()


def test_a_context_that_does_not_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "config.json").write_text('{"currentContext": "lost"}')
    with pytest.raises(EnvironmentFailure, match="lost"):
        connect()
    monkeypatch.setenv("DOCKER_CONTEXT", "gone")
    with pytest.raises(EnvironmentFailure, match="gone"):
        connect()


def test_no_engine_names_what_was_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = Place(tmp_path / "engine")
    monkeypatch.setattr(client, "_candidates", lambda _: [client._local(place.socket, "our own engine")])
    with pytest.raises(client.NoEngine) as caught:
        connect(place)
    assert str(place.socket) in caught.value.details[0] and "nox -s engine" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("address", "remote"),
    [
        ("unix:///var/run/docker.sock", False),
        ("tcp://127.0.0.1:2375", False),
        ("tcp://localhost:2375", False),
        ("tcp://[::1]:2375", False),
        ("tcp://10.1.2.3:2376", True),
        ("tcp://builder:2376", True),
        ("ssh://me@builder", True),
    ],
)
def test_is_remote(address: str, remote: bool) -> None:
    assert client.is_remote(address) is remote


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_buildx_is_looked_for_where_docker_looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plugin, "_SYSTEM_FOLDERS", ())
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    program(tmp_path / "bin/docker", "[ $1 = buildx ] && echo 'github.com/docker/buildx v0.20.1 abc' || exit 1")
    place = Place(tmp_path / "engine")
    assert plugin.find(place) == plugin.Buildx((str(tmp_path / "bin/docker"), "buildx"), "0.20.1")
    # one that does not run is passed over, one that runs goes first
    found = program(tmp_path / "docker/cli-plugins/docker-buildx", "exit 1")
    assert plugin.find(place).version == "0.20.1"
    program(found, "echo 'github.com/docker/buildx 0.29.1+ds1 x'")
    assert plugin.find(place) == plugin.Buildx((str(found),), "0.29.1+ds1")


def test_no_buildx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(plugin, "_SYSTEM_FOLDERS", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(plugin.BuildxMissing) as caught:
        plugin.find(Place(tmp_path / "engine"))
    assert "docker-buildx" in (caught.value.hint or "")


def test_the_place_is_what_the_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORGE_ENGINE_ROOT", raising=False)
    monkeypatch.delenv("FORGE_ENGINE_BRIDGE", raising=False)
    assert Place.default() == Place(Path("/var/lib/sm120-forge/engine"))
    monkeypatch.setenv("FORGE_ENGINE_ROOT", "/srv/second")
    monkeypatch.setenv("FORGE_ENGINE_BRIDGE", "forge1=10.9.0.1/24")
    assert Place.default() == Place(Path("/srv/second"), "forge1", "10.9.0.1/24")


@pytest.mark.parametrize(("name", "value"), [("FORGE_ENGINE_ROOT", "/" + "x" * 80), ("FORGE_ENGINE_BRIDGE", "forge1")])
def test_a_place_that_cannot_be(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=name):
        Place.default()


def test_a_stale_pid_file_names_nobody(tmp_path: Path) -> None:
    place = Place(tmp_path)
    assert place.dockerd() is None and place.started() is None
    place.run.mkdir()
    for content in ("", "nonsense", "999999999", str(os.getpid())):
        place.pidfile.write_text(content)
        assert place.dockerd() is None
    for state in ("", "[]", '{"started": "nonsense"}'):
        place.state.write_text(state)
        assert place.started() is None
