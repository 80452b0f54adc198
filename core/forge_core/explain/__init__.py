"""Why a build or a server died: a log's cause line, its class, rank, phase and remedy, from signatures that are data.

Any log, of any size, is read once in bounded memory. The two sides ask this for what they started; people ask
`python -m forge_core explain LOG` for what others sent them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from forge_core.errors import UsageError
from forge_core.explain import order, stall
from forge_core.explain.model import UNCLASSIFIED, Confidence, Evidence, Fault, Follows, LogFinding, Marker, Reading
from forge_core.explain.reader import Reader
from forge_core.explain.scan import Scanner, last_lines
from forge_core.explain.signatures import book
from forge_core.explain.text import parsed
from forge_core.explain.told import Log
from forge_core.redact import redact

__all__ = [
    "UNCLASSIFIED",
    "Confidence",
    "Evidence",
    "Fault",
    "Follows",
    "LogFinding",
    "Marker",
    "Reading",
    "explain",
    "read",
    "read_file",
]

_LAST = 40
_WIDTH = 500
_CHUNK = 1 << 18
_STAGES = {"build": "build", "boot": "start"}


def explain(lines: Iterable[bytes | str], evidence: Evidence | None = None) -> LogFinding | None:
    """Why it died, from its lines (with or without their ends) and what else is known; none when nothing says it did.

    Never raises for what is in a line, and holds no more than some hundred kB of them.
    """
    return read(_chunks(lines), evidence).finding


def read(chunks: Iterable[bytes], evidence: Evidence | None = None) -> Reading:
    """Read a log in chunks of bytes, cut anywhere; the same bytes give the same reading."""
    evidence = evidence or Evidence()
    known = book()
    reader = Reader(known, _STAGES.get(evidence.stage or ""))
    scanner = Scanner(known, reader)
    for chunk in chunks:
        scanner.feed(chunk)
    scanner.close()
    last = last_lines(scanner.tail, _LAST, _WIDTH, redact)
    log = Log(
        events=reader.events,
        phase=reader.phase,
        lines=scanner.lines,
        last=last,
        fell=reader.fell,
        ready=max((one.line for one in reader.markers.values() if one.kind == "ready"), default=0),
        bodies=tuple(parsed(line.encode()).body.strip() for line in last),
    )
    finding = order.conclude(log, evidence, known, stall.stalled(reader.progress, scanner.tail, evidence, known))
    return Reading(
        finding=finding,
        phase=reader.phase,
        ranks=tuple(sorted(reader.ranks)),
        markers=tuple(
            one.model_copy(update={"message": redact(one.message)})
            for one in sorted(reader.markers.values(), key=lambda one: one.line)
        ),
        lines=scanner.lines,
        size=scanner.size,
        last=last,
    )


def read_file(
    path: Path, evidence: Evidence | None = None, *, on_bytes: Callable[[int], None] | None = None
) -> Reading:
    """Read a log file; `on_bytes` is told how many bytes were read. Raises UsageError (2) when it cannot be read."""
    try:
        with path.open("rb") as stream:
            return read(chunks_of(stream, on_bytes), evidence)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="name a log file, or - for stdin") from error


def chunks_of(stream: BinaryIO, on_bytes: Callable[[int], None] | None = None) -> Iterator[bytes]:
    """The stream's bytes as they come."""
    done = 0
    # A pipe gives what is there; a whole chunk would be waited for.
    take = getattr(stream, "read1", stream.read)
    while chunk := take(_CHUNK):
        done += len(chunk)
        yield chunk
        if on_bytes is not None:
            on_bytes(done)


def _chunks(lines: Iterable[bytes | str]) -> Iterator[bytes]:
    """Lines joined, so that few calls are made for many of them."""
    kept: list[bytes] = []
    size = 0
    for line in lines:
        raw = line.encode(errors="replace") if isinstance(line, str) else line
        kept.append(raw if raw.endswith(b"\n") else raw + b"\n")
        size += len(raw)
        if size >= _CHUNK:
            yield b"".join(kept)
            kept, size = [], 0
    if kept:
        yield b"".join(kept)
