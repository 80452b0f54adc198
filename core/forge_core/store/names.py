"""What the checkout's locks name. Core knows no manifest: a lock is read as plain YAML, for sha256, size and file name."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from forge_core.cli import project_root
from forge_core.errors import UsageError
from forge_core.store import Store

MOVED = "moved"
"""Kind of the notes that say which base packages the distribution replaced: `{"moves": [[locked, now], ...]}`."""

TREE = "git-tree"
"""Kind of the archives of source trees; their keys are git tree ids."""

SHA256 = re.compile(r"[0-9a-f]{64}")
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Named:
    """A file that a lock names."""

    sha256: str
    name: str
    size: int
    """Bytes."""


def lock_files(profile: str | None = None) -> tuple[Path, ...]:
    """The locks of this checkout, or the one of a profile; raises UsageError when that has none."""
    folder = project_root() / "build" / "manifests"
    found = tuple(sorted(folder.glob(f"{profile or '*'}.lock.yaml")))
    if profile and not found:
        known = ", ".join(path.name.removesuffix(".lock.yaml") for path in folder.glob("*.lock.yaml"))
        raise UsageError(f"no lock of the profile {profile!r}", hint=f"profiles with a lock: {known or 'none'}")
    return found


def named(locks: Iterable[Path]) -> dict[str, Named]:
    """What the locks name, by sha256; raises UsageError when one cannot be read: it must not count as naming nothing."""
    found: dict[str, Named] = {}
    for path in locks:
        found |= {item.sha256: item for item in _files(_read(path))}
    return found


def trees(locks: Iterable[Path]) -> dict[str, str]:
    """Git tree id -> name of every source tree from git that the locks name; raises UsageError as `named`."""
    return {tree: name for path in locks for tree, name in _trees(_read(path))}


def tree_objects(store: Store, trees: Mapping[str, str]) -> dict[str, Named]:
    """The archives of source trees that the store has, by sha256."""
    found: dict[str, Named] = {}
    for tree, name in trees.items():
        try:
            sha256 = str(json.loads(store.entry(TREE, tree).read_text(encoding="utf-8"))["sha256"])
            size = store.path(sha256).stat().st_size
        except (OSError, ValueError, KeyError, TypeError):
            continue
        found[sha256] = Named(sha256, f"{name} (tree {tree[:12]})", size)
    return found


def _trees(data: Any) -> Iterator[tuple[str, str]]:
    sources = data.get("sources") if isinstance(data, dict) else None
    for name, source in sources.items() if isinstance(sources, dict) else ():
        if isinstance(source, dict) and isinstance(source.get("commit"), str):
            yield str(source["tree"]), str(name)
            for part, item in source.get("dependencies", {}).items():
                if isinstance(item.get("taken"), str):
                    yield item["taken"], f"{name}/{part}"


def _read(path: Path) -> Any:
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)  # noqa: S506 - a safe loader, in C
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read: {error}", hint="`nox -s lock` writes it again") from error


def _files(data: Any) -> Iterator[Named]:
    """Every mapping with a sha256 and a size, wherever it stands."""
    if isinstance(data, list):
        for item in data:
            yield from _files(item)
    elif isinstance(data, dict):
        if isinstance(data.get("sha256"), str) and isinstance(data.get("size"), int):
            yield Named(data["sha256"], _name(data), data["size"])
        for value in data.values():
            yield from _files(value)


def _name(data: dict[str, Any]) -> str:
    return str(data.get("file") or f"{data.get('name', 'unnamed')} {data.get('version', '')}".strip())


def moves(store: Store) -> dict[Path, tuple[tuple[Named, Named], ...]]:
    """The replaced base packages that earlier runs noted: note -> (locked, now) pairs; unreadable notes say nothing."""
    found: dict[Path, tuple[tuple[Named, Named], ...]] = {}
    for path in sorted((store.root / "derived" / MOVED).glob("*.json")):
        try:
            rows = json.loads(path.read_text(encoding="utf-8"))["moves"]
            found[path] = tuple((next(_files(old)), next(_files(new))) for old, new in rows)
        except (OSError, ValueError, KeyError, TypeError, StopIteration):
            continue
    return found


def known_names(store: Store) -> dict[str, str]:
    """Names for messages, by sha256, of all that locks and derived entries tell; outside a checkout fewer."""
    found: dict[str, str] = {}
    for entry in (store.root / "derived").glob("*/*.json"):
        try:
            data = json.loads(entry.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(data, dict) and isinstance(data.get("sha256"), str):
            found[data["sha256"]] = f"{entry.parent.name} {entry.stem[:12]}"
    for pairs in moves(store).values():
        found |= {now.sha256: now.name for _, now in pairs}
    return found
