"""Secrets never reach a log, a record or an image: one function every line of output passes through."""

from __future__ import annotations

import re
from collections.abc import Iterable
from urllib.parse import quote

MASK = "***"

# Names whose value is a secret. `token` alone is not among them: a language model's `pad_token`, `"token": " Paris"` and
# `max_total_tokens` are ordinary text, so tokens are named by whose they are, or known by the shape of their value.
_NAME = (
    r"(?:[a-z0-9]+[_-])*"
    r"(?:api[_-]?key|password|passwd|passphrase|secret(?:[_-](?:access[_-])?key)?|access[_-]key|private[_-]key"
    r"|(?:hf|hub|auth|access|refresh|api|bearer|github|gh|gitlab|job|pypi|registry|identity|session|security)[_-]?token)"
)
_BEGIN = r"(?<![a-z0-9])"
# What stands for no value, or for a type in a line of source that a traceback shows.
_NO_VALUE = r"(?!(?:none|null|true|false|str|bytes|optional)\b|\*\*\*)"

_PATTERNS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        # On a command line, or as Python prints a list of arguments: `--api-key X`, `--api-key=X`, `'--api-key', 'X'`.
        rf"(--?(?:{_NAME}|token)(?:=|['\"]?,?\s+))(['\"])(?:(?!\2).)+",
        rf"(--?(?:{_NAME}|token)(?:=|\s+))()(?!--?[a-z]){_NO_VALUE}[^\s'\",)]+",
        # Assigned with quotes: Python's repr, JSON, JSON inside JSON. SGLang prints its ServerArgs so at start.
        rf"({_BEGIN}{_NAME}\\?['\"]?\s*[=:]\s*b?\\?)(['\"])(?:(?!\\?\2).)+",
        # Assigned without: environment, query strings, YAML, headers.
        rf"({_BEGIN}{_NAME}\s*(?:=\s*|:\s+))(){_NO_VALUE}[^\s'\",;&)\]}}]+",
        r"((?:proxy-)?authorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic|token)\s+)()[^\s'\",]+",
        r"(\bbearer\s+)()[a-z0-9._~+/=-]{16,}",
        # docker's own config.
        r"(\"auth\"\s*:\s*)(\")[^\"]+",
        # Credentials in an address; a password may hold an @.
        r"(://[^/\s:@'\"]*:)()[^/\s'\"]+(?=@)",
        r"(://)()[^/\s:@'\"]{20,}(?=@)",
        # By shape, under any name: Hugging Face, OpenAI, GitHub, GitLab, AWS, PyPI, JSON web tokens.
        r"(?<![a-z0-9])()()(?:hf_[a-z0-9]{20,}|sk-[a-z0-9_-]{20,}|gh[pousr]_[a-z0-9]{30,}|github_pat_\w{20,}"
        r"|glpat-[\w-]{16,}|AKIA[0-9A-Z]{16}|pypi-[\w-]{40,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)",
    )
)


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """Return `text` with known secret values and what looks like a secret replaced by `***`.

    Known values are replaced as they are and as an address spells them.
    """
    # The longest first: one secret may be part of another.
    for secret in sorted({s for s in secrets if s}, key=len, reverse=True):
        text = text.replace(secret, MASK).replace(quote(secret, safe=""), MASK)
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\g<1>\g<2>{MASK}", text)
    return text
