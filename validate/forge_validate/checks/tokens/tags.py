"""Tags of templates and parsers that belong between engine and parser, and leak into what a user reads."""

from __future__ import annotations

import re

_SPECIAL = re.compile(
    r"<\|[A-Za-z0-9_]{2,40}\|>|<｜[^｜<>\s]{2,40}｜>|<(?:pad|unk|bos|eos|(?:start|end)_of_turn)>|\[/?INST\]"
)
_STRIKE = re.compile(r"</?s>")
_THINKING = re.compile(r"</?think(?:ing)?>|◁/?think▷")
_TOOLS = re.compile(
    r"</?tool_(?:call|calls|response)>|<function=[^>\s]{0,80}>?|</?(?:minimax:)?tool_call|\[/?TOOL_CALLS\]|<\|python_tag\|>"
    r"|<[|｜]tool[▁_ ]calls?[▁_ ](?:section[▁_ ])?(?:begin|end)[|｜]>"
)
# What stands between backticks is spoken about, not leaked.
_QUOTED = re.compile(r"`[^`\n]{1,80}`")


def special(said: str) -> tuple[str, ...]:
    """Special tokens in a text: a tokenizer's own marks that no detokenizer should have let through.

    `<s>` is also HTML's strike-through, and clean as long as it is closed.
    """
    plain = _unquoted(said)
    open_or_shut = _STRIKE.findall(plain)
    strike = [tag for tag in open_or_shut if open_or_shut.count("<s>") != open_or_shut.count("</s>")]
    return (*_SPECIAL.findall(plain), *strike)


def thinking(said: str) -> str | None:
    """The first tag of thinking in a text."""
    return _first(_THINKING, said)


def tools(said: str) -> str | None:
    """The first tag of a tool call in a text."""
    return _first(_TOOLS, said)


def leaked(said: str) -> str | None:
    """The first tag of any kind in a text."""
    marks = special(said)
    return thinking(said) or tools(said) or (marks[0] if marks else None)


def _first(pattern: re.Pattern[str], said: str) -> str | None:
    found = pattern.search(_unquoted(said))
    return found[0] if found else None


def _unquoted(said: str) -> str:
    return _QUOTED.sub("``", said) if "`" in said else said
