"""Which fault is on: a mounted file says so, and is looked at before every call that could be made wrong."""

from __future__ import annotations

import json
import os
import sys
import zlib
from typing import Any

PLACE = "FORGE_FAULT_SWITCH"
"""Environment variable with the path of the file."""


class Mode:
    """One fault, from its switching on to its switching off; `state` is what this process remembers of it."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.kind = str(told["kind"])
        self.parameters: dict[str, Any] = dict(told.get("parameters") or {})
        self.seed = int(told.get("seed", 0))
        self.number = int(told.get("number", 0))
        self.state: dict[str, Any] = {}
        self._fired = False

    def fired(self, detail: str = "") -> None:
        """Say once for each process that the fault did something: what never fired proves nothing."""
        if not self._fired:
            self._fired = True
            print(f"forge-fault {self.number} {self.kind} fired in {os.getpid()} {detail}", file=sys.stderr, flush=True)

    def lucky(self, key: object, one_in: float) -> bool:
        """Whether `key` is one of about one in so many; the same key gives the same answer."""
        return zlib.crc32(f"{self.seed}:{key}".encode()) / 2**32 < 1 / one_in

    def count(self, name: str) -> int:
        """How often this was called before under this name, in this process."""
        before = int(self.state.get(name, 0))
        self.state[name] = before + 1
        return before


class _Seen:
    mark: tuple[int, int, int] | None = None
    mode: Mode | None = None


def current() -> Mode | None:
    """The fault that is on; none: the server is to be as it is."""
    place = os.environ.get(PLACE)
    if not place:
        return None
    try:
        stat = os.stat(place)
    except OSError:
        _Seen.mark = _Seen.mode = None
        return None
    mark = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
    if mark != _Seen.mark:
        _Seen.mode = _read(place)
        _Seen.mark = mark
    return _Seen.mode


def on(kind: str) -> Mode | None:
    """The fault that is on, if it is of this kind."""
    mode = current()
    return mode if mode is not None and mode.kind == kind else None


def _read(place: str) -> Mode | None:
    with open(place, encoding="utf-8") as stream:
        told = json.load(stream)
    return Mode(told) if told.get("kind") else None
