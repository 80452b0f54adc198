"""What was asked: a repetition that stands there may stand in the reply."""

from __future__ import annotations

from typing import Any

_FIELDS = ("messages", "prompt", "text", "tools")


def asked_text(body: Any) -> str:
    """Every text of a request's body that the model sees, one after the other; empty for a body of another shape."""
    found: list[str] = []
    waiting: list[Any] = [body[name] for name in reversed(_FIELDS) if name in body] if isinstance(body, dict) else []
    while waiting:
        here = waiting.pop()
        if isinstance(here, str):
            found.append(here)
        elif isinstance(here, dict):
            waiting += reversed(here.values())
        elif isinstance(here, list):
            waiting += reversed(here)
    return "\n".join(found)
