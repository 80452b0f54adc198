"""The inventory: what NVIDIA's management library (NVML) tells of this host, or why it tells nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Literal

import pynvml

from forge_core.model import Frozen

Virtualization = Literal["none", "passthrough", "vgpu", "host-vgpu", "host-vsga", "unknown"]

# In NVML's order (nvmlGpuVirtualizationMode_t).
_MODES: tuple[Virtualization, ...] = ("none", "passthrough", "vgpu", "host-vgpu", "host-vsga")

_WHY_ABSENT = {
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no NVIDIA driver is installed (libnvidia-ml.so.1 is not there)",
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA driver is installed, but not loaded",
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "the NVIDIA driver's library and kernel module are of different versions: load the new module, or reboot"
    ),
    pynvml.NVML_ERROR_NO_PERMISSION: "this user may not use the NVIDIA driver",
}


class Process(Frozen):
    """A process that computes on a GPU."""

    pid: int
    """In the host's name space."""
    used_bytes: int | None
    """GPU memory; none where the driver does not tell it per process."""


class Gpu(Frozen):
    """One GPU, as it was when it was asked."""

    index: int
    uuid: str
    name: str
    capability: str
    """Compute capability, for example `12.0`."""
    memory_total: int | None = None
    """Bytes; none where the driver does not tell (memory shared with the host)."""
    memory_used: int | None = None
    """Bytes, of all processes and of the driver itself."""
    processes: tuple[Process, ...] | None = None
    """None where the driver does not tell (a vGPU guest, no permission)."""
    mig: tuple[str, ...] | None = None
    """UUIDs of its MIG devices; none: not in MIG mode."""
    virtualization: Virtualization = "unknown"
    """`vgpu` is a share of a GPU in a virtual machine, `passthrough` a whole one."""

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.name}, {self.uuid})"


class Lost(Frozen):
    """A GPU that the driver counts and cannot talk to."""

    index: int
    why: str


class Inventory(Frozen):
    """What there is. Either `absent` says why there is nothing, or the versions are known."""

    absent: str | None = None
    driver: str | None = None
    """For example `580.95.05`."""
    cuda: str | None = None
    """The newest CUDA the driver serves, for example `13.0`."""
    gpus: tuple[Gpu, ...] = ()
    lost: tuple[Lost, ...] = ()


def inventory() -> Inventory:
    """Ask the driver; without driver, library or GPU the inventory says why. Raises nothing for what a host may lack."""
    try:
        with opened():
            return _ask()
    except pynvml.NVMLError as error:
        return Inventory(absent=_WHY_ABSENT.get(error.value, f"the NVIDIA driver does not answer: {error}"))


@contextmanager
def opened() -> Iterator[None]:
    """Keep NVML initialised. It counts: who polls holds it open once, instead of waking the GPUs each time."""
    pynvml.nvmlInit()
    try:
        yield
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _ask() -> Inventory:
    driver, cuda = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion_v2()
    gpus: list[Gpu] = []
    lost: list[Lost] = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            gpus.append(_gpu(index))
        except pynvml.NVMLError as error:
            lost.append(Lost(index=index, why=str(error)))
    if not gpus and not lost:
        return Inventory(absent=f"the NVIDIA driver {driver} sees no GPU")
    return Inventory(driver=driver, cuda=f"{cuda // 1000}.{cuda % 1000 // 10}", gpus=tuple(gpus), lost=tuple(lost))


def _gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    memory = _told(pynvml.nvmlDeviceGetMemoryInfo, handle)
    mode = _told(pynvml.nvmlDeviceGetVirtualizationMode, handle)
    return Gpu(
        index=index,
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        capability=f"{major}.{minor}",
        memory_total=None if memory is None else int(memory.total),
        memory_used=None if memory is None else int(memory.used),
        processes=_processes(handle),
        mig=_mig(handle),
        virtualization=_MODES[mode] if mode is not None and mode < len(_MODES) else "unknown",
    )


def _processes(handle: Any) -> tuple[Process, ...] | None:
    found = _told(pynvml.nvmlDeviceGetComputeRunningProcesses, handle)
    if found is None:
        return None
    return tuple(sorted((Process(pid=p.pid, used_bytes=p.usedGpuMemory) for p in found), key=lambda p: p.pid))


def _mig(handle: Any) -> tuple[str, ...] | None:
    mode = _told(pynvml.nvmlDeviceGetMigMode, handle)
    if mode is None or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return None
    uuids = []
    for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        # The count is of places; most are empty.
        with suppress(pynvml.NVMLError_NotFound):
            uuids.append(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)))
    return tuple(uuids)


def _told(ask: Callable[[Any], Any], handle: Any) -> Any:
    """What the driver tells, or none where this GPU, driver or user has no answer to this question."""
    try:
        return ask(handle)
    except (
        pynvml.NVMLError_NotSupported,
        pynvml.NVMLError_FunctionNotFound,
        pynvml.NVMLError_NoPermission,
        pynvml.NVMLLibraryMismatchError,
    ):
        return None
