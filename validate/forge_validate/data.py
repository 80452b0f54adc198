"""The data inside this package: servings, suites, policies, answers and what the families ask, by name.

`extends: NAME`, one level, replaces whole sections of the file it names.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any, Literal, TypeVar

import yaml
from pydantic import ValidationError

from forge_core.errors import UsageError
from forge_core.model import Frozen

Kind = Literal["serving", "suites", "policies", "answers", "families"]
T = TypeVar("T", bound=Frozen)


def names(kind: Kind) -> tuple[str, ...]:
    """The names for which there is a file of this kind, sorted."""
    return tuple(
        sorted(p.name.removesuffix(".yaml") for p in (files(__package__) / kind).iterdir() if _is_yaml(p.name))
    )


def load(kind: Kind, name: str, model: type[T]) -> T:
    """Read `<kind>/<name>.yaml` as `model`; raises UsageError naming every mistake with its path in the file."""
    data = _read(kind, name)
    if isinstance(data, dict) and (parent := data.pop("extends", None)) is not None:
        base = _read(kind, str(parent))
        if "extends" in base:
            raise UsageError(f"{kind}/{name}.yaml extends {parent}, which extends another: one level only")
        data = base | data
    return parse(f"{kind}/{name}.yaml", data, model)


def parse(where: str, data: Any, model: type[T]) -> T:
    """Validate plain data as `model`; raises UsageError naming every mistake with its path in the data."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        details = tuple(_mistake(item["loc"], item["msg"]) for item in error.errors(include_url=False))
        raise UsageError(f"{where}: {error.error_count()} mistake(s)", details=details) from error


def _read(kind: Kind, name: str) -> Any:
    known = names(kind)
    if name not in known:
        raise UsageError(f"no {kind}/{name}.yaml", hint=f"there are: {', '.join(known) or 'none'}")
    try:
        return yaml.safe_load((files(__package__) / kind / f"{name}.yaml").read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UsageError(f"{kind}/{name}.yaml: not YAML: {error}") from error


def _mistake(place: tuple[int | str, ...], message: str) -> str:
    return f"{'.'.join(map(str, place)) or '(top level)'}: {message.removeprefix('Value error, ')}"


def _is_yaml(name: str) -> bool:
    return name.endswith(".yaml")
