"""How many answers were being said at one time: what shows, on any server, that it batched."""

from __future__ import annotations

from collections.abc import Iterable

from forge_validate.exchange import Exchange


def at_once(exchanges: Iterable[Exchange]) -> int:
    """The largest number of streams that were between their first and their last byte at one moment.

    A server that serves one after another, or that holds an answer back until it is whole, comes to 1.
    """
    marks: list[tuple[float, int]] = []
    for one in exchanges:
        if one.first is not None and one.ended is not None and one.ended > one.first:
            # At equal times an end comes before a beginning.
            marks += [(one.first, 1), (one.ended, -1)]
    running = most = 0
    for _, step in sorted(marks):
        running += step
        most = max(most, running)
    return most


def beside(prefill: Exchange, streams: Iterable[Exchange]) -> int:
    """How many streams were being said during the whole of another request's prefill."""
    if prefill.began is None or prefill.first is None:
        return 0
    return sum(
        1
        for one in streams
        if one.first is not None and one.ended is not None and one.first <= prefill.began and one.ended >= prefill.first
    )
