"""The golden file: what a trusted run said, about what, and how far it lay from itself. Sealed, so nobody types a threshold in."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from forge_core import sealed
from forge_core.files import write_text
from forge_core.model import Digest, Frozen, Sha256, canonical_sha256
from forge_validate.golden.divergence import Row, step

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]
"""Of a model, as a file name."""
Count = Annotated[int, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Nats = Annotated[float, Field(ge=0, allow_inf_nan=False)]

WHY = 15
"""Characters of a reason to trust a run, at least."""
# The most that rounding puts a probability above 1.
_ABOVE_ONE = 1e-3


class Subject(Frozen):
    """What was trusted."""

    model: Name
    """As its answers name it."""
    revision: Sha256 | None
    """Of the model folder; none: its files were not at hand."""
    tokenizer: Sha256 | None
    """Of tokenizer.json; none likewise."""
    image: Digest | None = None
    serving: Sha256 | None = None
    software: str | None = None
    """As the server tells itself."""
    formats: dict[str, str] = Field(default_factory=dict)
    """Number formats and backends, as far as the server and the model's own config tell."""


class Prompt(Frozen):
    """One text, what the trusted server went on with, and how likely the next tokens were at the places that are judged."""

    bucket: Count
    """Tokens of the prompt at most; prompts are judged bucket by bucket."""
    text: str
    prompt: Count
    """Tokens of the text: `ids` begins with them, and goes on with the continuation."""
    first: Count
    """The first position that is judged; one before the continuation is judged too, since plain text is less sure."""
    ids: tuple[int, ...]
    rows: tuple[tuple[tuple[int, float], ...], ...]
    """For each position from `first` on, the likeliest tokens there as (id, logprob), likeliest first."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not self.first <= self.prompt < len(self.ids):
            raise ValueError("`first`, `prompt` and the number of ids must ascend")
        if self.prompt > self.bucket:
            raise ValueError(f"{self.prompt} tokens do not fit into the bucket {self.bucket}")
        if len(self.rows) != len(self.ids) - self.first:
            raise ValueError(f"{len(self.rows)} rows for {len(self.ids) - self.first} positions")
        for one in self.rows:
            values = [logprob for _, logprob in one]
            if not values or not all(math.isfinite(value) and value <= _ABOVE_ONE for value in values):
                raise ValueError("a row without logprobs, or with one that is none")
            if values != sorted(values, reverse=True) or len({token for token, _ in one}) < len(one):
                raise ValueError("a row that does not descend, or names a token twice")
        return self

    @property
    def continuation(self) -> tuple[int, ...]:
        """What the trusted server went on with."""
        return self.ids[self.prompt :]

    def row(self, position: int) -> Row:
        """The row of a position of `ids`."""
        return dict(self.rows[position - self.first])


class Noise(Frozen):
    """How far the trusted server lay from itself on one other path, in one bucket; see `divergence.Amount`."""

    path: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z-]*$")]
    """`repeated`, `at-once`, `decoded`, `decoded-at-once`; with `restart-` in front, after the server was started anew."""
    bucket: Count
    positions: Count
    mean: Nats
    p99: Nats
    largest: Nats
    top1: Share


class Golden(Frozen):
    """A golden file."""

    schema_version: Literal[1] = 1
    subject: Subject
    trusted: Annotated[str, StringConstraints(min_length=WHY)]
    """Why this run may be trusted."""
    recorded: date
    suite: str
    """Whose `golden` section said what to ask."""
    alternatives: Count
    """Tokens in each row."""
    noise: Annotated[tuple[Noise, ...], Field(min_length=1)]
    prompts: Annotated[tuple[Prompt, ...], Field(min_length=1)]
    texts: dict[int, str]
    """Id -> text, of all tokens in rows and continuations; for servers that tell no ids."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if any(len(one) != self.alternatives for prompt in self.prompts for one in prompt.rows):
            raise ValueError(f"a row that does not have {self.alternatives} tokens")
        if lacking := {prompt.bucket for prompt in self.prompts} - {noise.bucket for noise in self.noise}:
            raise ValueError(f"no noise was measured in the bucket {min(lacking)}")
        named = {token for prompt in self.prompts for one in prompt.rows for token, _ in one}
        if lacking := (named | {token for prompt in self.prompts for token in prompt.continuation}) - self.texts.keys():
            raise ValueError(f"no text for the token {min(lacking)}")
        return self

    @cached_property
    def step(self) -> float:
        """The grid of this server's logits (see `divergence.step`)."""
        return step(prompt.row(place) for prompt in self.prompts for place in range(prompt.first, len(prompt.ids)))


def named(prompts: Sequence[Prompt]) -> list[tuple[str, Prompt]]:
    """Prompts by name, `BUCKET/INDEX`: counted in each bucket."""
    seen: Counter[int] = Counter()
    found = []
    for prompt in prompts:
        found.append((f"{prompt.bucket}/{seen[prompt.bucket]}", prompt))
        seen[prompt.bucket] += 1
    return found


def place(model: str) -> Path:
    """Where the golden file of a model lies, whether there is one or not."""
    return Path(str(files(__package__) / f"{model.rpartition('/')[2]}.json"))


def find(model: str) -> Golden | None:
    """The golden file of a model; none if there is none. Raises as `load`."""
    path = place(model)
    return load(path) if path.is_file() else None


def load(path: Path) -> Golden:
    """Read a golden file; raises UsageError (2) for none or another version, IntegrityError (5) for an edited one."""
    return sealed.load(Golden, path, what="golden file", origin="`python -m forge_validate golden`")


def save(golden: Golden, path: Path) -> None:
    """Write a golden file atomically."""
    write_text(path, dumps(golden))


def dumps(golden: Golden) -> str:
    """The file's text: JSON with its seal first and one position in a line, so that people and git can read it."""
    data = golden.model_dump(mode="json")
    whole = {"seal": canonical_sha256(data)} | data
    return "{\n" + ",\n".join(f' "{name}": {_value(name, value)}' for name, value in whole.items()) + "\n}\n"


def _value(name: str, value: Any) -> str:
    if name == "prompts":
        return _block((_prompt(one) for one in value), "[]")
    if name == "noise":
        return _block(map(_line, value), "[]")
    if name == "texts":
        return _block(_entries(value), "{}")
    return _line(value)


def _prompt(data: Mapping[str, Any]) -> str:
    plain = ", ".join(f'"{name}": {_line(value)}' for name, value in data.items() if name != "rows")
    return f'{{{plain}, "rows": {_block(map(_line, data["rows"]), "[]", "   ")}}}'


def _entries(texts: Mapping[str, str]) -> Iterator[str]:
    """Some in a line."""
    pairs: Sequence[str] = [f'"{token}": {_line(text)}' for token, text in texts.items()]
    for start in range(0, len(pairs), 12):
        yield ", ".join(pairs[start : start + 12])


def _block(lines: Iterator[str], ends: str, margin: str = "  ") -> str:
    return f"{ends[0]}\n" + ",\n".join(margin + line for line in lines) + f"{ends[1]}"


def _line(value: Any) -> str:
    # A lone surrogate or a control character must survive; what people can read stays readable.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
