"""How many compilers may run at once: what the builder's scheduler is told, and which files it consists of.

It admits units by memory, not by number: see `build/inside/scheduling` and docs/compiling.md.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from forge_core.cli import project_root
from forge_core.engine import Engine
from forge_core.errors import UsageError

FLOOR = 1_000_000_000
"""Bytes that the machine keeps free at all times; FORGE_MEMORY_FLOOR (MB) moves it."""
_OWN = 600_000_000
"""Bytes for the script itself (FlashInfer imports torch), ninja, and launchers that wait (5 MB each)."""
_FOLDER = "/forge/inside"


@dataclass(frozen=True)
class Inside:
    """What a script in the builder needs to compile with the scheduler."""

    files: Mapping[str, Path]
    """Path in the container -> file here; beside the script, so that it can import `scheduling`."""
    plan: Mapping[str, Any]
    """The script's PLAN gets it as `scheduler`."""


def folder() -> Path:
    """The scheduler's files."""
    return project_root() / "build" / "inside" / "scheduling"


def inside(memory: int, cores: int, sizes: Mapping[str, int], *, cache: Mapping[str, Any] | None = None) -> Inside:
    """The scheduler for a container of `memory` bytes and so many cores.

    `sizes` is `sizes.known`; `cache` is `Cache.plan`. Raises UsageError for a wrong FORGE_MEMORY_FLOOR.
    """
    return Inside(
        files={f"{_FOLDER}/scheduling/{path.name}": path for path in sorted(folder().glob("*.py"))},
        plan={
            "slots": cores,
            "budget": max(memory - _OWN, memory // 2),
            "floor": floor(),
            "sizes": dict(sizes),
            "cache": dict(cache) if cache else None,
        },
    )


def floor() -> int:
    """Bytes that stay free; raises UsageError for a setting that is no number."""
    found = _setting("FORGE_MEMORY_FLOOR", "of MB")
    return FLOOR if found is None else found * 1_000_000


def jobs() -> int | None:
    """Compilers that may run at once where the cores are not ours alone; none: as many as there are cores.

    Raises UsageError for a setting that is no number, or none at all.
    """
    found = _setting("FORGE_JOBS", "of compilers")
    if found == 0:
        raise UsageError("FORGE_JOBS 0 would compile nothing")
    return found


def _setting(name: str, what: str) -> int | None:
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise UsageError(f"{name} {text!r} is no number {what}")
    return int(text) if text else None


def share(engine: Engine) -> tuple[int, int]:
    """Bytes a builder container may use, and compilers it may run at once: one for each core, or FORGE_JOBS.

    Memory is what the machine and our control groups leave above the floor. A remote engine's machine is taken to be ours
    alone; nothing tells what others use there.
    """
    info = engine.client.info()
    memory = int(info["MemTotal"])
    if not engine.remote:
        memory = min(memory, free())
    cores = int(info["NCPU"])
    return max(memory - floor(), memory // 2), min(cores, jobs() or cores)


def free() -> int:
    """Bytes that can be taken here: MemAvailable, and what the control groups above us leave."""
    return int(_memory().free())


@cache
def _memory() -> Any:
    """The same reading that runs inside; it is no package of ours, so it is loaded by its place."""
    spec = importlib.util.spec_from_file_location("forge_inside_memory", folder() / "memory.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
