"""A server under test, whatever stands behind it: where it listens, what it offers, whether it still lives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Offer = Literal["container", "log"]


@dataclass(frozen=True)
class Server:
    """A server that answered."""

    url: str
    """Without a trailing slash and without `/v1`."""
    served: str
    """The name it serves the model under."""
    api_key: str | None = None
    offers: frozenset[Offer] = frozenset()
    container: str | None = None
    log: Path | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase of the start."""
    died: Callable[[], str | None] = lambda: None
    """Why it no longer lives; none while it does."""
