"""The signatures as data (`signatures.yaml`), read once, and the one test that finds the lines worth a look.

A log is millions of healthy lines. All literals of all signatures are searched for at once by an Aho-Corasick automaton, at
hundreds of MB/s; only lines that hold one are looked at.
"""

from __future__ import annotations

import re
from datetime import date
from functools import cache
from importlib import resources
from typing import Annotated, Literal, Self

import yaml
from ahocorasick_rs import BytesAhoCorasick, Implementation
from pydantic import Field, StringConstraints, model_validator

from forge_core.explain.model import Confidence, Fault
from forge_core.model import Frozen

Role = Literal["cause", "wrapper", "banner", "consequence", "context", "warning", "marker", "harmless"]
Wording = Literal["verbatim", "shortened", "memory", "ours", "made"]
_Literal = Annotated[str, StringConstraints(min_length=4, pattern=r"^[^A-Z\n]+$")]

TRACEBACK = b"traceback (most recent call last)"
_CHOSEN = 10_000
"""Sets of literals whose rules are remembered."""
UNKNOWN = "unknown"
"""The phase before any marker."""


def _demand_lower(pattern: str) -> None:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    if re.search(r"[A-Z]", re.sub(r"\\[A-Z]", "", pattern)):
        raise ValueError(f"{pattern!r} is searched for in lower case, and has upper case in it")


class Signature(Frozen):
    """One kind of line; the fields are described at the head of the file."""

    class_: str = Field(alias="class")
    role: Role = "cause"
    phase: str | None = None
    phases: tuple[str, ...] = ()
    needs: tuple[_Literal, ...] = Field(min_length=1)
    pattern: str
    inside: str | None = None
    within: str | None = None
    outranks: tuple[str, ...] = ()
    explains: bool = False
    """A frame that gives an unknown exception its class."""
    unless_tuning: bool = False
    """While the autotuner runs it is harmless."""
    unless_survived: bool = False
    """When the log goes on for long after it, it was harmless."""
    fault: Fault = "image"
    confidence: Confidence = "high"
    remedy: str = ""
    given: str = ""
    """Lines that stand before the sample, where it needs some."""
    sample: str
    source: str
    wording: Wording = "verbatim"
    date: date

    @model_validator(mode="after")
    def _complete(self) -> Self:
        _demand_lower(self.pattern)
        if "^" in re.sub(r"\\\^|\[\^", "", self.pattern):
            raise ValueError(f"{self.pattern!r} is tied to the begin of a line, where prefixes stand")
        if self.role == "marker":
            if not (self.phase or self.remedy):
                raise ValueError("a marker begins a phase, or has a remedy that says what it shows")
        elif not self.remedy:
            raise ValueError("a signature that is no marker needs a remedy")
        return self


class Phase(Frozen):
    """A phase of a start, and what it means to stall in it."""

    name: str
    stall: float | None = None
    """Seconds."""
    class_: str = Field(default="stall", alias="class")
    remedy: str = ""


class Exit(Frozen):
    """What an exit status tells by itself."""

    class_: str = Field(alias="class")
    fault: Fault
    remedy: str


class Mask(Frozen):
    """Lines that only quote."""

    pattern: str
    why: str
    source: str
    date: date

    @model_validator(mode="after")
    def _complete(self) -> Self:
        _demand_lower(self.pattern)
        return self


class Signatures(Frozen):
    """The file."""

    schema_version: Literal[1] = Field(alias="schema")
    phases: tuple[Phase, ...]
    exits: dict[int, Exit]
    masks: tuple[Mask, ...]
    signatures: tuple[Signature, ...]

    @model_validator(mode="after")
    def _known(self) -> Self:
        names = {phase.name for phase in self.phases} | {UNKNOWN}
        for number, one in enumerate(self.signatures, 1):
            if odd := {*one.phases, *filter(None, (one.phase,))} - names:
                raise ValueError(f"signature {number} ({one.class_}): no phase {', '.join(sorted(odd))}")
        return self


class Rule:
    """A signature, compiled."""

    def __init__(self, order: int, signature: Signature) -> None:
        self.order = order
        """Its place in the file: of those that fit a line, the first is taken."""
        self.signature = signature
        self.regex = re.compile(signature.pattern)
        self.search = self.regex.search
        """Of text in lower case."""
        self.inside = re.compile(signature.inside, re.IGNORECASE).search if signature.inside else None
        self.phases = frozenset(signature.phases)


class Book:
    """All signatures, ready to be asked."""

    def __init__(self, data: Signatures) -> None:
        self.data = data
        self.rules = tuple(Rule(order, one) for order, one in enumerate(data.signatures))
        self.phases = {phase.name: phase for phase in data.phases}
        self.order = {phase.name: number for number, phase in enumerate(data.phases)}
        self.masked = re.compile("|".join(f"(?:{mask.pattern})" for mask in data.masks)).search
        literals = sorted({need for one in data.signatures for need in one.needs})
        self.traceback = len(literals)
        """The hit that begins a traceback."""
        self._literals = [*(text.encode() for text in literals), TRACEBACK]
        self._by_literal: tuple[tuple[Rule, ...], ...] = (
            *(tuple(rule for rule in self.rules if text in rule.signature.needs) for text in literals),
            (),
        )
        self._searched: dict[frozenset[int], tuple[re.Pattern[str], ...]] = {}
        self._chosen: dict[frozenset[int], tuple[Rule, ...]] = {}
        self._automaton = BytesAhoCorasick(self._literals, implementation=Implementation.DFA)

    def hits(self, lowered: bytes) -> list[tuple[int, int, int]]:
        """Every literal in lower-case bytes, overlapping ones too: (number, begin, end), by their ends."""
        found: list[tuple[int, int, int]] = self._automaton.find_matches_as_indexes(lowered, overlapping=True)
        return found

    def fits(self, hits: frozenset[int], lowered: str) -> bool:
        """Whether a line in lower case, with these literals in it, fits any rule as far as its pattern goes."""
        found = self._searched.get(hits)
        if found is None:
            # Several rules may share a pattern.
            found = tuple({rule.regex: None for rule in self.chosen(hits)})
            if len(self._searched) < _CHOSEN:
                self._searched[hits] = found
        return any(regex.search(lowered) for regex in found)

    def chosen(self, hits: frozenset[int]) -> tuple[Rule, ...]:
        """The rules that need one of these literals, in the file's order."""
        found = self._chosen.get(hits)
        if found is None:
            rules = {rule.order: rule for hit in hits for rule in self._by_literal[hit]}
            found = tuple(rule for _, rule in sorted(rules.items()))
            if len(self._chosen) < _CHOSEN:
                self._chosen[hits] = found
        return found


@cache
def book() -> Book:
    """The signatures of this version; raises pydantic's ValidationError, a defect of ours, when the file is wrong."""
    text = (resources.files("forge_core.explain") / "signatures.yaml").read_text(encoding="utf-8")
    return Book(Signatures.model_validate(yaml.safe_load(text)))
