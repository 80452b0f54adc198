"""The bar: one file that says what was built, of what and by what."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from forge_core.errors import IntegrityError, UsageError
from forge_core.files import write_text
from forge_core.model import (
    Architecture,
    Deviation,
    Frozen,
    GitOid,
    ImageRef,
    ModelRef,
    Sha256,
    canonical_sha256,
)

SCHEMA_VERSION = 1
FILE_NAME = "build-record.json"


class RecordedInput(Frozen):
    """One file that entered the build."""

    kind: Literal["wheel", "deb"]
    use: str
    """What it entered: `runtime`, `builder`, `model` or a source's name."""
    name: str
    version: str
    sha256: Sha256


class RecordedSource(Frozen):
    """A source tree and what our patches made of it."""

    name: str
    version: str
    tree: GitOid
    patched_tree: GitOid
    series: str | None
    patches: tuple[str, ...]


class RecordedObject(Frozen):
    """One shared object of a built wheel."""

    path: str
    size: int
    """Bytes."""
    cubins: dict[str, int]
    """Architecture -> number of cubins."""
    ptx: tuple[str, ...]
    needed: tuple[str, ...]


class RecordedWheel(Frozen):
    """A wheel built here."""

    file: str
    sha256: Sha256
    size: int
    """Bytes."""
    objects: tuple[RecordedObject, ...]
    cached: bool
    """Reused: an equal key was compiled before."""


class RecordedBase(Frozen):
    """A base: a root file system's sha256, or an image's digest."""

    use: Literal["builder", "runtime"]
    identity: str
    size: int
    """Bytes of the root file system archive; 0 for a registry image."""


class RecordedStage(Frozen):
    """How long a stage took."""

    name: str
    seconds: float
    cached: bool = False


class BuildRecord(Frozen):
    """What was built."""

    schema_version: Literal[1] = 1
    profile: str
    kind: Literal["rehearsal", "production"]
    finished: datetime
    forge_version: str
    forge_commit: str | None
    """Commit of this repository; none outside a checkout."""
    manifest: Sha256
    lock: Sha256
    image: ImageRef
    """Where the image lies in staging."""
    image_config: str
    """Digest of the image's config (the classic store's image id)."""
    image_size: int
    """Compressed bytes, as a registry stores them."""
    architectures: tuple[Architecture, ...]
    """Cubin architectures of the built wheels' device code."""
    model: ModelRef | None
    bases: tuple[RecordedBase, ...]
    sources: tuple[RecordedSource, ...]
    wheels: tuple[RecordedWheel, ...]
    inputs: tuple[RecordedInput, ...]
    image_check: dict[str, str]
    """Check -> what it saw."""
    deviations: tuple[Deviation, ...]
    tools: dict[str, str]
    """Tool -> version."""
    stages: tuple[RecordedStage, ...]

    @property
    def sha256(self) -> str:
        """The seal: sha256 (hex) of the canonical JSON."""
        return self.content_sha256()


def save(record: BuildRecord, path: Path) -> None:
    """Write the record with its seal, atomically; the last act of a build."""
    data = record.model_dump(mode="json")
    write_text(path, json.dumps({"seal": canonical_sha256(data)} | data, indent=2, ensure_ascii=False) + "\n")


def load(path: Path) -> BuildRecord:
    """Read a record.

    Raises UsageError (2) when there is none or it is malformed, IntegrityError (5) when it was edited.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(
            f"no build record at {path}", hint="run `nox -s build -- --profile NAME` first; a failed build leaves none"
        ) from error
    except ValueError as error:
        raise IntegrityError(f"{path}: not JSON: {error}", hint="build again") from error
    seal = data.pop("seal", None) if isinstance(data, dict) else None
    if seal != canonical_sha256(data):
        raise IntegrityError(f"{path} was changed after it was sealed", hint="build again; a record is never edited")
    try:
        return BuildRecord.model_validate(data)
    except ValidationError as error:
        raise UsageError(f"{path}: not a build record of this version: {error}") from error
