"""The bar: one file that says what was built, of what and by what."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Literal

from forge_core import sealed
from forge_core.model import (
    Architecture,
    Deviation,
    Frozen,
    GitOid,
    ImageRef,
    ModelRef,
    Sha256,
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


class RecordedDependency(Frozen):
    """A tree that a source's build took by name, of a commit of another repository."""

    name: str
    commit: GitOid
    tree: GitOid
    """Git tree id of the whole commit."""
    taken: GitOid
    """Git tree id of what of it entered the build."""


class RecordedSource(Frozen):
    """A source tree and what our patches made of it."""

    name: str
    version: str
    tree: GitOid
    patched_tree: GitOid
    series: str | None
    patches: tuple[str, ...]
    commit: GitOid | None = None
    """Of the repository, for a source from git."""
    dependencies: tuple[RecordedDependency, ...] = ()


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
    sbom: Sha256 | None = None
    """Sha256 of the bill of materials beside the record."""
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
    sealed.save(record, path)


def load(path: Path) -> BuildRecord:
    """Read a record.

    Raises UsageError (2) when there is none or it is malformed, IntegrityError (5) when it was edited.
    """
    return sealed.load(BuildRecord, path, what="build record", origin="`nox -s build -- --profile NAME`")
