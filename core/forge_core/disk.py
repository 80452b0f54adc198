"""Free space on the disks that a walk fills: told before it starts, and named as the cause when it ran out."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

FULL = 64 * 1024 * 1024
"""Bytes. With less than this left a failed command most likely failed for want of space, whatever it said."""


def free(path: Path) -> int | None:
    """Bytes that are free on the disk of `path`, or of its nearest parent that exists; None where that cannot be asked."""
    for place in (path, *path.absolute().parents):
        try:
            return shutil.disk_usage(place).free
        except FileNotFoundError:
            continue
        except OSError:
            return None
    return None


def tight(places: Iterable[Path], least: int) -> list[tuple[Path, int]]:
    """Those of `places` whose disk has less than `least` bytes free, with what it has; one for each disk."""
    found: dict[int, tuple[Path, int]] = {}
    for place in places:
        amount = free(place)
        if amount is not None and amount < least:
            found.setdefault(_device(place), (place, amount))
    return list(found.values())


def _device(path: Path) -> int:
    return next(place.stat().st_dev for place in (path, *path.absolute().parents) if place.exists())
