"""What every recipe of a built wheel offers: what to run in the builder, and how to pack what came out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from forge_build.manifest import BuiltWheel, Manifest
from forge_build.patch import PatchedTree
from forge_core.errors import UsageError

SOURCE = "/forge/src"
"""Where the patched tree lies in the builder: it is part of the compiled bytes, so it never changes."""
DEPENDENCIES = "/forge/dependencies"
"""Where the trees lie that the source's build takes by name: one folder each, named as in `tree.dependencies`."""
OUTPUT = "/forge/out"
"""Where the script leaves its results."""


@dataclass(frozen=True)
class Order:
    """One wheel to build."""

    name: str
    """Key in the manifest's `wheels`, which is the distribution's name."""
    spec: BuiltWheel
    manifest: Manifest
    tree: PatchedTree
    subset: str | None = None
    """The part of it to compile for a quick look, by the recipe's name; none: all."""

    @property
    def platform(self) -> str:
        """Platform tag: the C library is the builder's."""
        architecture, platform = self.manifest.target.platform.split("-", 1)
        return f"{platform}_{architecture}"


@dataclass(frozen=True)
class Plan:
    """What runs in the builder."""

    script: Path
    """Of `build/inside`; called with PLAN and OUT."""
    arguments: Mapping[str, Any]
    """PLAN, beside `scheduler`."""
    environment: Mapping[str, str]
    """On top of the image's own; nothing of the caller's gets in."""
    outputs: tuple[str, ...]
    """Files below OUT that must come out, beside `tools.json`."""
    units: int
    """How many files compile."""
    peak: int
    """Bytes that the largest unit is known to need; said before it starts when there is less."""
    version: str
    """Of the wheel."""
    tag: str
    """Compatibility tag of the wheel: Python, ABI, platform."""


def labelled(order: Order) -> str:
    """The wheel's version: the tree's; a subset adds a local part, so that nobody takes the one for the other.

    SGLang compares versions with `>=`, FlashInfer by their beginning: both accept it. Raises UsageError where the tree's own
    version has a local part.
    """
    if order.subset is None:
        return order.tree.version
    if "+" in order.tree.version:
        raise UsageError(
            f"{order.tree.name} {order.tree.version}: a version with a local part leaves no room for a label"
        )
    names = ".".join(f"sm{architecture.replace('.', '').rstrip('af')}" for architecture in order.spec.architectures)
    return f"{order.tree.version}+{names}.subset.{order.subset}"


class Recipe(Protocol):
    """A way from a patched tree to a wheel."""

    sources: tuple[Path, ...]
    """Own files that decide what the packed bytes are; they are part of the wheel's key."""
    subsets: tuple[str, ...]
    """Parts that it can compile alone; `Order.subset` is one of them or none."""

    def narrowed(self, spec: BuiltWheel, where: str) -> BuiltWheel:
        """The wheel's section of the manifest when a subset is compiled; `where` it stands, for what is wrong with it."""
        ...

    def plan(self, order: Order) -> Plan:
        """What to run; raises UsageError when the manifest asks for what the recipe does not know."""
        ...

    def pack(self, order: Order, results: Path, tools: Mapping[str, str], target: Path) -> None:
        """Pack `results` (the outputs below it) into the wheel `target`; `tools` are the versions that compiled them."""
        ...
