"""What the recipes know how to compile: `units.yaml`, read once and checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints, TypeAdapter

from forge_build.manifest import read_yaml
from forge_core.errors import UsageError
from forge_core.model import Frozen

Argument = str | int | bool
_PLACE = re.compile(r"\{(\w+)\}")


class Units(Frozen):
    """One module of a recipe, or a family of modules that differ in words like `{head_dim}`."""

    name: str | None = None
    """The name of each of a family; none: the entry's own is the module's."""
    generator: Annotated[str, StringConstraints(pattern=r"^[\w.]+:\w+$")]
    """`package.module:function`, called inside the builder."""
    arguments: dict[str, Argument] = Field(default_factory=dict)
    """What it is called with, by name; `torch.X` is that type."""
    units: Annotated[int, Field(gt=0)]
    """How many files it compiles."""
    peak: Annotated[int, Field(gt=0)]
    """Bytes one compiler needs at most."""


class Module(Frozen):
    """One module that can be compiled."""

    name: str
    """As FlashInfer's loader looks for it."""
    call: str
    """`package.module:function`, then, after a space, its arguments as JSON where it has any."""
    units: int
    peak: int


@cache
def _table() -> dict[str, dict[str, Units]]:
    data = read_yaml(Path(__file__).with_name("units.yaml"))
    return TypeAdapter(dict[str, dict[str, Units]]).validate_python(data)


def units(recipe: str, modules: tuple[str, ...], where: str) -> dict[str, Module]:
    """The named modules of a recipe; raises UsageError naming every unknown one at `where` in the manifest."""
    known = {name: item for name, item in _table().get(recipe, {}).items() if item.name is None}
    if not modules:
        raise UsageError(f"{where}: no module is named", hint=f"known: {', '.join(known)}")
    if unknown := [name for name in modules if name not in known]:
        raise UsageError(
            f"{where}: the recipe {recipe!r} knows no {', '.join(map(repr, unknown))}",
            hint=f"known: {', '.join(known)}; units.yaml of forge_build.compile names generators",
        )
    return {name: named(recipe, name) for name in sorted(set(modules))}


def named(recipe: str, name: str) -> Module:
    """The module of that very name; KeyError when the recipe has none."""
    return _filled(name, _table()[recipe][name], {})


def template(recipe: str, family: str, words: Mapping[str, str | int]) -> Module:
    """One module of a family; KeyError for an unknown family or a word that is missing."""
    item = _table()[recipe][family]
    assert item.name is not None
    return _filled(item.name, item, words)


def _filled(name: str, item: Units, words: Mapping[str, str | int]) -> Module:
    def text(pattern: str) -> str:
        return _PLACE.sub(lambda match: str(words[match[1]]), pattern)

    def value(given: Argument) -> Argument:
        if not isinstance(given, str):
            return given
        alone = _PLACE.fullmatch(given)
        return words[alone[1]] if alone else text(given)

    arguments = {key: value(given) for key, given in item.arguments.items()}
    call = f"{item.generator} {json.dumps(arguments, sort_keys=True)}" if arguments else item.generator
    return Module(name=text(name), call=call, units=item.units, peak=item.peak)
