"""Names of registries, errors of skopeo, the port of the registry on loopback."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from forge_core import registry
from forge_core.console import Console
from forge_core.errors import EnvironmentFailure, ForgeError, IntegrityError, UsageError
from forge_core.process import CommandFailed, Completed
from forge_core.registry import local, skopeo
from forge_core.registry.local import LocalRegistry

DIGEST = f"sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("repository", "loopback"),
    [
        ("127.0.0.1:5120/forge/rehearsal", True),
        ("127.8.9.1/forge", True),
        ("localhost:5000/forge", True),
        ("[::1]:5000/forge", True),
        ("::1", True),
        ("10.0.0.1:5000/forge", False),
        ("registry.example.org/forge", False),
        ("localhost.example.org/forge", False),
        ("127.0.0.1.example.org/forge", False),
    ],
)
def test_is_loopback(repository: str, loopback: bool) -> None:
    assert registry.is_loopback(repository) is loopback


def test_a_remote_engine_cannot_see_our_loopback() -> None:
    registry.require_reachable("127.0.0.1:5120/x", remote_engine=False)
    registry.require_reachable("registry.example.org/x", remote_engine=True)
    with pytest.raises(EnvironmentFailure, match="another machine"):
        registry.require_reachable("127.0.0.1:5120/x", remote_engine=True)


@pytest.mark.parametrize("repository", ["forge", "127.0.0.1:5120/x:tag", f"127.0.0.1:5120/x@{DIGEST}", "host/"])
def test_no_repository(tmp_path: Path, repository: str) -> None:
    with pytest.raises(UsageError, match="no repository"):
        registry.push(tmp_path / "a", repository, digest=DIGEST, tag=None, log=tmp_path / "log")


def test_no_digest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no digest"):
        registry.push(tmp_path / "a", "127.0.0.1:5120/x", digest="sha256:short", tag=None, log=tmp_path / "log")


@pytest.mark.parametrize(
    ("said", "kind", "text"),
    [
        ("reading manifest x in y: unauthorized: authentication required", EnvironmentFailure, "credentials"),
        ("pinging: Get https://r/v2/: x509: certificate signed by unknown authority", EnvironmentFailure, "trusted"),
        ("writing blob: write /var/tmp/x: no space left on device", EnvironmentFailure, "no space left"),
        ("Manifest list must be converted to type x to be written", IntegrityError, "survive"),
        ("dial tcp 127.0.0.1:1: connect: connection refused", EnvironmentFailure, "cannot be used"),
    ],
)
def test_what_skopeo_says(said: str, kind: type[ForgeError], text: str) -> None:
    line = f'time="2026-01-01T00:00:00Z" level=fatal msg="{said}"'
    completed = Completed(("skopeo", "copy"), 1, "", f"Getting image source signatures\n{line}\n", 0.1)
    error = skopeo._explained(CommandFailed(completed, None), "r.example.org/x", None)
    assert type(error) is kind and text in error.message
    assert error.details == (f'"{said}"',)


def test_credentials_of_another_registry_are_not_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    (tmp_path / "config.json").write_text('{"auths": {"r.example.org": {"auth": "Zm9yZ2U6c2VzYW1l"}}}')
    with skopeo._credentials("other.example.org/x") as authfile:
        assert authfile is None
    with skopeo._credentials("r.example.org/x") as authfile:
        assert authfile is not None and authfile.stat().st_mode & 0o077 == 0
        assert "Zm9yZ2U6c2VzYW1l" in authfile.read_text()
    assert not authfile.exists()


def test_the_local_registry_is_where_the_variables_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("FORGE_REGISTRY_PORT", "FORGE_REGISTRY_DATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FORGE_STORE", str(tmp_path / "store"))
    assert LocalRegistry.default() == LocalRegistry(tmp_path / "store/registry", 5120)
    monkeypatch.setenv("FORGE_REGISTRY_PORT", "5121")
    monkeypatch.setenv("FORGE_REGISTRY_DATA", str(tmp_path / "data"))
    assert LocalRegistry.default().address == "127.0.0.1:5121"
    assert LocalRegistry.default().folder == tmp_path / "data"
    monkeypatch.setenv("FORGE_REGISTRY_PORT", "http")
    with pytest.raises(UsageError, match="FORGE_REGISTRY_PORT"):
        LocalRegistry.default()


def test_a_port_that_another_process_holds(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = LocalRegistry(tmp_path, server.getsockname()[1])
        with pytest.raises(EnvironmentFailure, match=r"held by process \d+") as caught:
            local.ensure(Console(quiet=True), taken)
        assert "FORGE_REGISTRY_PORT" in (caught.value.hint or "")
    assert local.stop(Console(quiet=True), taken) is False
