"""GPU memory between trials: what was in use before, and the wait until it is so again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import psutil
import pynvml

from forge_core.console import duration, size
from forge_core.errors import EnvironmentFailure
from forge_core.model import Frozen
from forge_validate.gpu.inventory import Gpu, Process, inventory, opened

_POLL_S = 0.5


class Baseline(Frozen):
    """The chosen GPUs before a server was started on them."""

    gpus: tuple[Gpu, ...]

    @property
    def told(self) -> tuple[str, ...]:
        """A line for each process that computes there already. It is told, never killed: it is not ours."""
        return tuple(f"{gpu} is also used by {_named(process)}" for gpu in self.gpus for process in gpu.processes or ())


def baseline(gpus: Sequence[Gpu]) -> Baseline:
    """Read the GPUs anew; raises EnvironmentFailure (3) for one that is gone, or that tells neither memory nor processes."""
    now = _read(gpus)
    for gpu in now:
        if gpu.memory_used is None and gpu.processes is None:
            raise EnvironmentFailure(
                f"{gpu} tells neither its memory nor its processes, so nothing shows that it is free",
                hint="this user may lack the permission, or a vGPU does not pass it on; use a whole GPU",
            )
    return Baseline(gpus=now)


def used(gpus: Sequence[Gpu]) -> int | None:
    """Bytes that these GPUs hold now, all together; none: one does not tell, or none can be asked."""
    try:
        amounts = [gpu.memory_used for gpu in _read(gpus)]
    except (EnvironmentFailure, pynvml.NVMLError):
        return None
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if known and len(known) == len(amounts) else None


def await_baseline(before: Baseline, *, slack_bytes: int, deadline_s: float, on_wait: Callable[[str], None]) -> float:
    """Wait until each GPU's used memory is back at its baseline and `slack_bytes`; returns the seconds waited.

    A GPU that does not tell its memory is free when no new process computes on it. Raises EnvironmentFailure (3) after
    `deadline_s`, naming the GPU, the bytes and the processes on it. `on_wait` gets a line at each look.
    """
    if not before.gpus:
        return 0.0
    began = time.monotonic()
    try:
        with opened():
            while True:
                now = _read(before.gpus)
                pairs = list(zip(before.gpus, now, strict=True))
                late = [(then, gpu) for then, gpu in pairs if _excess(then, gpu, slack_bytes)]
                waited = time.monotonic() - began
                if not late:
                    return waited
                if waited >= deadline_s:
                    raise _not_given_back(late, slack_bytes, waited)
                on_wait("; ".join(_excess(then, gpu, slack_bytes) for then, gpu in late))
                time.sleep(max(0.01, min(_POLL_S, deadline_s - waited)))
    except pynvml.NVMLError as error:
        raise EnvironmentFailure(f"the NVIDIA driver no longer answers: {error}") from error


def _read(gpus: Sequence[Gpu]) -> tuple[Gpu, ...]:
    found = inventory()
    here = {gpu.uuid: gpu for gpu in found.gpus}
    gone = [gpu for gpu in gpus if gpu.uuid not in here]
    if gone:
        why = found.absent or "; ".join(f"{lost.index}: {lost.why}" for lost in found.lost) or "it is not listed"
        raise EnvironmentFailure(
            f"{gone[0]} is gone: {why}", hint="the kernel's log (Xid) says more; a reset or a reboot brings it back"
        )
    return tuple(here[gpu.uuid] for gpu in gpus)


def _excess(then: Gpu, now: Gpu, slack: int) -> str:
    """What a GPU holds beyond its baseline; empty: it is free."""
    if then.memory_used is not None and now.memory_used is not None:
        more = now.memory_used - then.memory_used
        return f"GPU {now.index} holds {size(more)} more than before" if more > slack else ""
    new = _new(then, now)
    return f"GPU {now.index} has {len(new)} more processes than before" if new else ""


def _new(then: Gpu, now: Gpu) -> list[Process]:
    known = {process.pid for process in then.processes or ()}
    return [process for process in now.processes or () if process.pid not in known]


def _not_given_back(late: Sequence[tuple[Gpu, Gpu]], slack: int, waited: float) -> EnvironmentFailure:
    details = []
    for then, now in late:
        if then.memory_used is not None and now.memory_used is not None:
            details.append(f"{now}: {then.memory_used} bytes before, {now.memory_used} now, {slack} more allowed")
        new = {process.pid for process in _new(then, now)}
        for process in now.processes or ():
            details.append(f"{_named(process)}, {'new' if process.pid in new else 'there before'}")
        if now.processes == ():
            details.append("no process computes there: the driver has not given the memory back")
    return EnvironmentFailure(
        f"{_excess(*late[0], slack)}, {duration(waited)} after the server's end",
        hint="another process may have taken the GPU (`nvidia-smi`); what is measured on it would be about that, too",
        details=tuple(details),
    )


def _named(process: Process) -> str:
    """Never its command line: that may hold a secret."""
    try:
        name = psutil.Process(process.pid).name()
    except psutil.Error:
        name = "unknown name"
    used = "" if process.used_bytes is None else f" with {size(process.used_bytes)}"
    return f"process {process.pid} ({name}){used}"
