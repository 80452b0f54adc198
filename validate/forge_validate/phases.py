"""The phases of a start, told by lines of the log: which one it is in, how long each took, whether it is late."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from forge_validate.serving import Phase


class Watch:
    """Follows a start through its phases; times are of one monotonic clock, in seconds."""

    def __init__(self, phases: Sequence[Phase], stall: float, began: float) -> None:
        self.began = began
        self.taken: dict[str, float] = {}
        self.last_line = ""
        self._phases = tuple(phases)
        self._index = 0
        self._entered = began
        self._stall = stall
        self._heard = self._told = began

    @property
    def done(self) -> bool:
        """Whether the last phase's line was seen."""
        return self._index == len(self._phases)

    @property
    def phase(self) -> str:
        """The name of the phase it is in."""
        return "health" if self.done else self._phases[self._index].name

    def see(self, lines: Iterable[str], now: float) -> list[str]:
        """Take new lines; returns the names of the phases they end. A later phase's line ends the earlier ones."""
        ended = []
        for line in lines:
            self.last_line, self._heard = line, now
            for index in range(self._index, len(self._phases)):
                if re.search(self._phases[index].until, line):
                    # Phases without a line of their own are part of the one that was seen.
                    name = self._phases[index].name
                    self.taken[name] = round(now - self._entered, 3)
                    self._index, self._entered = index + 1, now
                    ended.append(name)
                    break
        return ended

    def late(self, now: float) -> Phase | None:
        """The phase whose deadline has passed; health gets the last phase's deadline once more."""
        phase = self._phases[min(self._index, len(self._phases) - 1)]
        if now - self._entered <= phase.deadline:
            return None
        return phase.model_copy(update={"name": self.phase})

    def silent(self, now: float) -> float:
        """Seconds since the last line."""
        return now - self._heard

    def stalled(self, now: float) -> float | None:
        """Seconds of silence, each time another stall's length has passed; otherwise none."""
        if now - max(self._heard, self._told) < self._stall:
            return None
        self._told = now
        return now - self._heard
