"""Whether device code runs on a GPU, told by the architecture it was compiled for.

The rules are those of NVIDIA's CUDA C++ Programming Guide (compute capabilities; architecture- and family-specific
features): a cubin runs within its major version, from its own minor upwards; `a` runs on exactly one capability; `f`
within its family; PTX without a suffix on all later ones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from forge_core.errors import EnvironmentFailure, Refused
from forge_validate.gpu.inventory import Gpu

_ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")


def fits(architecture: str, capability: str) -> bool:
    """Whether code for `architecture` (`sm_120a`, `compute_90`) runs on a GPU of `capability` (`12.0`).

    Raises ValueError when either is none.
    """
    match = _ARCHITECTURE.fullmatch(architecture)
    if match is None:
        raise ValueError(f"{architecture!r} is no architecture")
    kind, built = match[1], (int(match[2]), int(match[3]))
    major, minor = (int(number) for number in capability.split("."))
    if match[4] == "a":
        return (major, minor) == built
    if kind == "compute" and not match[4]:
        return (major, minor) >= built
    return major == built[0] and minor >= built[1]


def demand_fit(architectures: Sequence[str], gpus: Sequence[Gpu]) -> None:
    """Demand that each GPU runs one of the recorded architectures; without GPUs nothing is demanded.

    Raises EnvironmentFailure (3) naming every GPU that does not, for the image may be good and the host the wrong one;
    Refused (1) for a record that names no architecture, which no host can help.
    """
    if not gpus:
        return
    if not architectures:
        raise Refused(
            "the record names no architecture, so nothing says that the image's kernels run on these GPUs",
            hint="build again: a wheel with device code gives the record its architectures",
        )
    unfit = [gpu for gpu in gpus if not any(fits(architecture, gpu.capability) for architecture in architectures)]
    if unfit:
        raise EnvironmentFailure(
            f"the image's kernels are compiled for {', '.join(architectures)} and do not run on {unfit[0]}, "
            f"capability {unfit[0].capability}",
            hint="run validate on a host with GPUs of that architecture; nothing was started",
            details=tuple(f"nor on {gpu}, capability {gpu.capability}" for gpu in unfit[1:]),
        )
