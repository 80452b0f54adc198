"""What a server really runs with: told by itself and by its log, not by the flags it was given.

`auto` becomes a name only at run time, and a backend that cannot be had is replaced by another with one line in the
log. In SGLang `/server_info` has the arguments on top and what the scheduler made of them in `internal_states`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_INTERESTING = re.compile(r"backend|runner|dtype|quantization$|^(?:tp|pp|dp|ep)_size$|^page_size$|^version$")
_SECRET = re.compile(r"key|token|password|secret")
_UNSET = (None, "", "none")


def told(info: Any) -> dict[str, Any]:
    """The flat settings of a `/server_info` body, what the scheduler made of them above what was asked for."""
    if not isinstance(info, dict):
        return {}
    states = info.get("internal_states")
    inner = states[0] if isinstance(states, list) and states and isinstance(states[0], dict) else {}
    return {name: value for name, value in (info | inner).items() if not isinstance(value, (dict, list))}


def resolved(info: Any, lines: Iterable[str], patterns: Mapping[str, str]) -> dict[str, str]:
    """Backends, number formats and sizes, by name; what the log tells (`patterns`: name -> one group) as `log.NAME`."""
    found = {
        name: str(value)
        for name, value in told(info).items()
        if _INTERESTING.search(name) and not _SECRET.search(name) and value not in _UNSET
    }
    compiled = {name: re.compile(pattern) for name, pattern in patterns.items()}
    for line in lines:
        for name, pattern in compiled.items():
            if f"log.{name}" not in found and (match := pattern.search(line)) is not None:
                found[f"log.{name}"] = match.group(1)
    return dict(sorted(found.items()))


def differing(info: Any, intended: Mapping[str, str | int | float | bool]) -> tuple[tuple[str, str, str], ...]:
    """The settings that the server does not run with: (name, intended, told); one it does not tell is told as `?`."""
    settings = told(info)
    return tuple(
        (name, str(wanted), str(settings.get(name, "?")))
        for name, wanted in intended.items()
        if name not in settings or not _equal(settings[name], wanted)
    )


def _equal(value: Any, wanted: str | float | bool) -> bool:
    if isinstance(value, bool) or isinstance(wanted, bool):
        return value is wanted
    if isinstance(value, (int, float)):
        try:
            return float(wanted) == float(value)
        except ValueError:
            return False
    return str(value) == str(wanted)
