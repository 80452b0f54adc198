"""Find the engine that answers."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import docker
import docker.errors
import requests
from docker.context import ContextAPI
from docker.context.config import get_current_context_name
from docker.tls import TLSConfig
from docker.utils import kwargs_from_env

from forge_core.engine import plugin
from forge_core.engine.place import Place
from forge_core.engine.ssh import Bridge
from forge_core.errors import EnvironmentFailure

HINT = "`nox -s engine` starts one"
_PING_S = 10
_PING_SSH_S = 40
_CALL_S = 120


@dataclass(frozen=True)
class Engine:
    """A container engine that answered."""

    client: docker.DockerClient
    address: str
    """As DOCKER_HOST takes it."""
    buildx: tuple[str, ...]
    """The command that builds; use `forge_core.engine.buildx.build`."""
    buildx_version: str
    version: str
    store: Literal["containerd", "classic"]
    """Image store; the classic one forgets manifest digests on `docker load`."""
    id: str
    """The engine's own id: changes when its data does."""
    owned: bool
    """Started by us, so `engine --stop` may stop it."""
    remote: bool
    """On another machine: it sees neither our folders nor a registry on our loopback."""
    env: Mapping[str, str] = field(default_factory=dict)
    """What a docker command needs to reach the same engine."""


class NoEngine(EnvironmentFailure):
    """No engine answers and the user named none: one may be installed."""


@dataclass(frozen=True)
class _Candidate:
    address: str
    source: str
    explicit: bool
    """Named by the user: when it does not answer that is an error, not a reason to build somewhere else."""
    tls: TLSConfig | bool = False
    env: Mapping[str, str] = field(default_factory=dict)


def connect(place: Place | None = None, *, builds: bool = True) -> Engine:
    """The first engine that answers: DOCKER_HOST, docker's current context, the default sockets, our own engine.

    Raises NoEngine (3, hint `nox -s engine`) when none does, EnvironmentFailure when the one the user named does not,
    BuildxMissing when there is nothing to build with; without `builds` that is no error (a host that only runs images
    needs no buildx) and `Engine.buildx` is empty.
    """
    place = place or Place.default()
    tried: list[str] = []
    for candidate in _candidates(place):
        try:
            client = _answering(candidate)
        except (docker.errors.DockerException, requests.RequestException, OSError) as error:
            reason = _reason(error)
            if candidate.explicit:
                raise EnvironmentFailure(
                    f"the engine at {candidate.address} ({candidate.source}) does not answer: {reason}",
                    hint=f"start it, or no longer name it and let the line find another; {HINT}",
                ) from error
            tried.append(f"{candidate.address} ({candidate.source}): {reason}")
            continue
        try:
            return _describe(client, candidate, place, builds)
        except BaseException:
            client.close()
            raise
    raise NoEngine("no container engine answers", hint=HINT, details=tuple(tried))


def connect_own(place: Place) -> Engine:
    """Our own engine of that place, whatever else answers; raises NoEngine when it does not."""
    candidate = _local(place.socket, "our own engine")
    try:
        client = _answering(candidate)
    except (docker.errors.DockerException, requests.RequestException, OSError) as error:
        raise NoEngine(f"the engine at {place.address} does not answer: {_reason(error)}", hint=HINT) from error
    try:
        return _describe(client, candidate, place)
    except BaseException:
        client.close()
        raise


def is_remote(address: str) -> bool:
    """Whether the address names another machine (ssh, or tcp to something else than loopback)."""
    parts = urlsplit(address)
    if parts.scheme in ("unix", "http+unix", "npipe", ""):
        return False
    if parts.scheme == "ssh":
        return True
    host = parts.hostname or ""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def _candidates(place: Place) -> list[_Candidate]:
    if address := os.environ.get("DOCKER_HOST"):
        try:
            settings = dict(kwargs_from_env())
        except docker.errors.DockerException as error:
            raise EnvironmentFailure(f"DOCKER_HOST {address}: {error}", hint="mend DOCKER_CERT_PATH") from error
        tls = settings.get("tls", False)
        assert isinstance(tls, TLSConfig | bool)
        return [_Candidate(address, "DOCKER_HOST", True, tls, {"DOCKER_HOST": address})]
    found = []
    if context := _context():
        found.append(context)
    sockets = [Path("/var/run/docker.sock")]
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        sockets.append(Path(runtime) / "docker.sock")
    found += [_local(s, "default socket") for s in sockets if s.exists()]
    found.append(_local(place.socket, "our own engine"))
    return found


def _local(socket: Path, source: str) -> _Candidate:
    address = f"unix://{socket}"
    # Ours wins over variables that would make a docker command look elsewhere or speak TLS.
    return _Candidate(address, source, False, env={"DOCKER_HOST": address, "DOCKER_TLS_VERIFY": ""})


def _context() -> _Candidate | None:
    """Docker's current context, unless it is the default one."""
    try:
        name = os.environ.get("DOCKER_CONTEXT") or get_current_context_name()
        context = ContextAPI.get_context(name)
    except Exception as error:  # docker-py raises bare Exception for a broken context file
        raise EnvironmentFailure(
            f"docker's current context cannot be read: {error}", hint="`docker context use default`"
        ) from error
    if context is None:
        raise EnvironmentFailure(
            f"docker's current context is {name!r}, which does not exist", hint="`docker context use default`"
        )
    if context.Name == "default" or not context.Host:
        return None
    # A docker command reads the context itself, its certificates included.
    env = {"DOCKER_CONTEXT": context.Name}
    return _Candidate(context.Host, f"docker context {context.Name}", True, context.TLSConfig or False, env)


def _answering(candidate: _Candidate) -> docker.DockerClient:
    bridge = Bridge(candidate.address) if candidate.address.startswith("ssh://") else None
    address, wait = (bridge.address, _PING_SSH_S) if bridge else (candidate.address, _PING_S)
    client = None
    try:
        client = docker.DockerClient(base_url=address, tls=candidate.tls, timeout=wait)
        client.ping()
    except BaseException as error:
        if client is not None:
            client.close()
        if bridge is not None:
            said = bridge.said
            bridge.close()
            if said and isinstance(error, Exception):
                raise OSError(f"ssh: {said}") from error
        raise
    client.api.timeout = _CALL_S
    return client


def _describe(client: docker.DockerClient, candidate: _Candidate, place: Place, builds: bool = True) -> Engine:
    info = client.info()
    containerd = any("io.containerd.snapshotter" in str(value) for _, value in info.get("DriverStatus") or ())
    try:
        buildx = plugin.find(place)
    except plugin.BuildxMissing:
        if builds:
            raise
        buildx = plugin.Buildx((), "none")
    own = candidate.address == place.address and place.dockerd() is not None
    native = place.started() == "systemd" and candidate.source == "default socket"
    return Engine(
        client=client,
        address=candidate.address,
        buildx=buildx.argv,
        buildx_version=buildx.version,
        version=str(info.get("ServerVersion", "unknown")),
        store="containerd" if containerd else "classic",
        id=str(info.get("ID", "")),
        owned=own or native,
        remote=is_remote(candidate.address),
        env=candidate.env,
    )


def _reason(error: BaseException) -> str:
    """The innermost cause, in one line: docker-py wraps a refused connection three times."""
    text = str(error)
    if text.startswith("ssh: "):
        return text
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    for known in ("Permission denied", "Connection refused", "No such file or directory", "timed out"):
        if known in text:
            return known
    return text.splitlines()[0] if text else type(error).__name__
