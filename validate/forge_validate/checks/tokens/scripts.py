"""Writing systems, and the word salad of broken sampling: words that change from one to another without a reason.

Many scripts are no fault in themselves: a table of translations has them, and Japanese is written in three. Salad changes
the script from one word to the next with nothing but a space in between, again and again, or inside a word.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

# Unicode names begin with the script; the standard library has no script property.
_SCRIPTS = frozenset({
    "LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "HEBREW", "ARABIC", "SYRIAC", "THAANA", "NKO", "DEVANAGARI",
    "BENGALI", "GURMUKHI", "GUJARATI", "ORIYA", "TAMIL", "TELUGU", "KANNADA", "MALAYALAM", "SINHALA", "THAI", "LAO",
    "TIBETAN", "MYANMAR", "GEORGIAN", "HANGUL", "ETHIOPIC", "CHEROKEE", "KHMER", "MONGOLIAN", "BALINESE",
    "JAVANESE", "TAI", "TIFINAGH", "VAI", "YI", "GLAGOLITIC", "COPTIC", "CANADIAN", "CJK",
})  # fmt: skip
# Written together with Han characters, and no change of script there.
_HAN = frozenset({"CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "HALFWIDTH", "BOPOMOFO", "IDEOGRAPHIC"})
# One letter of these is a formula.
_FORMULA = frozenset(("LATIN", "GREEK"))
# Alphabets that are not mixed inside a word. Others take foreign words in: Chinese, Korean, Arabic, Hindi do.
_PURE = frozenset({"LATIN", "CYRILLIC", "GREEK", "ARMENIAN", "GEORGIAN"})


@dataclass(frozen=True)
class Salad:
    """The worst stretch of a text."""

    start: int
    """Where it begins, in characters."""
    scripts: tuple[str, ...]
    changes: int
    """Changes of script between neighbours with nothing but spaces, or nothing, in between."""
    spread: int
    """Changes that are not between the two scripts that change most often."""
    words: int
    mixed: int
    """Changes between two alphabets inside a word."""

    @property
    def rate(self) -> float:
        """Changes per gap between words."""
        return self.changes / max(1, self.words - 1)


@dataclass(frozen=True)
class _Word:
    start: int
    script: str
    letters: int
    gap: str
    """What stands before it: `none`, `space`, or `other` for anything a writer would put between two languages."""


@lru_cache(maxsize=8192)
def script(character: str) -> str | None:
    """The script of a letter or of a mark on letters; none for anything else, such as signs made of letters (µ, 𝐱)."""
    if not character:
        return None
    if character.isascii():
        return "LATIN" if character.isalpha() else None
    if unicodedata.category(character)[0] not in "LM":
        return None
    words = unicodedata.name(character, "").replace("FULLWIDTH ", "").split()
    first = words[0] if words else ""
    if first in _HAN:
        return "CJK"
    return first if first in _SCRIPTS else None


@lru_cache(maxsize=8192)
def _major(character: str) -> str:
    """First letter of a character's category: L for a letter, M for a mark on one."""
    return unicodedata.category(character)[0]


def salads(said: str, window: int) -> tuple[Salad, ...]:
    """The stretches of `window` words of each line (one if there are fewer), half of one shared with the next."""
    found, before = [], 0
    for line in said.split("\n"):
        # Nothing to change to in ASCII.
        words = [] if line.isascii() else _words(line, before)
        if len(words) > 1:
            last = max(0, len(words) - window)
            starts = sorted({*range(0, last, max(1, window // 2)), last})
            found += [_salad(words[start : start + window]) for start in starts]
        before += len(line) + 1
    return tuple(found)


def _salad(words: Sequence[_Word]) -> Salad:
    pairs: Counter[frozenset[str]] = Counter()
    mixed = 0
    for before, word in pairwise(words):
        if before.script != word.script and word.gap != "other":
            pairs[frozenset((before.script, word.script))] += 1
            alphabets = before.script in _PURE and word.script in _PURE
            mixed += word.gap == "none" and alphabets and min(before.letters, word.letters) > 1
    return Salad(
        start=words[0].start,
        scripts=tuple(sorted({word.script for word in words})),
        changes=pairs.total(),
        spread=pairs.total() - max(pairs.values(), default=0),
        words=len(words),
        mixed=mixed,
    )


def _words(line: str, offset: int) -> list[_Word]:
    """Stretches of letters of one script. Single letters that may be a formula are left out."""
    words: list[_Word] = []
    start, current, letters, gap = 0, "", 0, "other"

    def end() -> None:
        nonlocal current, gap
        if not current:
            return
        if letters == 1 and current in _FORMULA:
            gap = "other"
        else:
            words.append(_Word(offset + start, current, letters, gap))
            gap = "none"
        current = ""

    for here, character in enumerate(line):
        found = script(character)
        if found is not None and _major(character) == "L":
            if found != current:
                end()
                start, current, letters = here, found, 0
            letters += 1
        elif _major(character) == "M" or character in "\u200c\u200d":
            continue
        else:
            end()
            if character not in " \u00a0":
                gap = "other"
            elif gap == "none":
                gap = "space"
    end()
    return words
