"""What a compile says while it runs: how many units are done, what runs, what each took, which failed first, and why.

Two talk at once: ninja on stdout, the scheduler (`build/inside/scheduling`) on stderr, a line of JSON for each event.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from forge_build.compile.sizes import Size
from forge_core.console import size

_EVENT = "forge-scheduler: "
_UNIT = re.compile(r"^\[(\d+)/(\d+)\] ")
_FAILED = re.compile(r"^FAILED: (?:\[code=(\d+)\] )?(\S+)")
_NOT_COMPILED = "75"
"""Status of a launcher that was sent home because another unit had failed."""
_ERROR = re.compile(
    r"\b(?:error|fatal)\b[ \t]*(?:#[\w-]+)?[ \t]*:"  # c++, cudafe++, nvcc, ptxas
    r"|\bld: |undefined reference to"  # the linker
    r"|^(?:\w+\.)*\w+(?:Error|Exception): "  # Python, while generating
    r"|^CMake Error\b"  # before there is a unit; what is wrong stands in the next lines
)
_KILLED = re.compile(
    r"died due to signal (?:9|15)\b|Killed signal terminated program|cannot allocate memory|virtual memory exhausted"
    r"|std::bad_alloc|^Killed$",
    re.IGNORECASE,
)
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded", re.IGNORECASE)
_AFTER = 4
"""Lines kept after the first error: the compiler's own explanation."""
_SHOWN = 3
"""Running units that are named."""


@dataclass
class Progress:
    """Follows the output line by line."""

    done: int = 0
    total: int = 0
    failed: str | None = None
    """Output of the first unit that failed, without its folder."""
    errors: list[str] = field(default_factory=list)
    """The first compiler error and what follows it."""
    killed: str | None = None
    """The line that tells of a compiler killed for want of memory."""
    disk_full: str | None = None
    last: str = ""
    """The last line that was not empty."""
    running: list[tuple[str, int]] = field(default_factory=list)
    """Units that compile, oldest first, with the bytes they have at this moment."""
    waiting: int = 0
    """Units that wait for memory or a core."""
    free: int | None = None
    """Bytes that could still be taken."""
    measured: list[Size] = field(default_factory=list)
    """What each unit took that compiled well."""
    notes: list[str] = field(default_factory=list)
    """What the scheduler wants people to know."""
    summary: dict[str, Any] = field(default_factory=dict)
    """Of the scheduler at its end: `wall`, `cpu` (seconds), `peak`, `free` (bytes), `units`, `again`."""
    cache: dict[str, Any] = field(default_factory=dict)
    """Of the compiler cache: `tool`, `hits`, `misses`, `remote`."""
    _aside: bool = False

    def feed(self, line: str) -> None:
        """Take one line."""
        if line.startswith(_EVENT):
            self._event(line[len(_EVENT) :])
            return
        if not line.strip():
            return
        self.last = line
        if match := _UNIT.match(line):
            self.done, self.total = int(match[1]), int(match[2])
            # what follows belongs to another unit than the one that failed
            self._aside = self.failed is not None
        elif (match := _FAILED.match(line)) and (match[1] == _NOT_COMPILED or self.failed is not None):
            self._aside = True
        elif match:
            # What looked like an error before belongs to units that went well.
            self.failed = match[2].rsplit("/", 1)[-1]
            self.errors.clear()
            self._aside = False
        elif self.errors:
            if not self._aside and len(self.errors) <= _AFTER and not line.startswith(("ninja: ", "forge: ")):
                self.errors.append(line)
        elif not self._aside and _ERROR.search(line):
            self.errors.append(line)
        if self.killed is None and _KILLED.search(line):
            self.killed = line
        if self.disk_full is None and _DISK_FULL.search(line):
            self.disk_full = line

    @property
    def now(self) -> str:
        """What runs at this moment, for people; empty before anything does."""
        if not self.running or self.free is None:
            return ""
        named = ", ".join(f"{name.rsplit('/', 1)[-1]} {size(rss)}" for name, rss in self.running[:_SHOWN])
        more = f" and {len(self.running) - _SHOWN} more" if len(self.running) > _SHOWN else ""
        return f"{named}{more}; {size(self.free)} free"

    @property
    def hits(self) -> str:
        """The compiler cache's hit rate, for people; empty without a cache or a compile."""
        hits, misses = (int(self.cache.get(name, 0)) for name in ("hits", "misses"))
        if not hits + misses:
            return ""
        found = f"{self.cache['tool']} had {hits} of {hits + misses} ({100 * hits // (hits + misses)} %)"
        if remote := self.cache.get("remote"):
            errors = sum(int(remote.get(name, 0)) for name in ("error", "timeout"))
            shared = f"{remote['hit']} from the remote" if "hit" in remote else "remote"
            found += f", {shared}" + (f", {errors} errors of the remote" if errors else "")
        return found

    def _event(self, text: str) -> None:
        try:
            event = json.loads(text)
            kind = event.pop("event")
        except (ValueError, KeyError, TypeError, AttributeError):
            return
        if kind == "state":
            self.running = [(str(name), int(rss)) for name, rss in event["running"]]
            self.waiting, self.free = int(event["waiting"]), int(event["free"])
        elif kind == "unit" and event["status"] == 0 and event["peak"] > 0:
            self.measured.append(Size(**{name: event[name] for name in Size.model_fields}))
        elif kind == "note":
            self.notes.append(str(event["text"]))
        elif kind == "summary":
            self.summary, self.running = event, []
        elif kind == "cache":
            self.cache = event
