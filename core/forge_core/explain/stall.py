"""A start that goes no further: no marker for too long, or one rank behind all others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime

from forge_core.console import duration
from forge_core.explain.event import Progress
from forge_core.explain.model import Evidence, LogFinding
from forge_core.explain.signatures import Book

_STAMP = re.compile(rb"(20\d\d-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)")
_LAST = 4096


def stalled(progress: Mapping[str | None, Progress], tail: bytes, evidence: Evidence, book: Book) -> LogFinding | None:
    """The stall that a log ends in. Times are those written in its lines, so it must have some."""
    timed: dict[str | None, tuple[Progress, datetime]] = {
        rank: (one, when) for rank, one in progress.items() if (when := _time(one.stamp)) and one.phase in book.order
    }
    end = _end(tail)
    if not timed or end is None:
        return None
    ranked: dict[str | None, tuple[Progress, datetime]] = {
        rank: pair for rank, pair in timed.items() if rank is not None
    } or timed
    # The rank that is furthest behind, and of those the one that was heard first.
    behind = min(ranked, key=lambda rank: (book.order[ranked[rank][0].phase], ranked[rank][1]))
    one, when = ranked[behind]
    phase = book.phases[one.phase]
    others = [rank for rank, (other, _) in ranked.items() if book.order[other.phase] > book.order[one.phase]]
    # One rank often speaks for all; behind is who is behind most.
    straggles = len(others) * 2 > len(ranked)
    since = when if straggles else max(other for _, other in timed.values())
    took = (end - since).total_seconds() + (evidence.silent or 0)
    if phase.stall is None or took <= phase.stall:
        return None
    heard = (
        f"the last marker of {behind} is in phase {phase.name}"
        if behind
        else f"the last marker is of phase {phase.name}"
    )
    return LogFinding(
        kind="rank_straggler" if straggles else phase.class_,
        where=f"line {one.line}" + (f", {behind}" if behind else ""),
        message=f"{heard}, {duration(took)} before the end",
        line=one.line,
        rank=behind,
        phase=phase.name,
        role="stall",
        remedy=phase.remedy,
        fault="image",
        confidence="medium" if straggles else "low",
        evidence=(
            *((f"{len(others)} of {len(ranked)} ranks are further",) if others else ()),
            f"no marker for {duration(took)}, more than {duration(phase.stall)}",
        ),
    )


def _time(stamp: str | None) -> datetime | None:
    try:
        return datetime.fromisoformat(stamp) if stamp else None
    except ValueError:
        return None


def _end(tail: bytes) -> datetime | None:
    """The last time that is written in a log."""
    for part in (tail[-_LAST:], tail):
        for match in reversed(_STAMP.findall(part)):
            if (found := _time(f"{match[0].decode()} {match[1].decode()}")) is not None:
                return found
    return None
