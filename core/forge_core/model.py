"""Values that both sides of the bar need: frozen, closed, with the units in their fields' descriptions."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""Lower-case hex digest of the bytes, without a prefix."""

Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
"""What a registry pulls by: the sha256 of a manifest, with its prefix."""

GitOid = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
"""A full git object id (commit or tree)."""

Architecture = Annotated[str, StringConstraints(pattern=r"^sm_[0-9]{2,3}[af]?$")]
"""A cubin architecture as cuobjdump prints it, for example `sm_120a`."""


class Frozen(BaseModel):
    """Base of every value: immutable, and closed against unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def content_sha256(self) -> str:
        """Sha256 (hex) of this value's canonical JSON: sorted keys, no spaces, UTF-8."""
        return canonical_sha256(self.model_dump(mode="json"))


class ImageRef(Frozen):
    """An image in a registry, by digest; a tag is never part of its identity."""

    repository: str
    """Host, optional port and path, for example `127.0.0.1:5000/sm120-forge/rehearsal`."""
    digest: Digest

    @field_validator("repository")
    @classmethod
    def _without_tag(cls, text: str) -> str:
        if not text or ":" in text.rsplit("/", 1)[-1]:
            raise ValueError(f"{text!r} is no repository without a tag")
        return text

    def __str__(self) -> str:
        return f"{self.repository}@{self.digest}"

    @property
    def registry(self) -> str:
        """Host and port of the registry."""
        return self.repository.split("/", 1)[0]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `repository@sha256:...`; a tag before the digest is dropped. Raises ValueError without a digest."""
        repository, separator, digest = text.partition("@")
        if not separator:
            raise ValueError(f"{text!r} has no @sha256: digest")
        folder, slash, last = repository.rpartition("/")
        repository = folder + slash + last.partition(":")[0]
        return cls(repository=repository, digest=digest)


class ModelFile(Frozen):
    """One file of a model folder."""

    path: str
    """Relative to the model folder, with forward slashes."""
    sha256: Sha256
    size: int
    """Bytes."""


class ModelRef(Frozen):
    """A model folder named by its bytes."""

    name: str
    """The name the server reports, for example `SmolLM2-135M-Instruct`."""
    files: tuple[ModelFile, ...]

    @property
    def revision(self) -> str:
        """Sha256 (hex) over the sorted file list: two folders with equal bytes have one revision."""
        return canonical_sha256([f.model_dump(mode="json") for f in sorted(self.files, key=lambda f: f.path)])

    @classmethod
    def of_folder(cls, name: str, folder: Path) -> Self:
        """Hash every regular file below `folder` (seconds per GB); raises FileNotFoundError if it is no folder."""
        if not folder.is_dir():
            raise FileNotFoundError(folder)
        files = tuple(
            ModelFile(path=p.relative_to(folder).as_posix(), sha256=file_sha256(p), size=p.stat().st_size)
            for p in sorted(folder.rglob("*"))
            if p.is_file()
        )
        return cls(name=name, files=files)


class Deviation(Frozen):
    """Anything unusual about a build or a validation; promotion refuses what its policy does not name."""

    kind: Literal[
        "subset",
        "base-moved",
        "dirty-tree",
        "injected-fault",
        "waived-check",
        "bootstrap",
        "other-suite",
        "other-answers",
        "model-differs",
        "unlocked",
        "allowed-conflict",
        "remote-cache",
    ]
    subject: str
    """What deviates, for example a package or a check."""
    detail: str


class Finding(Frozen):
    """One observation about a place: of a check, or of the log classifier."""

    kind: str
    """Machine-readable class, for example `foreign-architecture`."""
    where: str
    message: str
    severity: Literal["info", "warning", "error"] = "error"


def canonical_sha256(value: Any) -> str:
    """Sha256 (hex) of a JSON-able value written with sorted keys and no spaces."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


def file_sha256(path: Path) -> str:
    """Sha256 (hex) of a file's bytes; raises OSError as open() does."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


SchemaVersion = Annotated[int, Field(ge=1)]
