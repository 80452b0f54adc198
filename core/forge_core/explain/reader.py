"""What looks at the lines: tracks phases and tracebacks of every rank, and keeps what may matter, bounded."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from forge_core.explain.event import WIDTH, Event, Progress, Trace, shown
from forge_core.explain.model import Marker
from forge_core.explain.signatures import UNKNOWN, Book, Role, Rule, Signature
from forge_core.explain.text import WRAPPED, Line, parsed

_FRAME = re.compile(r'\s*File "([^"]{0,300})", line \d+(?:, in (\S+))?')
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?::(?:\s|$).*|\s*$)", re.DOTALL)
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_OPEN = 1000
"""Lines, of others, after which an open traceback is given up."""
_SAID = 50
"""Lines after an exception that may go on with what it says."""
_CHAIN = 4
"""Lines after an exception in which the next traceback of the chain is announced."""
_NEAR = 100
"""Lines for which a frame outside a traceback still counts."""
_INSIDE = 1000
"""Lines for which a wrapper or banner is open."""
_KEPT_EACH = 3
_KEPT = 600


class Reader:
    """Looks at lines; `events`, `markers` and `progress` are what it saw."""

    def __init__(self, book: Book, phase: str | None = None) -> None:
        self._book = book
        self._start = phase or UNKNOWN
        self._phases: dict[str | None, str] = {}
        self._traces: dict[str | None, Trace] = {}
        self._speaker: str | None = None
        """Who opened the last traceback; lines that begin no record are of that one, until:"""
        self._until = 0
        self._chain: tuple[int, int] | None = None
        """Index of the last exception, and lines left to announce the next."""
        self._contexts: dict[str | None, tuple[int, Signature, str]] = {}
        self._opened: dict[str, int] = {}
        self._counts: dict[tuple[str, Role | None, str | None], int] = {}
        self.events: list[Event] = []
        self.markers: dict[tuple[str, str | None, str | None], Marker] = {}
        self.progress: dict[str | None, Progress] = {}
        self.ranks: set[str] = set()
        self.fell: int | None = None
        """The last line that says that a process died."""

    @property
    def attentive(self) -> bool:
        """Whether the next line is wanted, whatever is in it."""
        return bool(self._traces) or self._chain is not None

    @property
    def phase(self) -> str | None:
        """The last phase of all."""
        found = self._phases.get(None, self._start)
        return None if found == UNKNOWN else found

    def line(self, raw: bytes, number: int, hits: frozenset[int]) -> None:
        """Take a line; `hits` are the literals in it."""
        opens = self._book.traceback in hits
        # Most lines with a literal fit no signature; that is seen before they are taken apart.
        apart = opens or self.attentive or raw.startswith(WRAPPED)
        if not apart and not self._book.fits(hits, raw.decode(errors="replace").lower()):
            return
        line = parsed(raw)
        if line.rank and len(self.ranks) < 256:
            self.ranks.add(line.rank)
        # What begins no record goes on with the traceback that was opened last.
        if line.record and self._speaker not in self._traces:
            self._until = 0
        speaks = not line.record and number <= self._until
        key = line.rank or (self._speaker if speaks else None)
        self._announced(line)
        self._give_up(number)
        trace = self._traces.get(key)
        if trace is not None and not opens and not line.record and self._goes_on(trace, line, key, number, hits):
            return
        if opens:
            self._open(line, key, number)
        if self._book.masked(line.body.lower()):
            return
        rule = self._rule(line, key, number, hits, None) if hits else None
        if rule is not None:
            self._take(rule, line, key, number, None)

    def _announced(self, line: Line) -> None:
        """See whether another exception takes the place of the last."""
        if self._chain is None:
            return
        index, left = self._chain
        if line.body.startswith(_CHAINED):
            self.events[index] = replace(self.events[index], handled=True)
            left = 0
        self._chain = (index, left - 1) if left > 1 else None

    def _give_up(self, number: int) -> None:
        """Close tracebacks that were cut: while one is open, every line is looked at."""
        if self._traces:
            for key in [key for key, trace in self._traces.items() if number - trace.last > _OPEN]:
                del self._traces[key]

    def _open(self, line: Line, key: str | None, number: int) -> None:
        self._speaker, self._until = key, number + _OPEN
        if key not in self._traces and len(self._traces) >= 64:
            self._traces.pop(next(iter(self._traces)))
        said = line.body.lower()
        self._traces[key] = Trace(line.indent, "exception: traceback" in said or "fatal" in said, last=number)

    def _goes_on(self, trace: Trace, line: Line, key: str | None, number: int, hits: frozenset[int]) -> bool:
        """Take a line of an open traceback; whether it was one."""
        body = line.body.rstrip()
        if not body or line.indent > trace.indent:
            trace.last = number
            if (frame := _FRAME.match(body)) is not None:
                trace.frames.append(f"{frame[1].rsplit('/', 1)[-1]} {frame[2] or ''}".strip())
            rule = self._rule(line, key, number, hits, trace) if hits else None
            if rule is not None and rule.signature.role == "context":
                trace.context = rule.signature
                self._take(rule, line, key, number, trace)
            return True
        if not _EXCEPTION.fullmatch(body.strip()):
            # Another process wrote in between; the traceback goes on, or was cut.
            return False
        del self._traces[key]
        self._until = number + _SAID
        rule = self._rule(line, key, number, hits, trace)
        if rule is not None:
            self._take(rule, line, key, number, trace)
        else:
            self._keep(self._event(None, "unclassified", None, line, key, number, trace))
        return True

    def _rule(self, line: Line, key: str | None, number: int, hits: frozenset[int], trace: Trace | None) -> Rule | None:
        """The first signature that fits."""
        phase, body = self._phase_of(key), line.body.lower()
        for rule in self._book.chosen(hits):
            if rule.phases and phase not in rule.phases:
                continue
            if not rule.search(body):
                continue
            if rule.inside and not rule.inside(self._around(trace, key, number, phase)):
                continue
            within = rule.signature.within
            if within and number - self._opened.get(within, -_INSIDE) >= _INSIDE:
                continue
            return rule
        return None

    def _around(self, trace: Trace | None, key: str | None, number: int, phase: str) -> str:
        """Where a line was written: the traceback's frames or what was seen lately, and the phase."""
        frames: Iterable[str] = trace.frames if trace else ()
        seen = self._contexts.get(key)
        if seen is not None and number - seen[0] <= _NEAR:
            frames = (*frames, seen[2])
        return f"{' '.join(frames)} phase {phase}"

    def _phase_of(self, key: str | None) -> str:
        return self._phases.get(key) or self._phases.get(None) or self._start

    def _take(self, rule: Rule, line: Line, key: str | None, number: int, trace: Trace | None) -> None:
        signature = rule.signature
        if signature.role in ("marker", "harmless"):
            self._mark(signature, line, key, number)
            return
        if signature.role in ("wrapper", "banner"):
            self._opened[signature.class_] = number
        if signature.role == "consequence" and signature.confidence != "low":
            self.fell = number
        if signature.role == "context":
            self._contexts[key] = (number, signature, line.body[:WIDTH])
        self._keep(self._event(signature.role, signature.class_, signature, line, key, number, trace))

    def _mark(self, signature: Signature, line: Line, key: str | None, number: int) -> None:
        phase = signature.phase
        if phase == "build" and self._phase_of(None) not in (UNKNOWN, "build"):
            # a kernel compiled at run time ends no phase of the server
            phase = None
        if phase is not None:
            if phase in ("start", "serving"):
                self._phases.clear()
                self.progress.clear()
            if len(self._phases) < 256:
                self._phases[None] = self._phases[line.rank] = phase
                self.progress[line.rank] = Progress(phase, line.stamp, number)
        index = (signature.class_, phase, line.rank)
        before = self.markers.get(index)
        if before is not None or len(self.markers) < _KEPT:
            self.markers[index] = Marker(
                kind=signature.class_,
                phase=phase,
                line=number,
                rank=line.rank,
                message=shown(line.body),
                times=before.times + 1 if before else 1,
            )

    def _event(
        self,
        role: Role | None,
        kind: str,
        signature: Signature | None,
        line: Line,
        key: str | None,
        number: int,
        trace: Trace | None,
    ) -> Event:
        return Event(
            role=role,
            kind=kind,
            signature=signature,
            line=number,
            rank=key,
            phase=self._phase_of(key),
            message=shown(line.body),
            frames=tuple(trace.frames) if trace else (),
            context=trace.context if trace else None,
            unhandled=trace.unhandled if trace else False,
        )

    def _keep(self, event: Event) -> None:
        count = self._counts.get(index := (event.kind, event.role, event.rank), 0)
        if len(self._counts) < _KEPT or count:
            self._counts[index] = count + 1
        # The first of a kind are what counts; of unknown exceptions the last do, too.
        if len(self.events) < _KEPT and (count < _KEPT_EACH or (event.role is None and count < _KEPT // 4)):
            self.events.append(event)
            if event.frames:
                self._chain = (len(self.events) - 1, _CHAIN)
