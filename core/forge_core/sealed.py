"""Sealed files: JSON whose first field is the sha256 of all the others, so that an edited one is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from forge_core.errors import IntegrityError, UsageError
from forge_core.files import write_text
from forge_core.model import Frozen, canonical_sha256

Sealed = TypeVar("Sealed", bound=Frozen)


def dumps(value: Frozen) -> str:
    """The value as it is written, its seal first."""
    data = value.model_dump(mode="json")
    return json.dumps({"seal": canonical_sha256(data)} | data, indent=2, ensure_ascii=False) + "\n"


def save(value: Frozen, path: Path) -> None:
    """Write the value with its seal, atomically."""
    write_text(path, dumps(value))


def load(kind: type[Sealed], path: Path, *, what: str, origin: str) -> Sealed:
    """Read a sealed file; `what` it is and which command made it (`origin`) are for the messages.

    Raises UsageError (2) when there is none or it is of another version, IntegrityError (5) when it was edited.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"no {what} at {path}", hint=f"run {origin} first; a failed run leaves none") from error
    except ValueError as error:
        raise IntegrityError(f"{path}: not JSON: {error}", hint=f"run {origin} again") from error
    seal = data.pop("seal", None) if isinstance(data, dict) else None
    if seal != canonical_sha256(data):
        raise IntegrityError(f"{path} was changed after it was sealed", hint=f"run {origin} again; it is never edited")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise UsageError(f"{path}: not a {what} of this version: {error}", hint=f"run {origin} again") from error
