"""An exchange: one request and what came back, as recorded. Probing writes them, judging reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from forge_core.errors import UsageError
from forge_core.files import write_text
from forge_core.model import Frozen
from forge_core.redact import MASK, redact

_SECRET = re.compile(r"(?i)api_key$|password$|^authorization$")


class Request(Frozen):
    """What was sent."""

    method: Literal["GET", "POST", "OPTIONS"]
    path: str
    body: Any = None
    """The JSON body; none for a GET."""


class Exchange(Frozen):
    """One request and its response."""

    name: str
    """Of the case; a path (`offers/metrics`) for what is asked beside the cases."""
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
    began: float | None = None
    """When it was sent, in seconds since its wave began; this and the next two are of families only."""
    first: float | None = None
    """When the first byte of the body came, on the same clock."""
    ended: float | None = None
    """When the last one came, or it was given up."""
    aborted: bool = False
    """The client hung up on purpose: what was read until then is no whole answer."""


def masked(exchange: Exchange, secrets: Sequence[str] = ()) -> Exchange:
    """The exchange with every secret masked: known values, what looks like one, and what a server calls one."""
    return Exchange.model_validate(_masked(exchange.model_dump(), tuple(secrets)))


def save(exchange: Exchange, folder: Path) -> Path:
    """Write `folder/<name>.json` atomically, each `/` of the name as `__`; returns the path."""
    path = folder / f"{exchange.name.replace('/', '__')}.json"
    write_text(path, json.dumps(exchange.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n")
    return path


def _masked(value: Any, secrets: tuple[str, ...], name: str = "") -> Any:
    """Text by text, so that what a model said stays as it was and the JSON stays whole."""
    if isinstance(value, dict):
        return {key: _masked(item, secrets, key) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_masked(item, secrets) for item in value]
    if isinstance(value, str):
        # A server tells its own key in /server_info.
        return MASK if value and _SECRET.search(name) else redact(value, secrets)
    return value


def load(path: Path) -> Exchange:
    """Read a recorded exchange; raises UsageError."""
    try:
        return Exchange.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"no exchange at {path}") from error
    except (ValidationError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not a recorded exchange: {error}") from error
