"""The processes of a unit, whoever started them: each inherits a mark in its environment that nobody else has.

A compiler forks (nvcc: cicc, ptxas), its parent may die first, and a compiler cache runs it from a server: parentage proves
nothing, the mark does. Only what carries this run's mark is ever measured or killed.
"""

import os
import signal
import time
from pathlib import Path

VARIABLE = "FORGE_UNIT"
_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_ROUNDS = 200
_PAUSE_S = 0.01


class Use:
    """What the processes of one unit use at this moment."""

    def __init__(self):
        self.pids = []
        self.rss = 0
        self.largest = 0
        """Peak (bytes) of the one process that had the highest."""
        self.cpu = {}
        """(pid, start) -> seconds."""


def uses(token):
    """Number of each unit of this run that has processes -> Use; one look at all of /proc."""
    found = {}
    wanted = f"{VARIABLE}={token}.".encode()
    for name in os.listdir("/proc"):  # noqa: PTH208 - several times a second
        if not name.isdigit():
            continue
        number = _number(name, wanted)
        if number is None:
            continue
        try:
            fields = Path("/proc", name, "stat").read_text().rpartition(")")[2].split()
            status = Path("/proc", name, "status").read_text()
        except OSError:
            continue
        if fields[0] in "ZX":
            continue
        use = found.setdefault(number, Use())
        use.pids.append(int(name))
        use.rss += int(fields[21]) * _PAGE
        use.cpu[name, fields[19]] = (int(fields[11]) + int(fields[12])) / _TICKS
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                use.largest = max(use.largest, int(line.split()[1]) * 1024)
    return found


def kill(token, number=None):
    """Kill every process of a unit, or of all units of this run; returns when none is left, at most after two seconds."""
    for _ in range(_ROUNDS):
        found = uses(token)
        pids = [pid for unit, use in found.items() if number in (None, unit) for pid in use.pids]
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(_PAUSE_S)


def _number(pid, wanted):
    """Number of the unit that a process belongs to; None for a process that is none of ours."""
    try:
        environ = Path("/proc", pid, "environ").read_bytes()
    except OSError:
        return None
    # at the beginning of a variable, not in the middle of another's value
    place = 0 if environ.startswith(wanted) else environ.find(b"\0" + wanted) + 1
    if place == 0 and not environ.startswith(wanted):
        return None
    return int(environ[place + len(wanted) :].split(b"\0", 1)[0])
