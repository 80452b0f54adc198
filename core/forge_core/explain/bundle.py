"""A redacted report of a log, for people who cannot have the log: finding, markers, the lines around the cause, the end."""

from __future__ import annotations

import json
import platform
import re
from collections import deque
from importlib import metadata
from pathlib import Path

from forge_core.explain.model import Evidence, Reading
from forge_core.explain.signatures import book
from forge_core.files import write_text
from forge_core.redact import redact

_AROUND = 20
_WIDTH = 2000
_NAMES = (
    # Addresses but loopback's, and who and where: a report is read by strangers.
    (re.compile(r"(?<![\d.])(?!127\.|0\.0\.0\.0)(?:\d{1,3}\.){3}\d{1,3}(?![\d.])"), "ADDRESS"),
    (re.compile(r"(?<![0-9a-fA-F:.])(?:[0-9a-fA-F]{1,4}:){4,7}[0-9a-fA-F]{1,4}(?![0-9a-fA-F:])"), "ADDRESS"),
    (re.compile(r"(?<![\w/])(/(?:home|Users)/)[^/\s'\":]+"), r"\1USER"),
    (re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"), "MAIL"),
)


def write(target: Path, reading: Reading, evidence: Evidence, log: Path | None) -> None:
    """Write the report, aside and then renamed. `log` is read again for the lines around the cause; none: it was a pipe."""
    line = reading.finding.line if reading.finding else None
    content = {
        "schema": 1,
        "program": f"sm120-forge {_version()}",
        "signatures": book().data.content_sha256(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "reading": json.loads(reading.model_dump_json()),
        "evidence": evidence.model_dump(mode="json"),
        "around": _around(log, line) if log is not None and line is not None else [],
        "last": reading.last,
    }
    write_text(target, json.dumps(_private(content), indent=1, ensure_ascii=False) + "\n")


def _around(log: Path, line: int) -> list[str]:
    """The cause line with what stands before and after it, numbered."""
    found: deque[str] = deque(maxlen=2 * _AROUND + 1)
    with log.open("rb") as stream:
        number = 1
        # In pieces: a line may be longer than memory.
        while number <= line + _AROUND and (piece := stream.readline(_WIDTH)):
            if number >= line - _AROUND:
                found.append(f"{number}: {redact(piece.decode(errors='replace').rstrip())}")
            while not piece.endswith(b"\n") and (piece := stream.readline(1 << 16)):
                pass
            number += 1
    return list(found)


def _private(value: object) -> object:
    """Every text, without secrets, addresses and names."""
    if isinstance(value, str):
        text = redact(value)
        for pattern, instead in _NAMES:
            text = pattern.sub(instead, text)
        return text
    if isinstance(value, dict):
        return {key: _private(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_private(one) for one in value]
    return value


def _version() -> str:
    try:
        return metadata.version("sm120-forge")
    except metadata.PackageNotFoundError:
        return "unknown"
