"""The suites for people: what each asks, and what that costs at most."""

from __future__ import annotations

from collections.abc import Sequence

from forge_core.model import Frozen
from forge_validate import data, families
from forge_validate.suite import Suite


class Entry(Frozen):
    """One family of a suite, or its cases."""

    name: str
    checks: str
    """What is judged, in a few words."""
    tokens: int
    """At most, prompts and replies together; of the cases the replies alone: what a prompt holds is in the answers."""


class Listed(Frozen):
    """One suite."""

    suite: str
    entries: tuple[Entry, ...]

    @property
    def tokens(self) -> int:
        """Of all entries."""
        return sum(entry.tokens for entry in self.entries)


def listed() -> tuple[Listed, ...]:
    """Every suite of the package, by name; raises UsageError for one with a mistake."""
    return tuple(_listed(data.load("suites", name, Suite)) for name in data.names("suites"))


def table(found: Sequence[Listed]) -> str:
    """Plain text, one block for each suite."""
    lines = []
    for one in found:
        lines.append(f"{one.suite}: at most {one.tokens:,} tokens")
        lines += [f"  {entry.name:<10} {entry.tokens:>9,}  {entry.checks}" for entry in one.entries]
        lines.append("")
    return "\n".join(lines)


def _listed(suite: Suite) -> Listed:
    budget = sum(case.max_tokens or 0 for case in suite.cases)
    names = sorted({check for case in suite.cases for check in case.checks})
    cases = Entry(name="cases", checks=f"{len(suite.cases)} cases: {', '.join(names)}", tokens=budget)
    asked = tuple(
        Entry(name=family.name, checks=family.checks, tokens=family.cost(settings))
        for family, settings in families.chosen(suite.suite, suite.families)
    )
    return Listed(suite=suite.suite, entries=(cases, *asked))
