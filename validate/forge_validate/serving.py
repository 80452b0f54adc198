"""Serving: how a server is started. Flags, environment, devices, mounts, limits and what its log says on the way."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from forge_core.model import Frozen
from forge_validate import data

MODEL_MOUNT = "/model"
"""Where the model folder lies in the container, read-only."""

# What boot itself decides; a serving that names one of these would be overruled silently.
_OURS = frozenset({"model-path", "served-model-name", "host", "port", "api-key"})


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from error
    return text


def _flags(flags: dict[str, str | int | float | bool]) -> dict[str, str | int | float | bool]:
    for name in flags:
        if name in _OURS:
            raise ValueError(f"`{name}` is decided by boot, not by a serving")
        if name.startswith("-"):
            raise ValueError(f"`{name}`: write flags without the leading dashes")
    return flags


Pattern = Annotated[str, AfterValidator(_pattern)]
Memory = Annotated[str, StringConstraints(pattern=r"^\d+[kmg]$")]
"""Bytes with a unit of the engine: `512m`, `8g` (powers of two)."""


class Phase(Frozen):
    """A stretch of the start, ended by a line of the log."""

    name: str
    until: Pattern
    """The line that ends it; a later phase's line ends it too (servers leave lines out)."""
    deadline: Annotated[float, Field(gt=0)]
    """Seconds from the end of the phase before."""


class Ulimit(Frozen):
    """One limit of the processes; -1 is none."""

    name: str
    soft: int
    hard: int


class Devices(Frozen):
    """What hardware the container sees."""

    gpus: Literal["all"] | tuple[str, ...] = ()
    """Indices or UUIDs, through the engine's nvidia runtime."""
    cdi: tuple[str, ...] = ()
    """CDI names such as `nvidia.com/gpu=0`, instead of `gpus`."""


class Limits(Frozen):
    """What the container may use."""

    memory: Memory
    """Without swap: what exceeds it is killed, not slowed down."""
    pids: Annotated[int, Field(gt=0)]
    shm: Memory = "1g"
    """Size of /dev/shm: PyTorch's and NCCL's shared memory."""
    ulimits: tuple[Ulimit, ...] = ()


class Serving(Frozen):
    """How one server under test is started."""

    schema_version: Literal[1] = Field(alias="schema")
    profile: str
    model: str
    """Names the model: the served name, and the file in answers/."""
    command: tuple[str, ...] = ()
    """Instead of the image's own entry point; empty: the image as it is shipped."""
    flags: Annotated[dict[str, str | int | float | bool], AfterValidator(_flags)]
    """Flag without dashes -> value; `true` is a bare flag, `false` leaves it out."""
    identity_flag: str | None = None
    """A flag whose value the server tells again in /model_info: boot puts a random word in, to know its own server."""
    environment: dict[str, str] = Field(default_factory=dict)
    devices: Devices = Devices()
    limits: Limits
    tmpfs: dict[str, Memory] = Field(default_factory=dict)
    """Writable places of the read-only root file system."""
    port: int = 30000
    """Inside the container."""
    tells: dict[str, Pattern] = Field(default_factory=dict)
    """What the log tells of itself: name -> pattern with one group; the first line that has it counts."""
    phases: Annotated[tuple[Phase, ...], Field(min_length=1)]
    """In order; the last one ends with readiness."""
    stall: Annotated[float, Field(gt=0)]
    """Seconds without a line after which the user is told."""
    health: str = "/health"

    def arguments(self, identity: str | None = None) -> tuple[str, ...]:
        """The server's command line: what boot decides, then the flags."""
        words = ["--model-path", MODEL_MOUNT, "--served-model-name", self.model, "--host", "0.0.0.0"]  # noqa: S104
        words += ["--port", str(self.port)]
        for name, value in self.flags.items():
            if value is True:
                words.append(f"--{name}")
            elif value is not False:
                words += [f"--{name}", str(value)]
        if self.identity_flag and identity:
            words += [f"--{self.identity_flag}", identity]
        return tuple(words)


def load(profile: str) -> Serving:
    """The serving of a profile; raises UsageError."""
    return data.load("serving", profile, Serving)
