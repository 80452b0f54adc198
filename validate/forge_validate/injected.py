"""What is put into a server's container beside its image, to make it wrong on purpose: nothing in any validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Injected:
    """Mounts and variables of a server under test that is not left as it is; each is read-only in the container."""

    mounts: tuple[tuple[Path, str], ...] = ()
    """Folder of this host -> path in the container."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Stands before the serving's."""


NOTHING = Injected()
"""As every validation starts it."""
