"""Families of checks, by name: what a suite may name in `families`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forge_core.errors import UsageError
from forge_core.model import Frozen
from forge_validate import data
from forge_validate.families.batch import Batch
from forge_validate.families.cache import Cache
from forge_validate.families.context import Context
from forge_validate.families.family import Ask, Family, Wave, Waves
from forge_validate.families.golden import GoldenFamily
from forge_validate.families.hang import Hang
from forge_validate.families.leak import Leak
from forge_validate.families.parsers import Parsers
from forge_validate.families.poison import Poison
from forge_validate.families.stream import Stream
from forge_validate.families.template import Template

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        Template(),
        Parsers(),
        Stream(),
        GoldenFamily(),
        Batch(),
        Cache(),
        Context(),
        Poison(),
        Hang(),
        Leak(),
    )
}
"""In no order: a suite's own order is that of asking."""


def chosen(suite: str, sections: Mapping[str, Mapping[str, Any]]) -> tuple[tuple[Family, Frozen], ...]:
    """The families of a suite with their settings, in its order.

    Raises UsageError for a family that no code stands behind and for settings it does not know.
    """
    if unknown := tuple(name for name in sections if name not in FAMILIES):
        raise UsageError(
            f"suites/{suite}.yaml names unknown families: {', '.join(unknown)}",
            hint=f"there are: {', '.join(sorted(FAMILIES))}",
        )
    return tuple(
        (FAMILIES[name], data.parse(f"suites/{suite}.yaml families.{name}", dict(section), FAMILIES[name].settings))
        for name, section in sections.items()
    )


__all__ = ["FAMILIES", "Ask", "Family", "Wave", "Waves", "chosen"]
