"""Serving: how a server is started. Flags, environment, devices, mounts, limits and what its log says on the way."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

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


def _cache_paths(caches: dict[str, str]) -> dict[str, str]:
    for name, path in caches.items():
        if not path.startswith("/") or path.rstrip("/") in ("", MODEL_MOUNT):
            raise ValueError(f"{name}: {path!r} is no place for a cache: an absolute path, neither / nor {MODEL_MOUNT}")
    if len(set(caches.values())) < len(caches):
        raise ValueError("two caches have one path")
    return caches


Memory = Annotated[str, StringConstraints(pattern=r"^\d+[kmg]$")]
"""Bytes with a unit of the engine: `512m`, `8g` (powers of two)."""

CacheName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]


def in_bytes(memory: Memory) -> int:
    """What a `Memory` says, in bytes."""
    return int(memory[:-1]) << {"k": 10, "m": 20, "g": 30}[memory[-1]]


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

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.gpus and self.cdi:
            raise ValueError("`gpus` and `cdi` are two ways to say one thing: give one")
        return self


class MemorySlack(Frozen):
    """How the wait for GPU memory ends after a server is gone."""

    size: Memory
    """What a GPU may hold beyond what it held before."""
    within: Annotated[float, Field(gt=0)]
    """Seconds until the wait gives up."""
    reason: Annotated[str, StringConstraints(min_length=15)]
    """Why these numbers."""

    @property
    def bytes(self) -> int:
        """The size in bytes."""
        return in_bytes(self.size)


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
    user: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]*(:[1-9][0-9]*)?$")] | None = None
    """Instead of the image's own user, by number, never root; none: the image as it is shipped."""
    flags: Annotated[dict[str, str | int | float | bool], AfterValidator(_flags)]
    """Flag without dashes -> value; `true` is a bare flag, `false` leaves it out."""
    told_as: dict[str, str] = Field(default_factory=dict)
    """Flag -> its name in the server's own description, where that is not the flag with underscores."""
    identity_flag: str | None = None
    """A flag whose value the server tells again in /model_info: boot puts a random word in, to know its own server."""
    api_key_flag: str | None = None
    """A flag that takes an API key: boot puts a random one in. None: the server asks for no key."""
    environment: dict[str, str] = Field(default_factory=dict)
    devices: Devices = Devices()
    gpu_memory_slack: MemorySlack | None = None
    """Demanded of a serving with devices."""
    limits: Limits
    tmpfs: dict[str, Memory] = Field(default_factory=dict)
    """Writable places of the read-only root file system."""
    caches: Annotated[dict[CacheName, str], AfterValidator(_cache_paths)] = Field(default_factory=dict)
    """Name -> path of a volume that outlives the container, for compiled kernels; one per image and name."""
    port: int = 30000
    """Inside the container."""
    tells: dict[str, Pattern] = Field(default_factory=dict)
    """What the log tells of itself: name -> pattern with one group; the first line that has it counts."""
    host_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """On this host's loopback; none: the engine finds a free one."""
    phases: Annotated[tuple[Phase, ...], Field(min_length=1)]
    """In order; the last one ends with readiness."""
    stall: Annotated[float, Field(gt=0)]
    """Seconds without a line after which the user is told."""
    health: str = "/health"

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.has_devices and self.gpu_memory_slack is None:
            raise ValueError("a serving with devices needs `gpu_memory_slack`")
        if taken := set(self.caches.values()) & set(self.tmpfs):
            raise ValueError(f"{', '.join(sorted(taken))} is both a cache and a tmpfs")
        return self

    @property
    def has_devices(self) -> bool:
        """Whether the container is given any GPU."""
        return bool(self.devices.gpus or self.devices.cdi)

    def intended(self) -> dict[str, str | int | float | bool]:
        """What the server should run with, under the names it tells it by; what is left to it (`auto`) is left out."""
        names = {flag: self.told_as.get(flag, flag.replace("-", "_")) for flag in self.flags}
        return {names[flag]: value for flag, value in self.flags.items() if value != "auto"}

    def arguments(self, identity: str | None = None, api_key: str | None = None) -> tuple[str, ...]:
        """The server's command line: what boot decides, then the flags. An API key belongs to no record or log."""
        words = ["--model-path", MODEL_MOUNT, "--served-model-name", self.model, "--host", "0.0.0.0"]  # noqa: S104
        words += ["--port", str(self.port)]
        for name, value in self.flags.items():
            if value is True:
                words.append(f"--{name}")
            elif value is not False:
                words += [f"--{name}", str(value)]
        if self.identity_flag and identity:
            words += [f"--{self.identity_flag}", identity]
        if self.api_key_flag and api_key:
            words += [f"--{self.api_key_flag}", api_key]
        return tuple(words)


def load(profile: str) -> Serving:
    """The serving of a profile; raises UsageError."""
    return data.load("serving", profile, Serving)
