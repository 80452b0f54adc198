"""The OCI archive that BuildKit writes: which image it holds and how large that is."""

from __future__ import annotations

import hashlib
import json
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forge_core.errors import IntegrityError


@dataclass(frozen=True)
class Image:
    """The runtime image as it came out of BuildKit."""

    archive: Path
    """OCI archive."""
    digest: str
    config_digest: str
    size: int
    """Compressed bytes of config and layers, as a registry stores them."""
    layers: tuple[int, ...]
    """Compressed bytes of each."""
    steps: tuple[str, ...]
    """The instruction that made each layer, as the image's history has it; empty where the history does not say."""
    annotations: Mapping[str, str]
    """Of the manifest."""


def read_archive(archive: Path) -> Image:
    """Digest, config digest and sizes of a single-image OCI archive.

    Raises IntegrityError when it is none, or when manifest or config have other bytes than their digests. Layers are not
    hashed here: whoever pushes them does.
    """
    try:
        with tarfile.open(archive) as tar:
            (entry,) = json.loads(_bytes(tar, "index.json"))["manifests"]
            manifest = _blob(tar, entry["digest"])
            config = manifest["config"]
            layers = tuple(int(layer["size"]) for layer in manifest["layers"])
            history = _blob(tar, config["digest"]).get("history") or ()
            steps = tuple(str(item.get("created_by", "")) for item in history if not item.get("empty_layer"))
            return Image(
                archive,
                entry["digest"],
                config["digest"],
                sum(layers) + int(config["size"]),
                layers,
                steps if len(steps) == len(layers) else ("",) * len(layers),
                dict(manifest.get("annotations") or {}),
            )
    except (tarfile.TarError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise IntegrityError(f"{archive} is no OCI archive of one image: {error!r}") from error


def _blob(tar: tarfile.TarFile, digest: str) -> Any:
    data = _bytes(tar, f"blobs/sha256/{digest.removeprefix('sha256:')}")
    if f"sha256:{hashlib.sha256(data).hexdigest()}" != digest:
        raise ValueError(f"the blob {digest} has other bytes")
    return json.loads(data)


def _bytes(tar: tarfile.TarFile, name: str) -> bytes:
    member = tar.extractfile(name)
    if member is None:
        raise KeyError(name)
    return member.read()
