"""Any bytes, cut anywhere: never an error, always the same reading, in memory that does not grow."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import facts, healthy, joined

from forge_core.explain import explain, read
from forge_core.explain.scan import Scanner
from forge_core.explain.signatures import book

IMA = b"RuntimeError: CUDA error: an illegal memory access was encountered"
FATAL = [fact["sample"] for fact in facts() if fact["severity"] == "fatal"]
PIECES = st.sampled_from(
    [
        b"\n",
        b"\r",
        b"\r\n",
        b"\x00",
        b"\x1b[31m",
        b"\xff\xfe",
        b"Traceback (most recent call last):\n",
        b'  File "a.py", line 1, in x\n',
        b"During handling of the above exception, another exception occurred:\n",
        b"[2026-11-30 14:12:19 TP1] Load weight begin.\n",
        b"[9999-99-99 99:99:99 TP1] Load weight begin.\n",
        b'{"log":"x',
        b'{"log":3}\n',
        b"ValueError: x\n",
        b"The server is fired up and ready to roll!\n",
        *(text.encode() + b"\n" for text in FATAL[:20]),
    ]
)
BYTES = st.lists(st.one_of(PIECES, st.binary(max_size=40)), max_size=30).map(b"".join)


@settings(max_examples=50)
@given(BYTES, st.lists(st.integers(1, 60), max_size=10))
def test_any_bytes_give_one_reading_however_they_are_cut(data: bytes, cuts: list[int]) -> None:
    pieces, position = [], 0
    for length in cuts:
        pieces.append(data[position : position + length])
        position += length
    pieces.append(data[position:])
    whole = read([data])
    assert read(pieces) == whole
    assert read(iter([bytes([one]) for one in data])) == whole
    assert whole.size == len(data)
    assert whole.lines == data.count(b"\n") + (0 if not data or data.endswith(b"\n") else 1)


@settings(max_examples=15)
@given(st.permutations(range(40)), st.sampled_from(FATAL), st.integers(0, 40))
def test_the_order_of_healthy_lines_does_not_matter(order: list[int], sample: str, place: int) -> None:
    serving = healthy(66 + 40)[66:]
    lines = [serving[number] for number in order]
    lines.insert(place, sample)
    found, plain = explain([*healthy(66), *lines]), explain([*healthy(66), *serving, sample])
    assert found is not None and plain is not None
    assert (found.kind, found.remedy, found.rank, found.message) == (
        plain.kind,
        plain.remedy,
        plain.rank,
        plain.message,
    )
    assert found.line == 67 + place


@pytest.mark.parametrize("before", [0, 1, 15_000, 16_384 - 20, 16_384, 3_000_000])
@pytest.mark.parametrize("chunk", [1000, 65_536, 10_000_000])
def test_a_line_of_megabytes(before: int, chunk: int) -> None:
    data = b"first\n" + b"x" * before + IMA + b"y" * 2_000_000 + b"\nlast\n"
    reading = read(data[begin : begin + chunk] for begin in range(0, len(data), chunk))
    assert reading.finding is not None
    assert (reading.finding.kind, reading.finding.line, reading.lines) == ("illegal_memory", 2, 3)


def test_bars_that_are_redrawn() -> None:
    """Carriage returns alone for megabytes; each is a line to look at, and none counts."""
    bar = b"".join(b"Loading shards: %3d%% |##########| 1/47\r" % (number % 100) for number in range(5_000))
    reading = read([b"first\n", bar, b"\n", IMA, b"\n"])
    assert reading.finding is not None and reading.finding.line == 3
    assert reading.lines == 3 and reading.markers[-1].times == 5_000


def test_colours_inside_of_words_that_matter() -> None:
    text = b"\x1b[0;1;31ma.cpp:1:10: \x1b[31mfatal \x1b[1merror: \x1b[0mcuda/at\x1b[0momic: No such file or directory\n"
    reading = read([text])
    assert reading.finding is not None and reading.finding.kind == "cccl_include"
    assert "\x1b" not in reading.finding.message


def test_memory_is_bounded_by_the_chunk() -> None:
    """What is kept is some hundred kB; tests/measure_explain.py tells it of 300 MB."""
    block = joined(healthy(1000)[66:])
    traced = joined(
        ["Traceback (most recent call last):", '  File "a.py", line 1, in x', "some.Error: of every kind"] * 300
    )

    def chunks(piece: bytes, total: int) -> Iterator[bytes]:
        for _ in range(total // len(piece)):
            yield piece

    read([block])
    for piece, total in ((block, 4_000_000), (traced, 150_000), (b"x" * 100_000, 4_000_000)):
        tracemalloc.start()
        read(chunks(piece, total))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 3_000_000


class Seen:
    attentive = False

    def __init__(self) -> None:
        self.lines: list[tuple[bytes, int]] = []

    def line(self, raw: bytes, number: int, hits: object) -> None:
        self.lines.append((raw, number))


def test_only_lines_with_a_literal_are_looked_at() -> None:
    seen = Seen()
    scanner = Scanner(book(), seen)
    for chunk in (b"healthy\nstill hea", b"lthy\nbus er", b"ror\nhealthy\r\n\r\nBUS ERROR\r\nbus error"):
        scanner.feed(chunk)
    scanner.close()
    assert seen.lines == [(b"bus error", 3), (b"BUS ERROR", 6), (b"bus error", 7)]


def test_lines_with_and_without_ends_as_text_and_bytes() -> None:
    lines = ["first", "Bus error (core dumped)"]
    expected = explain(lines)
    assert expected is not None and expected.line == 2
    assert explain([f"{line}\n" for line in lines]) == expected
    assert explain([line.encode() for line in lines]) == expected
    assert explain([]) is None
    assert explain(["\ud800"]) is None
