"""Answers held against their references: what the families that judge by equality share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from forge_validate import reply
from forge_validate.checks.result import CheckResult
from forge_validate.exchange import Exchange
from forge_validate.families import said
from forge_validate.families.equality import compare
from forge_validate.families.family import result


@dataclass(frozen=True)
class Pair:
    """Two names of exchanges that must be one answer, and what to say where they are not."""

    reference: str
    other: str
    place: str


def same(
    check: str,
    pairs: Iterable[Pair],
    exchanges: Mapping[str, Exchange],
    bound: float | None,
    *,
    value: str | float | None = None,
) -> CheckResult:
    """Compare every pair. The first sure difference fails; what is missing, or may be noise, is unmeasured.

    `value` is that of a failure; a pass has the largest difference.
    """
    tokens, largest, unmeasured = 0, 0.0, None
    for pair in pairs:
        reference, other = exchanges.get(pair.reference), exchanges.get(pair.other)
        why = _lacking(reference) or _lacking(other)
        if why is not None or reference is None or other is None:
            unmeasured = unmeasured or f"{pair.place}: {why}"
            continue
        try:
            theirs = said.read(reference)
        except reply.NotAReply as error:
            unmeasured = unmeasured or f"{pair.place}: the reference: {error}"
            continue
        try:
            mine = said.read(other)
        except reply.NotAReply as error:
            return result(check, "failed", f"{pair.place}: {error}", value=value)
        found = compare(theirs, mine, bound)
        tokens, largest = tokens + found.tokens, max(largest, found.largest)
        if found.complaint is not None and found.sure:
            return result(check, "failed", f"{pair.place}: {found.complaint}", value=value, answer=mine.text)
        if found.complaint is not None:
            unmeasured = unmeasured or f"{pair.place}: {found.complaint}"
    if unmeasured is not None:
        return result(check, "unmeasured", unmeasured)
    if not tokens:
        return result(check, "unmeasured", "nothing was said that could be compared")
    limit = f"at most {largest:.2g} apart, the bound is {bound:.2g}" if bound is not None else "equal texts"
    return result(check, "passed", f"{tokens} tokens are the same ({limit})", value=largest)


def _lacking(one: Exchange | None) -> str | None:
    return "was not asked" if one is None else one.error
