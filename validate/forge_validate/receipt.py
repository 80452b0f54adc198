"""The receipt: what was judged, how, and with which outcome. `results.json`, sealed like the build record."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Literal

from forge_core import sealed
from forge_core.model import Deviation, Frozen, ImageRef, Sha256
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
    resolved: dict[str, str]
    """What the server really ran with, as it and its log tell: backends, number formats, sizes."""
    engine: str
    """Version of the container engine."""
    gpus: tuple[str, ...] = ()
    """The GPUs the server ran on; none: it ran without."""
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
    sealed.save(receipt, path)


def dumps(receipt: Receipt) -> str:
    """The receipt as it is written."""
    return sealed.dumps(receipt)


def load(path: Path) -> Receipt:
    """Read a receipt.

    Raises UsageError (2) when there is none or it is malformed, IntegrityError (5) when it was edited.
    """
    return sealed.load(Receipt, path, what="receipt", origin="`nox -s validate -- --profile NAME`")
