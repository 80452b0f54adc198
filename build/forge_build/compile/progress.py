"""What a compile says while it runs: how many units are done, which failed first, and why."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_UNIT = re.compile(r"^\[(\d+)/(\d+)\] ")
_FAILED = re.compile(r"^FAILED: (?:\[code=\d+\] )?(\S+)")
_ERROR = re.compile(
    r"\b(?:error|fatal)\b[ \t]*(?:#[\w-]+)?[ \t]*:"  # c++, cudafe++, nvcc, ptxas
    r"|\bld: |undefined reference to"  # the linker
    r"|^(?:\w+\.)*\w+(?:Error|Exception): "  # Python, while generating
)
_KILLED = re.compile(
    r"died due to signal (?:9|15)\b|Killed signal terminated program|cannot allocate memory|virtual memory exhausted"
    r"|std::bad_alloc|^Killed$",
    re.IGNORECASE,
)
_DISK_FULL = re.compile(r"No space left on device|Disk quota exceeded", re.IGNORECASE)
_AFTER = 4
"""Lines kept after the first error: the compiler's own explanation."""


@dataclass
class Progress:
    """Follows ninja's output line by line."""

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

    def feed(self, line: str) -> None:
        """Take one line."""
        if not line.strip():
            return
        self.last = line
        if match := _UNIT.match(line):
            self.done, self.total = int(match[1]), int(match[2])
        elif (match := _FAILED.match(line)) and self.failed is None:
            # What looked like an error before belongs to units that went well.
            self.failed = match[1].rsplit("/", 1)[-1]
            self.errors.clear()
        elif self.errors:
            if len(self.errors) <= _AFTER and not line.startswith(("ninja: ", "forge: ")):
                self.errors.append(line)
        elif _ERROR.search(line):
            self.errors.append(line)
        if self.killed is None and _KILLED.search(line):
            self.killed = line
        if self.disk_full is None and _DISK_FULL.search(line):
            self.disk_full = line
