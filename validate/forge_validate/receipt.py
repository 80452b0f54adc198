"""The receipt: what was judged, how, and with which outcome. `results.json`, sealed like the build record."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from forge_core.errors import IntegrityError, UsageError
from forge_core.files import write_text
from forge_core.model import Deviation, Frozen, ImageRef, Sha256, canonical_sha256
from forge_validate.checks import CheckResult
from forge_validate.verdict import Verdict

SCHEMA_VERSION = 1
FILE_NAME = "results.json"


class Subject(Frozen):
    """What the verdict is about: a good image with other flags is another thing."""

    image: ImageRef
    model: str
    model_revision: Sha256
    serving: Sha256
    suite: Sha256
    answers: Sha256
    policy: Sha256


class Timings(Frozen):
    """Seconds."""

    pull: float
    boot: float
    """From the container's creation to readiness."""
    probe: float
    phases: dict[str, float]
    """Of the boot, by name."""


class Receipt(Frozen):
    """One validation."""

    schema_version: Literal[1] = 1
    profile: str
    kind: Literal["rehearsal", "production"]
    finished: datetime
    forge_version: str
    target: Literal["recorded"]
    record: Sha256
    """Seal of the build record."""
    subject: Subject
    arguments: tuple[str, ...]
    """The server's command line, as it was started."""
    engine: str
    """Version of the container engine."""
    deviations: tuple[Deviation, ...]
    results: tuple[CheckResult, ...]
    verdict: Verdict
    timings: Timings

    @property
    def sha256(self) -> str:
        """The seal: sha256 (hex) of the canonical JSON."""
        return self.content_sha256()


def save(receipt: Receipt, path: Path) -> None:
    """Write the receipt with its seal, atomically."""
    write_text(path, dumps(receipt))


def dumps(receipt: Receipt) -> str:
    """The receipt as it is written."""
    data = receipt.model_dump(mode="json")
    return json.dumps({"seal": canonical_sha256(data)} | data, indent=2, ensure_ascii=False) + "\n"


def load(path: Path) -> Receipt:
    """Read a receipt.

    Raises UsageError (2) when there is none or it is malformed, IntegrityError (5) when it was edited.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"no receipt at {path}", hint="run `nox -s validate -- --profile NAME` first") from error
    except ValueError as error:
        raise IntegrityError(f"{path}: not JSON: {error}", hint="validate again") from error
    seal = data.pop("seal", None) if isinstance(data, dict) else None
    if seal != canonical_sha256(data):
        raise IntegrityError(f"{path} was changed after it was sealed", hint="validate again")
    try:
        return Receipt.model_validate(data)
    except ValidationError as error:
        raise UsageError(f"{path}: not a receipt of this version: {error}") from error
