"""Measuring a text, and complaining of what was measured."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from forge_validate.checks.result import quoted
from forge_validate.checks.tokens import layout
from forge_validate.checks.tokens.characters import strange
from forge_validate.checks.tokens.repetition import fewest_distinct, repeated_share, stretches
from forge_validate.checks.tokens.scripts import Salad, salads
from forge_validate.checks.tokens.tags import special
from forge_validate.policy import Text

# The longest unit of a repetition that is looked for: in characters (a short word), in words (a paragraph), in tokens.
_LONGEST_CHARACTERS = 24
_LONGEST_WORDS = 128
_LONGEST_TOKENS = 16
_NGRAM = 3
# A word, or one letter of a script that has no spaces between words. What stands before a word is its gap.
_UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
# What `\w` does not take for part of a word: vowel signs of Arabic, Hebrew and the scripts of India, joiners.
_MARKS = (
    r"\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0670\u06d6-\u06ed\u0900-\u0963\u0966-\u0dff\u200c\u200d"
)
_WORD = re.compile(rf"(?P<gap>[^\w{_MARKS}]*)(?P<word>[{_UNSPACED}]|(?:[^\W{_UNSPACED}]|[{_MARKS}])+)")
_BLANK = re.compile(r"\s+")


@dataclass(frozen=True)
class Repeat:
    """The worst repetition of a text."""

    unit: str
    times: int
    length: int
    """What of the text it is, in characters without white space, or in tokens."""
    share: float
    """Of the text."""
    before: int
    """How much of the text stands before it, in the same measure."""


@dataclass(frozen=True)
class Measures:
    """What was found in one text; what is empty or none is clean."""

    characters: int
    """White space not counted."""
    strange: tuple[str, ...] = ()
    special: tuple[str, ...] = ()
    blank: int = 0
    """Longest run of white space."""
    repeat: Repeat | None = None
    """A repetition beyond the limits."""
    distinct_ratio: float | None = None
    """Smallest share of distinct characters in any full window of letters; none: there is no such window."""
    ngram_share: float | None = None
    """Largest share of repeated n-grams in any full window of flowing words; none: there is no such window."""
    salad: Salad | None = None
    """Words that change the script beyond the limits."""


def measure(said: str, limits: Text, *, cut: bool = False, repeats: bool = False) -> Measures:
    """Look at one text. `cut`: its token budget ended it. `repeats`: repetition was asked for and is not looked for."""
    dense = "".join(said.split())
    found = Measures(
        characters=len(dense),
        strange=tuple(f"U+{ord(said[here]):04X}" for here in strange(said, cut=cut)),
        special=special(said),
        blank=max((len(run[0]) for run in _BLANK.finditer(said)), default=0),
        salad=next((one for one in salads(said, int(limits.script_window.value)) if _is_salad(one, limits)), None),
    )
    if repeats:
        return found
    plain = layout.flowing(said, int(limits.rule_length.value))
    gaps, words = _words(plain)
    return replace(
        found,
        repeat=_repeat(plain, gaps, words, len(dense), limits),
        distinct_ratio=_distinct(gaps, words, int(limits.distinct_window.value)),
        ngram_share=_ngrams(gaps, words, int(limits.ngram_window.value)),
    )


def complain(found: Measures, limits: Text) -> str | None:
    """Why a text with these measures is garbage; none if it is not."""
    if len(found.strange) > limits.strange_characters.value:
        listed = " ".join(found.strange[:5])
        return f"{len(found.strange)} control, zero-width, unassigned or replacement characters ({listed})"
    if found.repeat is not None:
        return _told(found.repeat, found.characters)
    if found.blank > limits.blank_length.value:
        return f"{found.blank} characters of white space in a row"
    if found.distinct_ratio is not None and found.distinct_ratio < limits.distinct_ratio.value:
        return f"hardly any different characters ({found.distinct_ratio:.2f} of a window)"
    if found.ngram_share is not None and found.ngram_share > limits.ngram_share.value:
        return f"the same few words over and over ({found.ngram_share:.2f} of a window stood before)"
    if found.salad is not None:
        after = f" after {found.salad.start} characters" if found.salad.start else ""
        return f"a mix of writing systems ({', '.join(found.salad.scripts)}){after}"
    return None


def complain_of_tokens(tokens: Sequence[int | str], seen: int, limits: Text) -> str | None:
    """Why a row of tokens (ids, or texts) is garbage: one or a few over and over, also such as show no text.

    `seen`: characters of the reply, white space not counted. Ids do not say what they stand for: where the text shows
    them, the text is what is judged, up to the length that is too long for a list too.
    """
    times = int(limits.data_times.value)
    for stretch in stretches(tokens, _LONGEST_TOKENS, times):
        if stretch.length < 2 * times or stretch.length <= limits.repeat_share.value * len(tokens):
            continue
        unit = tokens[stretch.start : stretch.start + stretch.period]
        if all(isinstance(one, str) for one in unit):
            shown = "".join(map(str, unit))
            excused = not any(c.isalpha() for c in shown) and layout.is_data(shown)
        else:
            shown, excused = " ".join(map(str, unit)), seen * 2 > len(tokens)
        if not excused or stretch.length > limits.data_length.value:
            return f"{quoted(shown, 60)} over and over, {stretch.length} of {len(tokens)} tokens"
    return None


def _told(found: Repeat, total: int) -> str:
    after = f", after {found.before} of another kind" if found.before else ""
    return f"{quoted(found.unit, 60)} over and over, {found.length} of {total} characters{after}"


def _repeat(plain: str, gaps: Sequence[str], words: Sequence[str], total: int, limits: Text) -> Repeat | None:
    """The longest repetition beyond the limits: of a few characters, else of words."""
    worst: Repeat | None = None
    times = int(limits.repeat_times.value)
    for repeat in (*_of_characters("".join(plain.split()), total, times), *_of_words(gaps, words, total, times)):
        if _too_much(repeat, limits) and (worst is None or repeat.length > worst.length):
            worst = repeat
    return worst


def _of_characters(dense: str, total: int, times: int) -> Iterator[Repeat]:
    for stretch in stretches(dense, _LONGEST_CHARACTERS, times):
        unit = dense[stretch.start : stretch.start + stretch.period]
        yield Repeat(unit, stretch.times, stretch.length, stretch.length / total, stretch.start)


def _of_words(gaps: Sequence[str], words: Sequence[str], total: int, times: int) -> Iterator[Repeat]:
    # Signs between words are as much said as the words are.
    items = ["".join((gap + word).split()) for gap, word in zip(gaps, words, strict=True)]
    lengths = [len(item) for item in items]
    for stretch in stretches(items, _LONGEST_WORDS, times):
        length = sum(lengths[stretch.start : stretch.end])
        once = range(stretch.start, stretch.start + stretch.period)
        unit = " ".join("".join(gaps[n] + words[n] for n in once).split())
        yield Repeat(unit, stretch.times, length, length / total, sum(lengths[: stretch.start]))


def _too_much(found: Repeat, limits: Text) -> bool:
    if layout.is_data(found.unit):
        too_long = found.share > limits.repeat_share.value or found.length > limits.data_length.value
        return found.times >= limits.data_times.value and too_long
    if found.share > limits.repeat_share.value:
        return True
    return found.times >= limits.repeat_anywhere.value and found.length > limits.repeat_length.value


def _distinct(gaps: Sequence[str], words: Sequence[str], window: int) -> float | None:
    """Looked for among letters of words that follow each other: numbers, lists and code have small alphabets."""
    rows: list[list[str]] = []
    for gap, word in zip(gaps, words, strict=True):
        if gap.strip() or not rows:
            rows.append([])
        rows[-1] += filter(str.isalpha, word)
    fewest = [found for row in rows if (found := fewest_distinct(row, window)) is not None]
    return min(fewest) / window if fewest else None


def _ngrams(gaps: Sequence[str], words: Sequence[str], window: int) -> float | None:
    """The worst window in which words follow each other as in speech: tables, lists and code repeat by nature."""
    worst: float | None = None
    last = len(words) - window
    for start in sorted({*range(0, max(0, last), window // 4), last}) if last >= 0 else ():
        end = start + window
        plain = sum(1 for gap in gaps[start:end] if not gap.strip() and "\n" not in gap)
        if plain * 10 >= window * 6 and not all(word.isdigit() for word in words[start:end]):
            share = repeated_share(words[start:end], _NGRAM)
            worst = share if worst is None else max(worst, share)
    return worst


def _words(said: str) -> tuple[list[str], list[str]]:
    """Gaps and the words after them."""
    found = [(match["gap"], match["word"]) for match in _WORD.finditer(said)]
    return [gap for gap, _ in found], [word for _, word in found]


def _is_salad(found: Salad, limits: Text) -> bool:
    if found.mixed > limits.mixed_words.value:
        return True
    return (
        len(found.scripts) > limits.scripts.value
        and found.spread > limits.scripts.value
        and found.rate > limits.script_changes.value
    )


__all__ = ["Measures", "Repeat", "complain", "complain_of_tokens", "measure"]
