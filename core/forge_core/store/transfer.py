"""`store export` and `store import`: a folder to carry to a machine without a network, or to a fresh runner.

The folder holds `objects/<sha256>` and `forge-store.json`, written last: what the files are called and what they were
derived from. It can be completed by a second export into it, and a part of it is never imported for the whole.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, ValidationError

from forge_core.console import Step
from forge_core.errors import EnvironmentFailure, IntegrityError, UsageError
from forge_core.files import atomic_path, write_text
from forge_core.model import Frozen, Sha256, file_sha256
from forge_core.store import Store
from forge_core.store.access import writing
from forge_core.store.names import MOVED, TREE, Named, moves

INDEX = "forge-store.json"
_CHUNK = 1 << 20
# Kind and key become file names on the importing machine.
_Part = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]


class CarriedObject(Frozen):
    """One file of the folder."""

    sha256: Sha256
    name: str
    size: int
    """Bytes."""


class CarriedEntry(Frozen):
    """What a key leads to."""

    kind: _Part
    key: _Part
    data: dict[str, Any]
    """As it lies in the store."""


class Index(Frozen):
    """The folder's table of contents."""

    schema_version: Literal[1] = Field(default=1)
    objects: tuple[CarriedObject, ...]
    entries: tuple[CarriedEntry, ...] = ()


@dataclass(frozen=True)
class Carried:
    """What `export_to` or `import_from` moved."""

    objects: int
    size: int
    """Bytes."""
    new: int
    """Objects that were not there before."""
    entries: int


def export_to(store: Store, folder: Path, named: Mapping[str, Named], *, derived: bool, step: Step) -> Carried:
    """Copy what `named` holds (a package that has moved: what stands in for it) and, on demand, all that was derived.

    Raises EnvironmentFailure when something is not in the store, IntegrityError when its bytes changed.
    """
    wanted = dict(named)
    entries: list[CarriedEntry] = []
    for note, pairs in moves(store).items():
        used = [(old, now) for old, now in pairs if old.sha256 in wanted and not store.has(old.sha256)]
        if used:
            for old, now in used:
                del wanted[old.sha256]
                wanted[now.sha256] = now
            entries.append(CarriedEntry(kind=MOVED, key=note.stem, data=json.loads(note.read_text(encoding="utf-8"))))
    if missing := [item for item in wanted.values() if not store.has(item.sha256)]:
        raise EnvironmentFailure(
            f"{len(missing)} of {len(wanted)} inputs are not in {store.root}",
            details=tuple(sorted(item.name for item in missing)[:20]),
            hint="`nox -s build -- --profile NAME` brings them; --profile limits the export to one lock",
        )
    for entry in _derived(store):
        sha256 = entry.data["sha256"]
        # an archive of a source tree is an input, made here or not: its entry goes with it
        if derived or (entry.kind == TREE and sha256 in wanted):
            entries.append(entry)
            amount = store.path(sha256).stat().st_size
            wanted.setdefault(sha256, Named(sha256, f"{entry.kind} {entry.key[:12]}", amount))
    total, done, new = sum(item.size for item in wanted.values()), 0, 0
    with writing(folder):
        (folder / "objects").mkdir(parents=True, exist_ok=True)
        for item in wanted.values():
            target = folder / "objects" / item.sha256
            if not (target.is_file() and target.stat().st_size == item.size and file_sha256(target) == item.sha256):
                _copy_out(store, item, target)
                new += 1
            done += item.size
            step.progress(done, total, unit="B", note=item.name)
        carried = tuple(
            CarriedObject(sha256=i.sha256, name=i.name, size=i.size)
            for i in sorted(wanted.values(), key=lambda i: (i.name, i.sha256))
        )
        write_text(folder / INDEX, Index(objects=carried, entries=tuple(entries)).model_dump_json(indent=1) + "\n")
    return Carried(len(wanted), total, new, len(entries))


def _copy_out(store: Store, item: Named, target: Path) -> None:
    """Copy an object, hashed on the way; store.get says what is to be said when its bytes changed."""
    hasher = hashlib.sha256()
    with atomic_path(target) as aside:
        with store.path(item.sha256).open("rb") as reader, aside.open("wb") as writer:
            while chunk := reader.read(_CHUNK):
                hasher.update(chunk)
                writer.write(chunk)
        if hasher.hexdigest() != item.sha256:
            store.get(item.sha256, item.name)
            raise IntegrityError(f"{item.name} changed while it was read", hint="run it again")


def _derived(store: Store) -> list[CarriedEntry]:
    found = []
    for path in sorted((store.root / "derived").glob("*/*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        if isinstance(data, dict) and isinstance(data.get("sha256"), str) and store.has(data["sha256"]):
            found.append(CarriedEntry(kind=path.parent.name, key=path.stem, data=data))
    return found


def import_from(store: Store, folder: Path, step: Step) -> Carried:
    """Bring an exported folder into the store, every byte verified; what is right comes in even when something is wrong.

    Raises UsageError when there is no index, IntegrityError when files have other bytes, EnvironmentFailure when some
    are missing.
    """
    index = _read_index(folder)
    total, done, new = sum(item.size for item in index.objects), 0, 0
    wrong: list[str] = []
    missing: list[str] = []
    for item in index.objects:
        source = folder / "objects" / item.sha256
        try:
            if _stored(store, item):
                pass
            elif source.is_symlink() or not source.is_file():
                missing.append(item.name)
            else:
                store.add_file(source, sha256=item.sha256, name=item.name)
                new += 1
        except IntegrityError as error:
            wrong.append(error.message)
        done += item.size
        step.progress(done, total, unit="B", note=item.name)
    hint = f"copy {folder} again, or repeat `store export` into it"
    if wrong:
        raise IntegrityError(
            f"{len(wrong)} files of {folder} have other bytes and did not come in", details=tuple(wrong), hint=hint
        )
    if missing:
        raise EnvironmentFailure(
            f"{len(missing)} files of {folder} are missing", details=tuple(sorted(missing)[:20]), hint=hint
        )
    for entry in index.entries:
        sha256 = entry.data.get("sha256")
        if sha256 is not None and not (isinstance(sha256, str) and re.fullmatch("[0-9a-f]{64}", sha256)):
            raise UsageError(f"{folder / INDEX}: the entry {entry.kind}/{entry.key} names no sha256")
        store.note_put(entry.kind, entry.key, entry.data)
    return Carried(len(index.objects), total, new, len(index.entries))


def _stored(store: Store, item: CarriedObject) -> bool:
    """Whether the store has it already, right; a wrong one is deleted, for the folder's to take its place."""
    if not store.has(item.sha256):
        return False
    try:
        store.get(item.sha256, item.name)
    except IntegrityError:
        return False
    return True


def _read_index(folder: Path) -> Index:
    path = folder / INDEX
    try:
        return Index.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(f"{folder} is no exported store: it has no {INDEX}") from error
    except ValidationError as error:
        raise UsageError(f"{path} is no index of an exported store: {error.errors()[0]['msg']}") from error
