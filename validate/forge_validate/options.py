"""From a serving to what the engine is asked for: least privilege first, then what the serving needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docker.types import DeviceRequest, LogConfig, Mount, Ulimit

from forge_validate import caches
from forge_validate.caches import LABEL as LABEL
from forge_validate.injected import NOTHING, Injected
from forge_validate.serving import MODEL_MOUNT, Serving


def create(
    serving: Serving,
    name: str,
    identity: str,
    folder: Path,
    *,
    api_key: str | None = None,
    digest: str = "",
    injected: Injected = NOTHING,
) -> dict[str, Any]:
    """Arguments of docker-py's `containers.create` for the server.

    `digest` is the image's and belongs to the names of its caches: UsageError without it for a serving that has some.
    """
    chosen = _contained(serving, name, MODEL_MOUNT, folder, digest) | {
        "command": list(serving.arguments(identity, api_key)),
        # Port 0: the engine finds a free one, so nothing collides; loopback, so nobody else can ask.
        "ports": {f"{serving.port}/tcp": ("127.0.0.1", serving.host_port)},
    }
    if serving.command:
        chosen["entrypoint"] = list(serving.command)
    chosen["environment"] = {**serving.environment, **injected.environment}
    chosen["mounts"] += [Mount(path, str(here), type="bind", read_only=True) for here, path in injected.mounts]
    return chosen


def create_beside(
    serving: Serving, name: str, words: Sequence[str], mount: str, folder: Path, *, digest: str = ""
) -> dict[str, Any]:
    """The same for another command in the server's surroundings: no model and no network, `folder` at `mount`."""
    return _contained(serving, name, mount, folder, digest) | {
        "entrypoint": list(words),
        "command": [],
        "network_mode": "none",
    }


def _contained(serving: Serving, name: str, mount: str, folder: Path, digest: str) -> dict[str, Any]:
    """The image's own user, no capabilities, a read-only root; `folder` read-only; devices, limits and caches."""
    limits = serving.limits
    chosen: dict[str, Any] = {
        "name": name,
        "labels": {LABEL: serving.profile},
        "environment": serving.environment,
        # A bind mount, not a volume: a folder the engine does not see is an error then, not an empty folder.
        "mounts": [Mount(mount, str(folder), type="bind", read_only=True), *caches.mounts(serving, digest)],
        # Whatever the engine's default: no other container may join its shared memory.
        "ipc_mode": "private",
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "read_only": True,
        "tmpfs": {path: f"rw,nosuid,nodev,exec,mode=1777,size={size}" for path, size in serving.tmpfs.items()},
        "mem_limit": limits.memory,
        # Equal to the memory: no swap, so that what is too big dies instead of crawling.
        "memswap_limit": limits.memory,
        "pids_limit": limits.pids,
        "shm_size": limits.shm,
        "ulimits": [Ulimit(name=u.name, soft=u.soft, hard=u.hard) for u in limits.ulimits],
        # Reaps what the server's workers leave behind, and passes signals on.
        "init": True,
        # `docker logs` must be able to read it back, whatever the engine's default driver is.
        "log_config": LogConfig(type="json-file", config={"max-size": "64m"}),
    }
    if serving.user is not None:
        chosen["user"] = serving.user
    if requests := _devices(serving):
        chosen["device_requests"] = requests
    return chosen


def _devices(serving: Serving) -> list[DeviceRequest]:
    devices = serving.devices
    if devices.cdi:
        return [DeviceRequest(driver="cdi", device_ids=list(devices.cdi))]
    if devices.gpus == "all":
        return [DeviceRequest(count=-1, capabilities=[["gpu"]])]
    if devices.gpus:
        return [DeviceRequest(device_ids=list(devices.gpus), capabilities=[["gpu"]])]
    return []
