"""The production serving's options on a real engine: created from the recorded image and read back, not started.

The one start that is tried is the one that fails on a machine without a GPU.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import docker.errors
import pytest
from docker.models.containers import Container

from forge_core.engine import Engine, connect
from forge_core.errors import EnvironmentFailure
from forge_core.record import BuildRecord
from forge_validate import caches, launch, options, serving
from forge_validate.gpu import inventory
from forge_validate.serving import Devices, Serving

Make = Callable[[Serving], Container]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    found = connect(builds=False)
    with closing(found.client):
        yield found


@pytest.fixture
def plan() -> Serving:
    """The serving of sm120 under a name of its own, so that its caches are this test's."""
    return serving.load("sm120").model_copy(update={"profile": f"test-{secrets.token_hex(3)}"})


@pytest.fixture
def make(built: BuildRecord, engine: Engine, plan: Serving) -> Iterator[Make]:
    made: list[Container] = []
    engine.client.images.pull(built.image.repository, tag=built.image.digest)
    # A folder that an engine in a chroot sees, too.
    folder = Path(__file__).parents[1] / "testdata"

    def create(wanted: Serving) -> Container:
        name = f"sm120-forge-{wanted.profile}-{len(made)}"
        arguments = options.create(wanted, name, "word", folder, api_key="sk-test", digest=built.image.digest)
        made.append(engine.client.containers.create(str(built.image), **arguments))
        made[-1].reload()
        return made[-1]

    try:
        caches.prepare(engine, str(built.image), plan, built.image.digest)
        yield create
    finally:
        for container in made:
            container.remove(force=True)
        assert caches.remove(engine, caches.volumes(engine, plan.profile)) == ()
    label = f"{options.LABEL}={plan.profile}"
    assert engine.client.containers.list(all=True, filters={"label": label}) == []
    assert caches.volumes(engine, plan.profile) == ()


def with_devices(plan: Serving, **devices: Any) -> Serving:
    return plan.model_copy(update={"devices": Devices(**devices)})


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ({"gpus": "all"}, {"Driver": "", "Count": -1, "Capabilities": [["gpu"]]}),
        ({"gpus": ["0", "GPU-1"]}, {"Driver": "", "Count": 0, "DeviceIDs": ["0", "GPU-1"], "Capabilities": [["gpu"]]}),
        ({"cdi": ["nvidia.com/gpu=all"]}, {"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=all"]}),
    ],
)
def test_device_requests(make: Make, plan: Serving, devices: dict[str, Any], expected: dict[str, Any]) -> None:
    (request,) = make(with_devices(plan, **devices)).attrs["HostConfig"]["DeviceRequests"]
    assert {name: request[name] for name in expected} == expected


def test_limits_mounts_and_environment(make: Make, plan: Serving, built: BuildRecord) -> None:
    attrs = make(plan.model_copy(update={"host_port": 31999})).attrs
    host, config = attrs["HostConfig"], attrs["Config"]
    assert (host["ShmSize"], host["Memory"], host["MemorySwap"]) == (32 << 30, 384 << 30, 384 << 30)
    limits = {u["Name"]: (u["Soft"], u["Hard"]) for u in host["Ulimits"]}
    assert limits == {"memlock": (-1, -1), "stack": (64 << 20, 64 << 20), "nofile": (65536, 65536)}
    assert host["IpcMode"] == "private" and host["NetworkMode"] in ("default", "bridge")
    assert host["PortBindings"]["30000/tcp"] == [{"HostIp": "127.0.0.1", "HostPort": "31999"}]
    mounts = {m["Destination"]: m for m in attrs["Mounts"]}
    assert mounts["/model"]["RW"] is False
    digits = built.image.digest.removeprefix("sha256:")[:16]
    for cache, path in plan.caches.items():
        assert mounts[path]["Type"] == "volume" and mounts[path]["RW"] is True
        assert mounts[path]["Name"] == f"sm120-forge-{plan.profile}-{cache}-{digits}"
    assert set(mounts) == {"/model", *plan.caches.values()}
    told = dict(item.split("=", 1) for item in config["Env"])
    assert told.items() >= plan.environment.items() and told["NCCL_P2P_LEVEL"] == "SYS"
    words = config["Cmd"]
    assert words[words.index("--moe-runner-backend") + 1] == "flashinfer_cutlass"
    assert words[-2:] == ["--api-key", "sk-test"]


def test_volumes_are_the_images_own_and_writable_for_its_user(make: Make, plan: Serving, built: BuildRecord) -> None:
    """Started for real, without the devices: its user writes, and the next container finds it."""
    bare = plan.model_copy(
        update={
            "devices": Devices(),
            "limits": plan.limits.model_copy(update={"ulimits": (), "memory": "256m", "shm": "16m"}),
            "command": ("sh", "-c"),
        }
    )
    for script in ("for d in /cache/*; do echo kernel >$d/x || exit 1; done", "cat /cache/*/x"):
        container = make(bare.model_copy(update={"command": ("sh", "-c", script)}))
        container.start()
        assert container.wait()["StatusCode"] == 0, container.logs()
    assert container.logs().decode().split() == ["kernel"] * len(plan.caches)


def test_a_volume_of_another_image_is_not_taken(engine: Engine, plan: Serving, built: BuildRecord) -> None:
    name = caches.volume_name(plan, "triton", built.image.digest)
    foreign = engine.client.volumes.create(name, labels={"whose": "not ours"})
    try:
        with pytest.raises(EnvironmentFailure, match="is no cache of"):
            caches.prepare(engine, str(built.image), plan, built.image.digest)
    finally:
        foreign.remove()


# What it asks is what a machine without a GPU answers; with one the container would start.
@pytest.mark.skipif(inventory().absent is None, reason="there is a GPU here")
@pytest.mark.parametrize("devices", [{"gpus": "all"}, {"cdi": ["nvidia.com/gpu=all"]}])
def test_no_gpu_driver_is_an_environment_failure(make: Make, plan: Serving, devices: dict[str, Any]) -> None:
    # An engine without privileges may refuse memlock first; that is another test's matter.
    bare = plan.model_copy(update={"limits": plan.limits.model_copy(update={"ulimits": (), "memory": "256m"})})
    container = make(with_devices(bare, **devices))
    with pytest.raises(docker.errors.APIError) as refused:
        container.start()
    error = launch.engine_refused(refused.value, None)
    assert isinstance(error, EnvironmentFailure) and error.exit_code == 3
    assert "gives no GPU" in error.message and "nvidia-container-toolkit" in str(error.hint)
