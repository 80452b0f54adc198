"""Long prompts for the context family: which lengths, what stands in them, and in which pieces they are prefilled."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from zlib import crc32

from forge_validate.families import prompts
from forge_validate.families.about import About

Edge = Literal["chunk-1", "chunk", "chunk+1", "2chunk+1", "sliding-1", "sliding", "sliding+1", "window"]

CITIES = ("Rome", "Oslo", "Lima", "Cairo", "Delhi")
"""One for each depth."""

# So many words before the cycle begins again; a number of its own, so that the cycle is no multiple of a page.
_WORDS = 57
# Every piece of a prompt whose prefill was cut by us is no longer than a chunk, up to so many pieces.
_PIECES = 3
_DIGITS = re.compile(r"\s*(\d+)")


@dataclass(frozen=True)
class Length:
    """A prompt to ask."""

    name: str
    """Of its check: an edge, or `length-N`."""
    tokens: int | None
    """None: the server does not tell where this edge lies."""
    over: int | None = None
    """The edge it must lie behind, where it must: a chunk or a sliding window."""


@dataclass(frozen=True)
class Parts:
    """Token ids of what a prompt is made of."""

    text: tuple[int, ...]
    needles: tuple[tuple[int, ...], ...]
    questions: tuple[tuple[int, ...], ...]

    @property
    def least(self) -> int:
        """Tokens of the shortest prompt that holds all needles and a question."""
        return sum(map(len, self.needles)) + max(map(len, self.questions)) + 1


def lengths(
    edges: Sequence[Edge], further: Sequence[int], told: About, sliding: int | None, tokens: int
) -> tuple[Length, ...]:
    """What to ask, ascending; edges that this server does not have, or beyond its window, are left out.

    `tokens` are those of the answer, for which the window must leave room.
    """
    last = longest(told, tokens)
    found = []
    for edge in edges:
        if edge == "window":
            found.append(Length(edge, last))
            continue
        base = told.chunk if "chunk" in edge else sliding
        if base is None and "sliding" in edge:
            continue
        if base == 0:
            continue
        size = None if base is None else base * (2 if edge.startswith("2") else 1) + _step(edge)
        found.append(Length(edge, size, base if edge.endswith("+1") else None))
    found += [Length(f"length-{size}", size) for size in further]
    fitting = [one for one in found if one.tokens is None or last is None or one.tokens <= last]
    return tuple(sorted(fitting, key=lambda one: one.tokens or 0))


def longest(told: About, tokens: int) -> int | None:
    """The longest prompt that may be asked for so many tokens of answer; none: the server does not tell."""
    limits = [told.window - tokens if told.window else None, told.input - 1 if told.input else None]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def steps(size: int, chunk: int | None) -> tuple[int, ...]:
    """Where to cut a prompt so that it is prefilled in other pieces than in one go.

    Where three pieces suffice none is longer than a chunk, so that the server itself cuts nothing; otherwise one cut lies
    where no edge of a chunk is.
    """
    pieces = 2 if not chunk else max(2, -(-size // chunk))
    if pieces <= _PIECES:
        return tuple(size * piece // pieces for piece in range(1, pieces))
    return (size * 3 // 8 | 1,)


def price(size: int, chunk: int | None, tokens: int) -> int:
    """Tokens that a length costs, prompts and replies together, as the server counts them: cached ones, too."""
    cuts = steps(size, chunk)
    return 2 * (size + tokens) + sum(cuts) + len(cuts)


def sentence(index: int) -> str:
    """The needle of a depth."""
    return f" The secret number of {CITIES[index]} is {number(index)}."


def question(index: int) -> str:
    """What the needle is the answer to, as a text to go on with."""
    return f" The secret number of {CITIES[index]} is"


def number(index: int) -> str:
    """Five digits that stand in no other text; always the same ones, so that recorded answers can be judged."""
    return str(10_000 + crc32(f"sm120-forge {CITIES[index]}".encode()) % 90_000)


def plain() -> str:
    """Words between the needles, to be repeated."""
    return " " + prompts.filler("and", _WORDS)


def compose(parts: Parts, size: int, depths: Sequence[float], asked: int, start: int) -> list[int]:
    """Exactly `size` token ids: text with a needle at each depth, and the question for needle `asked` at the end.

    `start` is where in the text to begin, so that no prompt is the beginning of another. Raises ValueError if `size` is
    less than `parts.least`.
    """
    end = parts.questions[asked]
    room = size - len(end) - sum(map(len, parts.needles))
    if room < 1:
        raise ValueError(f"{size} tokens do not hold the needles")
    ids: list[int] = []
    taken = start
    for depth, needle in sorted(zip(depths, parts.needles, strict=True)):
        until = start + int(room * depth)
        ids += _cycle(parts.text, taken, until)
        ids += needle
        taken = until
    return [*ids, *_cycle(parts.text, taken, start + room), *end]


def answer(text: str) -> str:
    """The number that an answer begins with; empty: it begins with something else."""
    found = _DIGITS.match(text)
    return found.group(1) if found else ""


def sliding_window(model: Path | None) -> int | None:
    """Tokens of the model's sliding window, or of its chunks of local attention; none: it has none, or is not here."""
    if model is None:
        return None
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    inner = config.get("text_config") if isinstance(config, dict) else None
    settings: Mapping[str, object] = inner if isinstance(inner, dict) else config if isinstance(config, dict) else {}
    for name in ("sliding_window", "attention_chunk_size"):
        size = settings.get(name)
        if isinstance(size, int) and size > 0 and settings.get("use_sliding_window") is not False:
            return size
    return None


def _step(edge: str) -> int:
    return 1 if edge.endswith("+1") else -1 if edge.endswith("-1") else 0


def _cycle(text: Sequence[int], begin: int, end: int) -> list[int]:
    return [text[place % len(text)] for place in range(begin, end)]
