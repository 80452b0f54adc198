"""An exchange: one request and what came back, as recorded. Probing writes them, judging reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from forge_core.errors import UsageError
from forge_core.files import write_text
from forge_core.model import Frozen
from forge_core.redact import redact


class Request(Frozen):
    """What was sent."""

    method: Literal["GET", "POST"]
    path: str
    body: Any = None
    """The JSON body; none for a GET."""


class Exchange(Frozen):
    """One request and its response."""

    name: str
    request: Request
    status: int | None
    """HTTP status; none when no response came."""
    headers: dict[str, str] = Field(default_factory=dict)
    seconds: float
    """From the first byte sent to the last byte read."""
    response: Any = None
    """The body, if it was JSON."""
    text: str | None = None
    """The body, if it was anything else, for example an event stream."""
    error: str | None = None
    """Why no response came: a timeout, a refused connection, a server that died, a case that was not asked."""


def save(exchange: Exchange, folder: Path) -> Path:
    """Write `folder/<name>.json` atomically, secrets masked; returns the path."""
    path = folder / f"{exchange.name}.json"
    write_text(path, redact(json.dumps(exchange.model_dump(mode="json"), indent=1, ensure_ascii=False)) + "\n")
    return path


def load(path: Path) -> Exchange:
    """Read a recorded exchange; raises UsageError."""
    try:
        return Exchange.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"no exchange at {path}") from error
    except (ValidationError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not a recorded exchange: {error}") from error
