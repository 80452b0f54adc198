"""What repeats in clean texts by nature, set aside before repetition is looked for: rules, leaders, opaque words.

A rule is a line of separators, a leader a run of one of them that leads on to something. An opaque word is base64, hex,
a list of numbers, a sequence of bases: letters without words, where chance and layout repeat what they like.
"""

from __future__ import annotations

import re
import zlib

from forge_validate.checks.tokens.repetition import stretches

_RULES = frozenset("-=_*#~.·•+|:<>^/\\…–—―⋯⋮")
_LEADERS = re.compile(r"([-=_*~.·•#…–—―\u2500-\u259f])(?:[ \t]?\1){3,}|(?:&nbsp;){3,}")
_ALPHABET = r"[A-Za-z0-9+/=_-]"
_OPAQUE = re.compile(
    rf"{_ALPHABET}{{20,}}(?:\r?\n[ \t]*{_ALPHABET}{{20,}})*"  # base64, hex, keys, over several lines
    r"|(?:\b(?:0x)?[0-9A-Fa-f]{1,8}\b[\s,:;|]{1,4}){8,}"  # a dump, a list of numbers
)
_BASES = re.compile(r"[ACGTU]{12,}|[acgtu]{12,}")
# One followed by zeros is a number; ten to the fortieth is more than anyone counts.
_POWERS = re.compile(r"(?<![0-9])([0-9]*[1-9])0{4,40}(?![0-9])")
# Cells of a table, texts of a list, hex numbers, elements of HTML, places of a format string.
_DATA = re.compile(r"""["'],|\||0[xX][0-9A-Fa-f]|</[A-Za-z]|%[sd]""")
_LITERALS = re.compile(r"(?:true|false|null|none|nan|yes|no|ok)+")


def flowing(said: str, longest_rule: int) -> str:
    """The text without rules, leaders and opaque words; a rule stays where there is little else."""
    text = _POWERS.sub(r"\g<1>000", _without_rules(said, longest_rule))
    text = _LEADERS.sub(lambda found: _leader(text, found, longest_rule), text)
    for pattern in (_OPAQUE, _BASES):
        text = pattern.sub(_opaque, text)
    return text


def is_data(unit: str) -> bool:
    """Whether a repeated unit is one of a list or table: numbers, literals, cells."""
    if not any(c.isalpha() for c in unit):
        return any(c.isdigit() for c in unit)
    # Twice, since the unit may begin anywhere.
    if _DATA.search(unit * 2) is not None:
        return True
    letters = "".join(c for c in unit if c.isalpha()).lower()
    if letters == unit.lower() or len(letters) > 24:
        return False
    return any(_LITERALS.fullmatch(letters[here:] + letters[:here]) for here in range(len(letters)))


def _without_rules(said: str, longest: int) -> str:
    lines = said.split("\n")
    rules = {
        number
        for number, line in enumerate(lines)
        if 0 < len(line.strip()) <= longest
        and all(c in _RULES or c.isspace() or "\u2500" <= c <= "\u259f" for c in line)
    }
    texts = sum(1 for number, line in enumerate(lines) if line.strip() and number not in rules)
    # A drawing may have more lines of signs than of text, a text that collapsed has no end of them.
    if not texts or len(rules) > 3 * texts + 8:
        return said
    return "\n".join(line for number, line in enumerate(lines) if number not in rules)


def _leader(text: str, found: re.Match[str], longest: int) -> str:
    run = found[0]
    leads_on = any(c.isalnum() for c in text[found.end() : found.end() + 400])
    # Where it ends the text, there must be a text that it ends.
    return run[:3] if len(run) <= longest and (leads_on or len(run) * 2 < len(text)) else run


def _opaque(found: re.Match[str]) -> str:
    word = "".join(found[0].split())
    bases = _BASES.fullmatch(word) is not None
    if not bases and (len(set(word)) < 6 or not any(c.isdigit() or c.isupper() for c in word)):
        return found[0]
    if any(stretch.length * 2 > len(word) for stretch in stretches(word, 24, 4)):
        return found[0]
    # Something of its own stays: what stands between such words must not look as if it stood alone.
    return f" {zlib.crc32(word.encode(errors='surrogatepass')):x} "
