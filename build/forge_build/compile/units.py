"""What the recipes know how to compile: `units.yaml`, read once and checked."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field, StringConstraints, TypeAdapter

from forge_build.manifest import read_yaml
from forge_core.errors import UsageError
from forge_core.model import Frozen


class Units(Frozen):
    """One module of a recipe."""

    generator: Annotated[str, StringConstraints(pattern=r"^[\w.]+:\w+$")]
    """`package.module:function`, called inside the builder without arguments."""
    units: Annotated[int, Field(gt=0)]
    """How many files it compiles."""
    peak: Annotated[int, Field(gt=0)]
    """Bytes one compiler needs at most."""


@cache
def _table() -> dict[str, dict[str, Units]]:
    data = read_yaml(Path(__file__).with_name("units.yaml"))
    return TypeAdapter(dict[str, dict[str, Units]]).validate_python(data)


def units(recipe: str, modules: tuple[str, ...], where: str) -> dict[str, Units]:
    """The named modules of a recipe; raises UsageError naming every unknown one at `where` in the manifest."""
    known = _table().get(recipe, {})
    if not modules:
        raise UsageError(f"{where}: no module is named", hint=f"known: {', '.join(known)}")
    if unknown := [name for name in modules if name not in known]:
        raise UsageError(
            f"{where}: the recipe {recipe!r} knows no {', '.join(map(repr, unknown))}",
            hint=f"known: {', '.join(known)}; units.yaml of forge_build.compile names generators",
        )
    return {name: known[name] for name in sorted(set(modules))}
