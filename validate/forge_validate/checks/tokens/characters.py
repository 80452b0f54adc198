"""Characters that no clean text holds: replacement, control, private, unassigned, and format characters out of place.

Format characters (zero-width ones among them) have work to do in some scripts and in emoji; only there are they clean.
"""

from __future__ import annotations

import unicodedata
from functools import lru_cache

from forge_validate.checks.tokens.scripts import script

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_PLAIN_CONTROLS = frozenset("\n\t\r")
_ZWNJ, _ZWJ, _ZWSP = "\u200c", "\u200d", "\u200b"
_SOFT_HYPHEN, _MONGOLIAN_SEPARATOR, _BLACK_FLAG = "\u00ad", "\u180e", "\U0001f3f4"
_KEYCAP = "\u20e3"

# Scripts whose letters are joined, or kept apart, by ZWJ and ZWNJ.
_JOINING = frozenset({
    "ARABIC", "SYRIAC", "MONGOLIAN", "NKO", "DEVANAGARI", "BENGALI", "GURMUKHI", "GUJARATI", "ORIYA", "TAMIL",
    "TELUGU", "KANNADA", "MALAYALAM", "SINHALA", "KHMER", "MYANMAR", "TIBETAN", "BALINESE", "JAVANESE",
})  # fmt: skip
# Scripts without spaces between words, where a zero-width space says where a line may break.
_UNSPACED = frozenset({"THAI", "LAO", "KHMER", "MYANMAR", "TIBETAN", "BALINESE", "JAVANESE"})
_RIGHT_TO_LEFT = frozenset({"HEBREW", "ARABIC", "SYRIAC", "THAANA", "NKO"})
_DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
# Format characters by category that are seen: number and verse signs of Arabic, Syriac and Kaithi.
_VISIBLE = frozenset("\u0600\u0601\u0602\u0603\u0604\u0605\u06dd\u070f\u0890\u0891\u08e2\U000110bd\U000110cd")
# Blocks that grow: what this Python does not know in them yet is an emoji or a Han character, not an accident.
_GROWING = ((0x1F000, 0x1FAFF), (0x20000, 0x2FFFD), (0x30000, 0x3FFFD))


def strange(said: str, *, cut: bool = False) -> tuple[int, ...]:
    """Where the strange characters of a text are.

    In a text that was `cut` by its token budget, the last character may lack its last bytes: what is left of it is not
    held against anyone.
    """
    if cut:
        kept = said.rstrip(_REPLACEMENT)
        # A character has four bytes at most, so three can be left of it.
        said = (kept if len(said) - len(kept) <= 3 else said).rstrip(_ZWJ)
    right_to_left: bool | None = None
    found = []
    for here, character in enumerate(said):
        if character.isascii():
            if not character.isprintable() and character not in _PLAIN_CONTROLS:
                found.append(here)
            continue
        kind = _kind(character)
        if kind == "clean":
            continue
        if kind == "direction":
            if right_to_left is None:
                right_to_left = any(script(c) in _RIGHT_TO_LEFT for c in said)
            if right_to_left:
                continue
        elif kind == "format" and _has_work(said, here):
            continue
        found.append(here)
    return tuple(found)


@lru_cache(maxsize=4096)
def _kind(character: str) -> str:
    """`clean`, `strange`, `direction`, or `format`: clean only in its place."""
    if character == _REPLACEMENT:
        return "strange"
    if character in _DIRECTIONS:
        return "direction"
    if character in _VISIBLE:
        return "clean"
    if _selects(character) or unicodedata.category(character) == "Cf":
        return "format"
    category = unicodedata.category(character)
    if category == "Cn":
        code = ord(character)
        return "clean" if any(low <= code <= high for low, high in _GROWING) else "strange"
    return "strange" if category in ("Cc", "Co", "Cs") else "clean"


def _has_work(said: str, here: int) -> bool:
    """Whether a format character stands where it does something."""
    character = said[here]
    before = said[here - 1] if here else ""
    after = said[here + 1] if here + 1 < len(said) else ""
    if _selects(character):
        # The look of a sign (an emoji or its plain form) or of a Han or Mongolian character, never of a plain letter.
        return bool(before) and (
            unicodedata.category(before) in ("So", "Sm", "Sk", "Po", "Pd", "No", "Nd", "Lo", "Cn") or before == "\u2139"
        )
    if character == _ZWJ:
        return _near(said, here, _JOINING) or _pictures(said, here)
    if character == _ZWNJ:
        return _near(said, here, _JOINING)
    if character == _ZWSP:
        return _near(said, here, _UNSPACED)
    if character == _SOFT_HYPHEN:
        return before.isalpha() and after.isalpha()
    if character == _MONGOLIAN_SEPARATOR:
        return script(before) == "MONGOLIAN"
    if "\U000e0020" <= character <= "\U000e007f":
        return _BLACK_FLAG in said[max(0, here - 8) : here]
    return False


def _near(said: str, here: int, scripts: frozenset[str]) -> bool:
    """Whether a letter or mark of these scripts is near: a sign or a space may stand in between."""
    return any(script(c) in scripts for c in said[max(0, here - 3) : here + 4])


def _pictures(said: str, here: int) -> bool:
    """Whether a joiner joins two emoji: a family, a profession, a flag."""
    if here + 1 >= len(said):
        return False
    before = said[here - 1] if here else ""
    return (before == _KEYCAP or _selects(before) or _picture(before)) and _picture(said[here + 1])


def _picture(character: str) -> bool:
    return bool(character) and unicodedata.category(character) in ("So", "Sk", "Sm", "Cn")


def _selects(character: str) -> bool:
    """Whether it is a variation selector."""
    return "\ufe00" <= character <= "\ufe0f" or "\U000e0100" <= character <= "\U000e01ef"
