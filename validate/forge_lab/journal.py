"""The journal: what came of every trial, one JSON line each, append-only. What is in it is not done again."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from forge_core.errors import UsageError
from forge_core.files import write_text
from forge_core.model import Deviation, Frozen, Sha256
from forge_lab.plan import Trial
from forge_validate.checks.result import Outcome
from forge_validate.diagnose import Kind


class Subject(Frozen):
    """What a trial was about beside its mutant; sha256 each, none where a stand-in has none."""

    image: str | None
    model: Sha256 | None
    suite: Sha256
    answers: Sha256
    policy: Sha256
    code: Sha256
    """Of the gate, the faults and the lab."""


class Count(Frozen):
    """Held-out tokens of one way of asking."""

    compared: int
    """With the same text before them."""
    differing: int
    """Of these, where the likeliest token is another one."""


class Measured(Frozen):
    """What the held-out probe found, against the server without the fault."""

    counts: dict[str, Count]
    """`prefill`, `alone`, `together`."""
    nonfinite: int = 0
    """Tokens without a finite logprob."""
    unanswered: int = 0
    """Requests without an answer."""

    @property
    def share(self) -> float:
        """Of differing tokens, in the way of asking where it is largest: a fault of batches does not show alone."""
        return max((one.differing / one.compared for one in self.counts.values() if one.compared), default=0.0)


class Baseline(Frozen):
    """What the four questions of the seeds made of it."""

    passed: bool
    why: str


class Checked(Frozen):
    """A required check, or one that is not, in short."""

    check: str
    outcome: Outcome
    required: bool
    """It counts: required and not waived."""


class Entry(Frozen):
    """What came of a trial."""

    schema_version: Literal[1] = 1
    key: Sha256
    trial: Trial
    subject: Subject
    when: datetime
    verdict: Literal["passed", "failed"]
    kind: Kind | None
    cause: str
    checks: tuple[Checked, ...]
    killed_by: str | None
    """The first required check without a pass, in the order of asking."""
    baseline: Baseline | None
    measured: Measured | None
    noise: Measured | None
    """Of the same probe twice on the healthy server."""
    fired: bool | None
    """The fault did something; none: there was none."""
    deviations: tuple[Deviation, ...] = ()
    """A verdict with an injected fault is never promoted."""
    requests: int
    generating: int
    """Of these, requests in which the model spoke."""
    prompt_tokens: int
    reply_tokens: int
    seconds: float
    """Of the suite alone."""
    restarted: bool = False
    """The server had to be started anew before this trial."""
    families: dict[str, float] = Field(default_factory=dict)
    """Seconds of each family, and of the cases (`cases`)."""

    @property
    def killed(self) -> bool:
        """Whether the gate said no."""
        return self.verdict == "failed"


class Journal:
    """A file of entries; the last one of a key counts."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def entries(self) -> tuple[Entry, ...]:
        """All whole entries; a last line that was half written is none.

        Raises UsageError for any other line that is no entry.
        """
        if not self.path.exists():
            return ()
        found: dict[str, Entry] = {}
        for number, line, last in self._lines():
            try:
                entry = Entry.model_validate_json(line)
            except ValidationError as error:
                if last:
                    break
                raise UsageError(f"{self.path}:{number}: no entry of this journal: {error}") from error
            found.pop(entry.key, None)
            found[entry.key] = entry
        return tuple(found.values())

    def append(self, entry: Entry) -> None:
        """Add one, whole or not at all: what a killed process left half written is cut off first."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._mend()
        line = json.dumps(entry.model_dump(mode="json", by_alias=True), ensure_ascii=False, sort_keys=True) + "\n"
        with self.path.open("ab") as stream:
            stream.write(line.encode())
            stream.flush()
            os.fsync(stream.fileno())

    def _lines(self) -> Iterator[tuple[int, str, bool]]:
        lines = self.path.read_bytes().decode("utf-8", "replace").splitlines()
        for number, line in enumerate(lines, 1):
            yield number, line, number == len(lines)

    def _mend(self) -> None:
        if self.path.exists() and (whole := self.path.read_bytes()) and not whole.endswith(b"\n"):
            with self.path.open("rb+") as stream:
                stream.truncate(whole.rfind(b"\n") + 1)


def save(entries: Iterable[Entry], path: Path) -> None:
    """Write entries as a journal of their own, atomically."""
    lines = (
        json.dumps(entry.model_dump(mode="json", by_alias=True), ensure_ascii=False, sort_keys=True)
        for entry in entries
    )
    write_text(path, "".join(line + "\n" for line in lines))
