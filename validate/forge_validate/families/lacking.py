"""What a server tells of the parsers it runs with: one without a parser is not wrong, and what needs it is not measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal

from forge_validate.exchange import Exchange
from forge_validate.resolved import told

Parser = Literal["tool_call_parser", "reasoning_parser"]

# vLLM names the flags that it lacks (0.32: `"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser`).
_FLAGS = ("tool-call-parser", "enable-auto-tool-choice", "reasoning-parser")


def without(info: Exchange | None, parser: Parser) -> bool:
    """Whether an exchange with /server_info says that this parser was not asked for."""
    settings = told(info.response) if info is not None and info.status == 200 else {}
    return parser in settings and settings[parser] in (None, "")


def refused_for_parser(exchange: Exchange) -> bool:
    """Whether the server refused a request because it runs without a parser."""
    if exchange.status is None or not 400 <= exchange.status < 500:
        return False
    said = json.dumps(exchange.response) if exchange.response is not None else exchange.text or ""
    return any(flag in said for flag in _FLAGS)


def seen(exchanges: Mapping[str, Exchange], prefix: str, mark: str) -> bool:
    """Whether any answer below a name has this JSON key with a value."""
    for name, one in exchanges.items():
        if name.startswith(prefix) and one.status == 200:
            text = one.text or json.dumps(one.response)
            if f'"{mark}"' in text:
                return True
    return False
