"""Secrets never reach a log, a record or an image: one function every line of output passes through."""

from __future__ import annotations

import re
from collections.abc import Iterable

MASK = "***"

# SGLang prints its whole command line and its ServerArgs at start, `--api-key` in clear: its spellings, docker's and
# those of package indexes.
_PATTERNS = (
    re.compile(r"(?i)(--?(?:admin-)?api-key(?:=|\s+))(['\"]?)[^\s'\",)]+"),
    re.compile(r"(?i)((?:admin_)?api_key['\"]?\s*[=:]\s*)(['\"])(?!None)[^'\"]*"),
    re.compile(r"(?i)(authorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic)\s+)()[^\s'\",]+"),
    re.compile(r"(?i)((?:password|passwd|secret)[a-z0-9_]*['\"]?\s*[=:]\s*)(['\"])[^'\"]{4,}"),
    # Not every `token`: logprobs carry `"token": " capital"`, ServerArgs has tokenizer_path.
    re.compile(
        r"(?i)((?:access|auth|bearer|github|hf|identity|refresh|session)_?token['\"]?\s*[=:]\s*)(['\"]?)[^\s'\"]{4,}"
    ),
    re.compile(r"(://[^/\s:@]+:)()[^/\s@]+(?=@)"),
)


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Return `text` with known secret values and secret-looking assignments replaced by `***`."""
    for secret in secrets:
        if secret:
            text = text.replace(secret, MASK)
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\g<1>\g<2>{MASK}", text)
    return text
