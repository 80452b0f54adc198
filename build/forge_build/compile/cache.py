"""The compiler cache: objects of earlier compiles, in a volume of the engine and, where it is set, in a Redis.

FORGE_COMPILER_CACHE is `ccache` (default), `sccache` or `off`. FORGE_COMPILER_CACHE_REDIS=HOST:PORT is a cache that machines share.
The builder has no network even then: a socket in it leads to that server alone, through this process. What comes out of a
shared cache was named by no lock, so such a wheel deviates.
"""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from forge_build.compile.schedule import folder
from forge_core.engine import Engine
from forge_core.errors import EnvironmentFailure, UsageError
from forge_core.model import Deviation

VOLUME = "sm120-forge-compiler-cache"
"""Volume of the engine; `docker volume rm` empties the cache."""
_INSIDE = "/forge/cache"
_REMOTE = "/forge/remote"
_PROGRAM = "/forge/inside/{}"
_CONNECT_S = 5.0
_ADDRESS = re.compile(r"(?P<host>[\w.-]+|\[[0-9a-fA-F:]+\]):(?P<port>\d{1,5})")


@dataclass(frozen=True)
class Cache:
    """A compiler cache as it was asked for."""

    tool: Literal["ccache", "sccache"]
    remote: tuple[str, int] | None = None
    """Host and port of a Redis."""

    @property
    def program(self) -> Path:
        """The tool, which our own environment holds in the locked version; raises EnvironmentFailure without it."""
        path = Path(sysconfig.get_path("scripts")) / self.tool
        if not path.is_file():
            raise EnvironmentFailure(
                f"{path} is not there", hint="install requirements/forge.txt, or set FORGE_COMPILER_CACHE=off"
            )
        return path

    @property
    def files(self) -> dict[str, Path]:
        """What is copied into the container."""
        return {_PROGRAM.format(self.tool): self.program}

    @property
    def identity(self) -> dict[str, Any]:
        """What of it decides a wheel's bytes: nothing for ccache alone; sccache names a symbol of each object its own way."""
        found: dict[str, Any] = {} if self.tool == "ccache" else {"tool": self.tool}
        return found | ({"remote": True} if self.remote else {})

    def plan(self, space: str) -> dict[str, Any]:
        """For the scheduler; objects of another `space` (the builder image) are never taken."""
        remote = f"{_REMOTE}/redis" if self.remote else None
        return {
            "tool": self.tool,
            "program": _PROGRAM.format(self.tool),
            "folder": f"{_INSIDE}/{self.tool}",
            "space": re.sub(r"\W", "-", space),
            "remote": remote,
        }

    def deviations(self, wheel: str) -> tuple[Deviation, ...]:
        """What a wheel that was made with it must be labelled with."""
        if self.remote is None:
            return ()
        detail = f"objects may come from the cache at {self.remote[0]}:{self.remote[1]}, which no lock names"
        return (Deviation(kind="remote-cache", subject=wheel, detail=detail),)

    @contextmanager
    def volumes(self) -> Iterator[dict[str, dict[str, str]]]:
        """What the container must mount: the cache's volume, and the way to the remote while this context lasts.

        Raises EnvironmentFailure when nothing answers there.
        """
        mounts = {VOLUME: {"bind": _INSIDE, "mode": "rw"}}
        if self.remote is None:
            yield mounts
            return
        try:
            socket.create_connection(self.remote, timeout=_CONNECT_S).close()
        except OSError as error:
            raise EnvironmentFailure(
                f"FORGE_COMPILER_CACHE_REDIS: nothing answers at {self.remote[0]}:{self.remote[1]}: {error.strerror or error}",
                hint="build without the shared cache, or start it",
            ) from error
        with tempfile.TemporaryDirectory(prefix="forge-redis-") as name:
            # The container's root may be another user than we are.
            Path(name).chmod(0o755)
            relay = _relay().to_port(Path(name) / "redis", *self.remote)
            try:
                yield mounts | {name: {"bind": _REMOTE, "mode": "rw"}}
            finally:
                relay.close()


def chosen(engine: Engine, environ: Mapping[str, str] = os.environ) -> Cache | None:
    """The cache that the settings name, or none; raises UsageError for a setting that cannot be followed."""
    tool = environ.get("FORGE_COMPILER_CACHE") or "ccache"
    if tool == "off":
        return None
    if tool not in ("ccache", "sccache"):
        raise UsageError(f"FORGE_COMPILER_CACHE {tool!r} is none of ccache, sccache, off")
    address = environ.get("FORGE_COMPILER_CACHE_REDIS", "")
    if not address:
        return Cache(tool)  # type: ignore[arg-type]
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match["port"]) > 65535:
        raise UsageError(f"FORGE_COMPILER_CACHE_REDIS {address!r} is not HOST:PORT")
    if engine.remote:
        raise UsageError(
            f"FORGE_COMPILER_CACHE_REDIS: the engine at {engine.address} is on another machine, where no socket of ours leads",
            hint="build with a local engine, or without the shared cache",
        )
    return Cache(tool, (match["host"].strip("[]"), int(match["port"])))  # type: ignore[arg-type]


def _relay() -> Any:
    """The relay that also runs inside; it is no package of ours, so it is loaded by its place."""
    spec = importlib.util.spec_from_file_location("forge_inside_relay", folder() / "relay.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Relay
