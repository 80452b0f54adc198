"""The receipt: what was judged, how, and with which outcome. `results.json`, sealed like the build record."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import Field

from forge_core import sealed
from forge_core.model import Deviation, Frozen, ImageRef, Sha256
from forge_validate.checks import CheckResult
from forge_validate.offers import Seen
from forge_validate.verdict import Verdict

SCHEMA_VERSION = 1
FILE_NAME = "results.json"


class Judged(Frozen):
    """What every verdict is about: a model, and what it was asked, by which rules."""

    model: str
    suite: Sha256
    answers: Sha256
    policy: Sha256
    golden: Sha256 | None = None
    """None: the suite had no use for one, or there was none."""


class Subject(Judged):
    """A verdict on an image: a good image with other flags is another thing."""

    image: ImageRef
    model_revision: Sha256
    serving: Sha256

    @property
    def name(self) -> str:
        """What was judged."""
        return str(self.image)


class ServerSubject(Judged):
    """A verdict on a server that somebody else started; `model` is what it calls the model."""

    url: str
    software: str | None
    """As it tells itself; nothing proves it."""

    @property
    def name(self) -> str:
        """What was judged."""
        return self.url


class Timings(Frozen):
    """Seconds."""

    pull: float
    boot: float
    """From the container's creation to readiness."""
    probe: float
    phases: dict[str, float]
    """Of the boot, by name."""
    families: dict[str, float] = Field(default_factory=dict)
    """Of asking, by family."""


class Receipt(Frozen):
    """One validation."""

    schema_version: Literal[1] = 1
    profile: str
    kind: Literal["rehearsal", "production"] | None = None
    """The record's; none without one."""
    finished: datetime
    forge_version: str
    target: Literal["recorded", "image", "url"]
    """Only `recorded` is ever promoted."""
    record: Sha256 | None = None
    """Seal of the build record; none for what has none."""
    subject: Subject | ServerSubject
    arguments: tuple[str, ...]
    """The server's command line, as it was started; empty for one that we did not start."""
    resolved: dict[str, str]
    """What the server really ran with, as it and its log tell: backends, number formats, sizes."""
    engine: str | None = None
    """Version of the container engine; none: there was none in between."""
    gpus: tuple[str, ...] = ()
    """The GPUs the server ran on; none: it ran without."""
    offers: tuple[Seen, ...] = ()
    """What the server offers and what it does not, with what shows it."""
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
