"""Logs for tests: the facts, a healthy SGLang log of any length made of real lines, and lines put between them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "testdata" / "logs"
BOOT = 66
"""Lines of the healthy log until the server is ready; what follows is repeated."""


@cache
def facts() -> tuple[dict[str, Any], ...]:
    """One sample of each kind with the class it should get."""
    return tuple(json.loads((DATA / "log-lines.json").read_text(encoding="utf-8"))["samples"])


@cache
def _healthy() -> tuple[str, ...]:
    return tuple((DATA / "healthy-cpu.log").read_text(encoding="utf-8").splitlines())


def healthy(lines: int) -> list[str]:
    """A healthy log of so many lines: a real boot, then its serving lines again and again."""
    boot, serving = list(_healthy()[:BOOT]), list(_healthy()[BOOT:])
    return (boot + serving * (max(0, lines - BOOT) // len(serving) + 1))[:lines]


def joined(lines: list[str]) -> bytes:
    """As bytes of a file."""
    return ("\n".join(lines) + "\n").encode()
