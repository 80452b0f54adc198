"""From chunks of bytes to the lines worth a look, in memory that does not grow with the log or with its longest line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from forge_core.explain.signatures import Book

_ANSI = re.compile(rb"\x1b(?:\[[0-?]{0,32}[ -/]{0,8}[@-~]|\][^\x07\x1b\n\r]{0,256}(?:\x07|\x1b\\)?|[@-Z\\^_])")
_LONG = 16384
"""A longer line is read in pieces of this length ..."""
_OVERLAP = 1024
"""... that overlap, so that no literal is cut."""
_TAIL = 1 << 18
"""Bytes kept of the end."""
_BATCH = 1 << 18


class Looks(Protocol):
    """What looks at the lines."""

    @property
    def attentive(self) -> bool:
        """Whether it wants the next line, whatever is in it."""

    def line(self, raw: bytes, number: int, hits: frozenset[int]) -> None:
        """Take a line without its end and without colours; `hits` are the numbers of the literals in it."""


class Scanner:
    """Feeds lines with a literal in them, and those that are asked for, to what looks at them.

    A carriage return ends a line as well as a newline does, since progress bars redraw theirs, but only newlines are counted:
    line numbers are those an editor shows. The same bytes give the same lines however they are cut into chunks.
    """

    def __init__(self, book: Book, looks: Looks) -> None:
        self._book = book
        self._looks = looks
        self._rest = b""
        self._before = 0
        self._ended = True
        self.tail = b""
        """The end of what was read, without colours."""
        self.size = 0
        """Bytes read."""

    @property
    def lines(self) -> int:
        """Lines read; one without an end counts."""
        return self._before + (0 if self._ended else 1)

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes, of any length."""
        self.size += len(chunk)
        if chunk:
            self._ended = chunk.endswith(b"\n")
        for begin in range(0, len(chunk), _BATCH):
            folded, self._rest = _folded(self._rest + chunk[begin : begin + _BATCH])
            if folded:
                self._block(folded)

    def close(self) -> None:
        """Take what is left."""
        rest, self._rest = self._rest, b""
        if rest:
            self._block(rest + b"\r")

    def _block(self, block: bytes) -> None:
        """Look through whole lines."""
        newlines = block.count(b"\n")
        if b"\0" in block:
            block = block.replace(b"\0", b"")
        if b"\x1b" in block:
            block = _ANSI.sub(b"", block)
        self.tail = (self.tail + block)[-_TAIL:] if len(block) < _TAIL else block[-_TAIL:]
        hits = self._book.hits(block.lower())
        if hits or self._looks.attentive:
            hits.sort(key=_begin)
            self._lines(block, hits)
        self._before += newlines

    def _lines(self, block: bytes, hits: list[tuple[int, int, int]]) -> None:
        position = counted = following = 0
        number = self._before + 1
        while position < len(block):
            if self._looks.attentive:
                begin = position
            elif following < len(hits):
                first = hits[following][1]
                begin = max(block.rfind(b"\n", position, first), block.rfind(b"\r", position, first), position - 1) + 1
            else:
                return
            end = block.find(b"\n", begin)
            end = len(block) if end < 0 else end
            back = block.find(b"\r", begin, end)
            end = end if back < 0 else back
            number += block.count(b"\n", counted, begin)
            counted = begin
            there = set()
            while following < len(hits) and hits[following][1] < end:
                there.add(hits[following][0])
                following += 1
            if end > begin:
                self._looks.line(block[begin:end], number, frozenset(there))
            position = end + 1


def _begin(hit: tuple[int, int, int]) -> int:
    return hit[1]


def _folded(data: bytes) -> tuple[bytes, bytes]:
    """Whole lines, and the rest; what is longer than a long line is cut by carriage returns."""
    pieces: list[bytes] = []
    done = position = 0
    while (limit := position + _LONG) < len(data):
        end = data.rfind(b"\n", position, limit)
        if end < 0:
            end = data.rfind(b"\r", position, limit)
        if end >= 0:
            position = end + 1
            continue
        pieces += (data[done:limit], b"\r")
        done = position = limit - _OVERLAP
    end = max(data.rfind(b"\n", done), data.rfind(b"\r", done)) + 1
    if end > done:
        pieces.append(data[done:end])
        done = end
    return b"".join(pieces), data[done:]


def last_lines(tail: bytes, count: int, width: int, clean: Callable[[str], str]) -> tuple[str, ...]:
    """The last lines of `tail` that are not empty, each made clean and cut to `width` characters."""
    lines: list[str] = []
    for raw in reversed(re.split(rb"[\r\n]+", tail)):
        if raw.strip():
            text = clean(raw[: 4 * width].decode(errors="replace")).rstrip()
            lines.append(text if len(text) <= width else text[:width] + "…")
        if len(lines) == count:
            break
    return tuple(reversed(lines))
