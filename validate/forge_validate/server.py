"""A server under test, whatever stands behind it: where it listens, what it offers, whether it still lives."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from forge_validate.offers import UNSEEN, Offers


@dataclass(frozen=True)
class Server:
    """A server that answered."""

    url: str
    """Without a trailing slash and without `/v1`."""
    served: str
    """The name it serves the model under."""
    api_key: str | None = None
    offers: Offers = UNSEEN
    container: str | None = None
    log: Path | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each phase of the start."""
    died: Callable[[], str | None] = lambda: None
    """Why it no longer lives; none while it does."""
    memory: Callable[[], int | None] | None = None
    """Bytes that its processes hold, as its host counts them; none: cannot be read from here."""

    gpu_memory: Callable[[], int | None] | None = None
    """Bytes that all its GPUs hold, as their driver tells it; none: it has none, or they cannot be read from here."""

    @property
    def local(self) -> bool:
        """Whether it listens on this machine's loopback: then no proxy of the environment may stand in between."""
        host = urlsplit(self.url).hostname or ""
        try:
            return ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host == "localhost"
