"""The prompts of a golden file: cut from plain texts to the lengths of a suite, by the model's own tokens."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files
from typing import Annotated, Literal

import yaml
from pydantic import Field

from forge_core.errors import UsageError
from forge_core.model import Frozen
from forge_validate import data

Encode = Callable[[str], tuple[int, ...]]
"""A text to token ids."""

# Where a text may be cut: after so many characters of a word at most, for scripts without spaces.
_PIECE = re.compile(r"\s*\S{1,6}|\s+$")


class _Texts(Frozen):
    schema_version: Literal[1] = Field(alias="schema")
    texts: Annotated[tuple[str, ...], Field(min_length=4)]


def prompt(index: int, tokens: int, encode: Encode) -> tuple[str, tuple[int, ...]]:
    """The `index`-th prompt of at most `tokens` tokens, and nearly so many: its text and ids.

    Raises UsageError for a tokenizer that makes more of a few characters.
    """
    pieces = tuple(itertools.islice(_pieces(index), 2 * tokens))
    low, high = 1, len(pieces)
    # No tokenizer makes less than one token of two pieces in any of these texts, so the cut lies between.
    while low < high:
        middle = (low + high + 1) // 2
        if len(encode("".join(pieces[:middle]))) <= tokens:
            low = middle
        else:
            high = middle - 1
    text = "".join(pieces[:low])
    ids = encode(text)
    if not 1 < len(ids) <= tokens:
        raise UsageError(f"the tokenizer makes {len(ids)} tokens of {text!r}, and {tokens} are wanted")
    return text, ids


def _pieces(index: int) -> Iterator[str]:
    """The pieces of all texts without end, beginning with another one for each index."""
    found = _texts()
    for number in itertools.count():
        heading = f"\n\n{number + 1}. " if number else ""
        yield from _PIECE.findall(heading + found[(index + number) % len(found)])


@cache
def _texts() -> tuple[str, ...]:
    raw = yaml.safe_load((files(__package__) / "texts.yaml").read_text(encoding="utf-8"))
    return data.parse("golden/texts.yaml", raw, _Texts).texts
