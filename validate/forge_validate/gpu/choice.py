"""Which GPUs of the host a serving uses."""

from __future__ import annotations

import re

from forge_core.errors import EnvironmentFailure, UsageError
from forge_validate.gpu.inventory import Gpu, Inventory
from forge_validate.serving import Devices

# The kinds that nvidia-ctk writes and that the nvidia runtime understands by itself.
_CDI = re.compile(r"(?:runtime\.)?nvidia\.com/gpu=(\S+)")
# nvidia-ctk's names: by index (`0`, a MIG device `0:1`) or by type and index (`gpu0`, `mig0:1`).
_INDEX = re.compile(r"(?:gpu)?(\d+)")
_MIG_INDEX = re.compile(r"(?:mig)?(\d+):(\d+)")


def chosen(devices: Devices, found: Inventory) -> tuple[Gpu, ...]:
    """The GPUs a serving names, by index; none for a serving without devices.

    A MIG device stands for the whole GPU it is cut from. Raises UsageError (2) for a GPU that is not there,
    EnvironmentFailure (3) where there is no driver or the driver has lost the GPU.
    """
    names = _names(devices)
    if not names:
        return ()
    if found.absent is not None:
        raise EnvironmentFailure(
            f"the serving wants GPUs ({', '.join(names)}) and there are none: {found.absent}",
            hint="run validate on a host with the GPUs, NVIDIA's driver and nvidia-container-toolkit",
        )
    wanted: dict[str, Gpu] = {}
    missing: list[str] = []
    for name in names:
        if lost := [gone for gone in found.lost if name == "all" or _number(name) == gone.index]:
            raise EnvironmentFailure(
                f"the driver has lost GPU {lost[0].index}: {lost[0].why}",
                hint="`nvidia-smi` and the kernel's log (Xid) say more; a reset or a reboot brings it back",
            )
        matching = [gpu for gpu in found.gpus if name == "all" or _is(name, gpu)]
        wanted |= {gpu.uuid: gpu for gpu in matching}
        if not matching:
            missing.append(name)
    if missing:
        raise UsageError(
            f"the serving names GPUs that are not here: {', '.join(missing)}",
            hint=f"there are: {', '.join(map(str, found.gpus))}",
        )
    return tuple(sorted(wanted.values(), key=lambda gpu: gpu.index))


def _names(devices: Devices) -> tuple[str, ...]:
    if devices.gpus == "all":
        return ("all",)
    if devices.gpus:
        return devices.gpus
    names = []
    for text in devices.cdi:
        match = _CDI.fullmatch(text)
        if match is None:
            raise UsageError(f"{text!r} is no CDI name of an NVIDIA GPU", hint="for example nvidia.com/gpu=0")
        names.append(match[1])
    return tuple(names)


def _number(name: str) -> int | None:
    """The index a name speaks of; none for a UUID."""
    match = _INDEX.fullmatch(name) or _MIG_INDEX.fullmatch(name)
    return int(match[1]) if match else None


def _is(name: str, gpu: Gpu) -> bool:
    if _INDEX.fullmatch(name):
        return _number(name) == gpu.index
    if match := _MIG_INDEX.fullmatch(name):
        return int(match[1]) == gpu.index and int(match[2]) < len(gpu.mig or ())
    return name == gpu.uuid or name in (gpu.mig or ())
