"""What the user watches: steps with elapsed time, progress, rate and an estimate, all on stderr; stdout is data.

On a terminal a live line is redrawn; in CI (or a pipe) there are plain lines at most every ten seconds, in folded
groups where the CI system has them.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console as RichConsole
from rich.markup import escape

from forge_core.errors import ForgeError
from forge_core.redact import redact

_PLAIN_INTERVAL_S = 10.0
_LIVE_INTERVAL_S = 0.2


def duration(seconds: float) -> str:
    """A time span for people: `0.4 s`, `12 s`, `3 min 05 s`, `1 h 02 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def size(amount: float) -> str:
    """Bytes for people, in powers of ten: `812 B`, `3.4 MB`, `1.26 GB`."""
    for unit, factor, digits in (("GB", 1e9, 2), ("MB", 1e6, 1), ("kB", 1e3, 0)):
        if amount >= factor:
            return f"{amount / factor:.{digits}f} {unit}"
    return f"{amount:.0f} B"


class Console:
    """Talk on stderr. One object for a run; a stage gets a `Step` from it."""

    def __init__(self, *, verbose: bool = False, quiet: bool = False) -> None:
        self.verbose = verbose
        self.quiet = quiet
        self._rich = RichConsole(stderr=True, highlight=False, soft_wrap=True)
        self.live = self._rich.is_terminal and not os.environ.get("CI")
        self._folds = bool(os.environ.get("GITHUB_ACTIONS"))

    def say(self, text: str, style: str = "") -> None:
        """Print one line, secrets masked."""
        if not self.quiet:
            self._rich.print(escape(redact(text)), style=style or None)

    def print(self, renderable: object) -> None:
        """Print a table or another renderable of rich."""
        if not self.quiet:
            self._rich.print(renderable)

    def step(self, name: str, what: str = "") -> Step:
        """Begin a step; use it as a context manager."""
        return Step(self, name, what)

    def failure(self, error: ForgeError) -> None:
        """Print an error: the cause first, its details, then the hint, then where the log is."""
        self._rich.print(escape(redact(f"error: {error.message}")), style="bold red")
        for detail in error.details:
            self._rich.print(escape(redact(f"  {detail}")))
        if error.hint:
            self._rich.print(escape(redact(f"hint: {error.hint}")), style="yellow")
        if error.log:
            self._rich.print(escape(redact(f"log: {error.log}")))

    @contextmanager
    def _fold(self, title: str) -> Iterator[None]:
        """A folded group around a step, where the CI system has them."""
        if not self._folds:
            yield
            return
        print(f"::group::{title}", file=sys.stderr, flush=True)
        try:
            yield
        finally:
            print("::endgroup::", file=sys.stderr, flush=True)


class Step:
    """One step of the line: start line, progress, end line with the elapsed time and what came of it."""

    def __init__(self, console: Console, name: str, what: str) -> None:
        self.console = console
        self.name = name
        self._what = what
        self._result = ""
        self._drawn = False
        self._last = 0.0
        self._began = time.monotonic()
        # A ticking thread draws between the lines of the step itself.
        self._lock = threading.RLock()

    @property
    def elapsed(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self._began

    def __enter__(self) -> Self:
        self._began = self._last = time.monotonic()
        self._group = self.console._fold(self.name)
        self._group.__enter__()
        self.console.say(f"==> {self.name}" + (f": {self._what}" if self._what else ""), "bold")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clear()
        took = duration(self.elapsed)
        if kind is None:
            self.console.say(f"    {self.name} done in {took}" + (f": {self._result}" if self._result else ""), "green")
        else:
            word = "interrupted" if kind is KeyboardInterrupt else "FAILED"
            self.console.say(f"    {self.name} {word} after {took}", "bold red")
        self._group.__exit__(None, None, None)

    def result(self, text: str) -> None:
        """Say what came of the step; shown on its end line."""
        self._result = text

    def say(self, text: str, style: str = "") -> None:
        """Print a line inside the step."""
        with self._lock:
            self._clear()
            self.console.say(f"    {text}", style)

    def waiting_for_another(self) -> None:
        """Say that another process makes the same thing, which this one will take up; call it as often as you like."""
        self.waiting("another build makes it")

    def detail(self, text: str) -> None:
        """Print a line only with -v."""
        if self.console.verbose:
            self.say(text)

    def progress(self, done: float, total: float, *, unit: str = "", note: str = "") -> None:
        """Report `done` of `total` (bytes when `unit` is "B", else counted things named by `unit`).

        Shows rate (bytes), elapsed time and an estimate of what is left, from the mean speed so far.
        """
        now = time.monotonic()
        interval = _LIVE_INTERVAL_S if self.console.live else _PLAIN_INTERVAL_S
        if now - self._last < interval or self.console.quiet:
            return
        self._last = now
        elapsed = max(now - self._began, 1e-3)
        amount = (
            f"{size(done)} of {size(total)}, {size(done / elapsed)}/s"
            if unit == "B"
            else (f"{done:.0f} of {total:.0f} {unit}")
        )
        left = f", about {duration(elapsed * (total - done) / done)} left" if 0 < done < total else ""
        self._draw(f"    {amount}, {duration(elapsed)}{left}" + (f" - {note}" if note else ""))

    def waiting(self, note: str) -> None:
        """Report that the step still waits, for what cannot be counted; shows the elapsed time."""
        now = time.monotonic()
        if now - self._last >= (_LIVE_INTERVAL_S if self.console.live else _PLAIN_INTERVAL_S):
            self._last = now
            self._draw(f"    {duration(self.elapsed)} - {note}")

    @contextmanager
    def ticking(self, draw: Callable[[], None]) -> Iterator[None]:
        """Call `draw` again and again while the block waits for something that reports nothing itself."""
        over = threading.Event()

        def tick() -> None:
            while not over.wait(_LIVE_INTERVAL_S):
                with self._lock:
                    draw()

        thread = threading.Thread(target=tick, name="ticking", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _draw(self, line: str) -> None:
        if self.console.quiet:
            return
        if self.console.live:
            width = max(20, self.console._rich.width - 1)
            sys.stderr.write("\r\x1b[2K" + redact(line)[:width])
            sys.stderr.flush()
            self._drawn = True
        else:
            self.console.say(line)

    def _clear(self) -> None:
        if self._drawn:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
            self._drawn = False
