"""Mutants: servers made wrong in one way each, as data; and the rule of what counts as hard."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import yaml
from pydantic import Field, StringConstraints, model_validator

from forge_core.errors import UsageError
from forge_core.model import Frozen
from forge_lab.faults import wire
from forge_validate import data
from forge_validate.diagnose import Kind
from forge_validate.policy import Threshold
from forge_validate.suite import Name

Class = Literal[
    "nan",
    "logits",
    "weights",
    "scales",
    "kv",
    "positions",
    "sampler",
    "crossed",
    "detokenizer",
    "template",
    "parser",
    "protocol",
    "liveness",
    "drift",
]
"""The classes of faults."""

INSIDE = "inside/faults"
"""Below this package: what is mounted into the server's container."""

_T = TypeVar("_T", bound=Frozen)


class Mutant(Frozen):
    """One way to be wrong."""

    name: Name
    of: Annotated[Class, Field(alias="class")]
    where: Literal["inside", "proxy"] = "inside"
    """In the server's own code, or in front of it."""
    kind: str
    """Of the fault, as the switch or the proxy knows it."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    seed: int = 1
    severity: Literal["mild", "medium", "hard"] | None = None
    """As it was meant; what counts is what the held-out probe measures."""
    expects: Annotated[tuple[Kind, ...], Field(min_length=1)]
    """Kinds of wrong that a verdict may name and be right."""
    promise: Annotated[str, StringConstraints(min_length=15)] | None = None
    """The promise of the protocol that it breaks, which makes it hard; none: the held-out probe decides."""
    sample: bool = False
    """Belongs to the small run in CI."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.where == "proxy":
            try:
                wire.known(self.kind)
            except UsageError as error:
                raise ValueError(error.message) from error
            if self.promise is None:
                raise ValueError(f"{self.name}: a fault of the protocol names the promise it breaks")
        return self


class Mutants(Frozen):
    """mutants.yaml."""

    schema_version: Literal[1] = Field(alias="schema")
    mutants: Annotated[tuple[Mutant, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _once(self) -> Self:
        names = [mutant.name for mutant in self.mutants]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"named twice: {', '.join(twice)}")
        return self


class Hardness(Frozen):
    """hardness.yaml: when a mutant is hard, that is must not escape."""

    schema_version: Literal[1] = Field(alias="schema")
    nonfinite: Literal[True]
    share: Threshold
    """Of held-out tokens whose likeliest is another one."""
    promise: Literal[True]


@cache
def mutants() -> tuple[Mutant, ...]:
    """All of them, in the file's order; raises UsageError for a mistake in the file."""
    return _load("mutants", Mutants).mutants


@cache
def hardness() -> Hardness:
    """The rule; raises UsageError for a mistake in the file."""
    return _load("hardness", Hardness)


def named(names: Sequence[str]) -> tuple[Mutant, ...]:
    """Mutants by name or by class; raises UsageError for one that is neither."""
    found = [mutant for mutant in mutants() if mutant.name in names or mutant.of in names]
    known = {mutant.name for mutant in mutants()} | {mutant.of for mutant in mutants()}
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"no mutant or class {unknown[0]!r}", hint="faults/mutants.yaml names them")
    return tuple(found)


def inside() -> Path:
    """The folder that is mounted into the server's container."""
    return Path(str(files(__package__))) / INSIDE


def load(name: str, model: type[_T]) -> _T:
    """`faults/<name>.yaml` of this package as `model`; raises UsageError."""
    return _load(name, model)


def _load(name: str, model: type[_T]) -> _T:
    text = (files(__package__) / "faults" / f"{name}.yaml").read_text(encoding="utf-8")
    try:
        return data.parse(f"faults/{name}.yaml", yaml.safe_load(text), model)
    except yaml.YAMLError as error:
        raise UsageError(f"faults/{name}.yaml: not YAML: {error}") from error
