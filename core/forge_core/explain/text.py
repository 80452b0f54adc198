"""One line as it was written: without what terminals, containers and CI put around it, with its rank and its time."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

_PREFIX = re.compile(
    r"""\s*(?:
      nox\ >\ (?:\[\S+\]\ )?
    | \d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\ (?:std(?:out|err)\ [FP]\ )?   # CI, Kubernetes
    | [\w.-]{1,60}\s{1,20}\|\ ?                                                # docker compose
    | \#\d+\ (?:\d+\.\d+\ ?|(?=ERROR))                                         # BuildKit
    | [A-Z][a-z]{2}\ [\ \d]\d\ \d\d:\d\d:\d\d\ \S{1,80}\ [^\s:\[]{1,80}(?:\[\d+\])?:\ ?  # journal, syslog
    | \[\s{0,6}\d+\.\d{6}\]\ ?                                                 # dmesg
    | \((?:EngineCore|Worker|APIServer|RayWorker)\w*(?:\ pid=\d+)?(?:,\ ip=\S+)?\)\ ?       # vLLM
    | (?:ERROR|WARNING|INFO|CRITICAL|DEBUG)\ \d\d-\d\d\ \d\d:\d\d:\d\d(?:\ \[[^\]]{1,80}\])?\ ?
    | \[20\d\d-\d\d-\d\d[ T][^\]]{6,60}\]\ ?                                   # SGLang
    | \[rank\d+\]:\ ?
    | \[\d+\]:\ ?                                                              # torchrun
    )""",
    re.VERBOSE,
)
_RECORD = re.compile(r"\[20\d\d-\d\d-\d\d[ T]")
"""What begins a record of SGLang; lines without continue the one before."""
_STAMP = re.compile(r"(20\d\d-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)")
_RANK = re.compile(
    r"\[20\d\d-\d\d-\d\d[^\]]{0,40}?\b((?:(?:DP|PP|TP|EP|CP)\d+ ?)+)\]"
    r"|\[(rank\d+)\]|\[Rank (\d+)\]|Worker_((?:(?:DP|PP|TP|EP)\d+_?)+)"
)
WRAPPED = b'{"log":"'
"""How a line of docker's json-file driver begins."""
_HEAD = 400
"""Characters in which a prefix is looked for."""


@dataclass(frozen=True)
class Line:
    """A line."""

    text: str
    body: str
    """Without its prefixes; indentation is kept."""
    rank: str | None
    stamp: str | None
    """`2026-11-30 14:12:19`."""
    record: bool
    """Whether it begins a record of the log, and does not go on with one."""

    @property
    def indent(self) -> int:
        """Blanks before the body."""
        return len(self.body) - len(self.body.lstrip())


def parsed(raw: bytes) -> Line:
    """Read a line of bytes; never fails."""
    text = raw.decode(errors="replace")
    if raw.startswith(WRAPPED):
        text = _of_json(text)
    head = text[:_HEAD]
    rank = _RANK.search(head) if "[" in head or "Worker_" in head else None
    stamp = _STAMP.search(head)
    position, record = 0, False
    for _ in range(6):
        prefix = _PREFIX.match(head, position)
        if prefix is None or prefix.end() == position:
            break
        record = record or _RECORD.match(head, position) is not None
        position = prefix.end()
    return Line(
        text=text,
        body=text[position:],
        rank=_named(rank) if rank else None,
        stamp=f"{stamp[1]} {stamp[2]}" if stamp else None,
        record=record,
    )


def _named(match: re.Match[str]) -> str:
    if match[3]:
        return f"rank{match[3]}"
    return (match[1] or match[2] or match[4]).strip(" _").replace("_", " ")


def _of_json(text: str) -> str:
    """What docker's json-file driver wraps."""
    try:
        found = json.loads(text)["log"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return text
    return found.rstrip("\r\n") if isinstance(found, str) else text
