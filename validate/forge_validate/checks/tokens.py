"""The garbage detector: looks at content and reasoning, at any character.

What broken kernels say, as reported: `!!!!` (argmax over NaN is token 0), `////`, `????`, one word over and over,
U+FFFD, control characters, word salad of many scripts, special tokens in the text, or nothing at all.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from forge_validate import reply
from forge_validate.checks.result import CheckResult, Evidence, quoted
from forge_validate.policy import Text

_SPECIAL = re.compile(r"<\|[A-Za-z0-9_]+\|>|<(?:pad|unk|s|/s|bos|eos)>")
_PLAIN_CONTROLS = frozenset("\n\t\r")
# The longest unit of a repetition that is looked for; "should " is 7 characters.
_LONGEST_UNIT = 24


@dataclass(frozen=True)
class Measures:
    """What was counted in one text."""

    characters: int
    repeat: str
    """The unit of the longest repetition."""
    repeat_length: int
    """Characters of that repetition, white space not counted."""
    repeat_share: float
    distinct_ratio: float | None
    """Smallest share of distinct characters in any full window; none: the text is shorter than a window."""
    strange: tuple[str, ...]
    scripts: tuple[str, ...]
    special: tuple[str, ...]


def text(evidence: Evidence) -> CheckResult:
    """Nothing the model says is garbage, and it says something."""
    try:
        said = reply.read(evidence.exchange)
    except reply.NotAReply as error:
        return evidence.failed(str(error))
    if not any(part.strip() for part in said.said.values()):
        if said.tool_calls:
            return evidence.passed("a tool call, no text", value=0)
        tokens = f" for {said.completion_tokens} tokens" if said.completion_tokens else ""
        return evidence.failed(f"not one character{tokens}, finish reason {said.finish}", value=0, answer="")
    for place, part in said.said.items():
        if (complaint := complain(measure(part, evidence.policy.text), evidence.policy.text)) is not None:
            return evidence.failed(f"the {place} is garbage: {complaint}", value=place, answer=part)
    return evidence.passed("reads as text", value=sum(map(len, said.said.values())))


def complain(found: Measures, limits: Text) -> str | None:
    """Why a text with these measures is garbage; none if it is not."""
    if len(found.strange) > limits.strange_characters.value:
        listed = " ".join(found.strange[:5])
        return f"{len(found.strange)} control, unassigned or replacement characters ({listed})"
    if found.special:
        return f"special tokens in the text ({found.special[0]})"
    if found.repeat_length > limits.repeat_length.value or found.repeat_share > limits.repeat_share.value:
        return f"{quoted(found.repeat)} over and over, {found.repeat_length} of {found.characters} characters"
    if found.distinct_ratio is not None and found.distinct_ratio < limits.distinct_ratio.value:
        return f"hardly any different characters ({found.distinct_ratio:.2f} of a window)"
    if len(found.scripts) > limits.scripts.value:
        return f"a mix of writing systems ({', '.join(found.scripts)})"
    return None


def measure(said: str, limits: Text) -> Measures:
    """Count what `complain` looks at. White space is left out: indentation and rules of layout are no garbage."""
    dense = "".join(said.split())
    unit, length = _repetition(dense, int(limits.repeat_times.value))
    return Measures(
        characters=len(dense),
        repeat=unit,
        repeat_length=length,
        repeat_share=length / len(dense) if dense else 0.0,
        distinct_ratio=_distinct(dense, int(limits.distinct_window.value)),
        strange=tuple(f"U+{ord(c):04X}" for c in said if _strange(c)),
        scripts=_scripts(said),
        special=tuple(_SPECIAL.findall(said)),
    )


def _repetition(dense: str, times: int) -> tuple[str, int]:
    """The unit and the length of the longest stretch in which one unit stands `times` times or more in a row."""
    best = ("", 0)
    for period in range(1, min(_LONGEST_UNIT, len(dense) // times) + 1):
        equal = 0
        for here in range(period, len(dense) + 1):
            if here < len(dense) and dense[here] == dense[here - period]:
                equal += 1
                continue
            if equal and (length := equal + period) >= times * period and length > best[1]:
                best = (dense[here - length : here - length + period], length)
            equal = 0
    return best


def _distinct(dense: str, window: int) -> float | None:
    if len(dense) < window:
        return None
    return min(len(set(dense[i : i + window])) for i in range(len(dense) - window + 1)) / window


def _strange(character: str) -> bool:
    if character == "\N{REPLACEMENT CHARACTER}":
        return True
    return unicodedata.category(character) in ("Cc", "Co", "Cn", "Cs") and character not in _PLAIN_CONTROLS


def _scripts(said: str) -> tuple[str, ...]:
    """Writing systems with two letters or more: one foreign letter may be a formula (π, µ)."""
    counts: dict[str, int] = {}
    for character in said:
        if character.isalpha():
            # Unicode names begin with the script; the standard library has no script property.
            script = unicodedata.name(character, "UNKNOWN").split()[0]
            counts[script] = counts.get(script, 0) + 1
    # Japanese is written in three.
    japanese = {"HIRAGANA", "KATAKANA", "CJK"}
    merged = {"CJK" if s in japanese or s.startswith("CJK") else s for s, n in counts.items() if n > 1}
    return tuple(sorted(merged))
