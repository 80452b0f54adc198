"""One archive for one git tree: names, modes and bytes as they were committed, and nothing else.

The tree id is computed here from the archive's own bytes, not by git: no setting and no attribute can change it.
"""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

from forge_core.errors import IntegrityError

_CHUNK = 1 << 20
_POINTER = b"version https://git-lfs.github.com/spec/"
_FILE, _PROGRAM, _LINK, _FOLDER = b"100644", b"100755", b"120000", b"40000"

Folder = dict[bytes, "Folder | tuple[bytes, bytes]"]
"""Name -> a folder, or (mode, object id)."""


def pack(folder: Path, target: Path) -> tuple[str, ...]:
    """Write a folder's files into the archive `target`; returns the paths of Git LFS pointers.

    Equal trees give equal bytes: names in the order of their bytes, two modes, no time, no owner.
    """
    pointers = []
    with tarfile.open(target, "w", format=tarfile.GNU_FORMAT, encoding="utf-8", errors="surrogateescape") as tar:
        for name, path in sorted(_files(os.fsencode(folder), b"")):
            member = tarfile.TarInfo(name.decode("utf-8", "surrogateescape"))
            if os.path.islink(path):  # noqa: PTH114 - names are bytes
                member.type = tarfile.SYMTYPE
                member.linkname = os.readlink(path).decode("utf-8", "surrogateescape")  # noqa: PTH115
                member.mode = 0o777
                tar.addfile(member)
                continue
            with open(path, "rb") as stream:  # noqa: PTH123
                state = os.fstat(stream.fileno())
                member.size = state.st_size
                member.mode = 0o755 if state.st_mode & 0o100 else 0o644
                if stream.read(len(_POINTER)) == _POINTER:
                    pointers.append(member.name.encode("utf-8", "replace").decode())
                stream.seek(0)
                tar.addfile(member, stream)
    return tuple(pointers)


def tree_id(packed: Path) -> str:
    """Git tree id of what an archive holds; raises IntegrityError for what is no archive of a tree."""
    root: Folder = {}
    for name, member, stream in _members(packed):
        *parents, last = name.split(b"/")
        folder = root
        for parent in parents:
            below = folder.setdefault(parent, {})
            if not isinstance(below, dict):
                raise IntegrityError(f"{packed}: {member.name!r} lies below a file")
            folder = below
        if last in folder:
            raise IntegrityError(f"{packed}: {member.name!r} is there twice")
        if member.issym():
            target = member.linkname.encode("utf-8", "surrogateescape")
            folder[last] = (_LINK, _blob(io.BytesIO(target), len(target)))
        else:
            folder[last] = (_PROGRAM if member.mode & 0o100 else _FILE, _blob(stream, member.size))
    return _tree(root).hex()


def unpack(packed: Path, into: Path) -> None:
    """Write an archive whose tree id was just computed into the new folder `into`."""
    into.mkdir(parents=True)
    root = os.fsencode(into)
    for name, member, stream in _members(packed):
        target = root + b"/" + name
        os.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH103, PTH120
        if member.issym():
            os.symlink(member.linkname.encode("utf-8", "surrogateescape"), target)  # noqa: PTH211
            continue
        with open(target, "xb") as sink:  # noqa: PTH123
            while chunk := stream.read(_CHUNK):
                sink.write(chunk)
        os.chmod(target, 0o755 if member.mode & 0o100 else 0o644)  # noqa: PTH101


def _files(folder: bytes, below: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Name in the tree and path of every file and link."""
    with os.scandir(folder) as entries:
        for entry in entries:
            name = below + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path, name + b"/")
            else:
                yield name, entry.path


def _members(packed: Path) -> Iterator[tuple[bytes, tarfile.TarInfo, io.BufferedIOBase]]:
    """Files and links with their names; raises IntegrityError for members that no git tree has."""
    try:
        with tarfile.open(packed, "r:", encoding="utf-8", errors="surrogateescape") as tar:
            for member in tar:
                name = member.name.encode("utf-8", "surrogateescape")
                if any(part in (b"", b".", b"..") or part.lower() == b".git" for part in name.split(b"/")):
                    raise IntegrityError(f"{packed}: no git tree has a file {member.name!r}")
                if not (member.isreg() or member.issym()):
                    raise IntegrityError(f"{packed}: {member.name!r} is neither file nor link")
                stream = tar.extractfile(member) if member.isreg() else None
                yield name, member, stream or io.BytesIO()  # type: ignore[misc]
    except (tarfile.TarError, EOFError) as error:
        raise IntegrityError(f"{packed} is no whole archive: {error}") from error


def _blob(stream: io.BufferedIOBase, size: int) -> bytes:
    hasher = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    while chunk := stream.read(_CHUNK):
        hasher.update(chunk)
    return hasher.digest()


def _tree(folder: Folder) -> bytes:
    """Git sorts a folder as if its name ended with a slash."""
    rows = []
    for name, item in folder.items():
        if isinstance(item, dict):
            rows.append((name + b"/", _FOLDER + b" " + name + b"\0" + _tree(item)))
        else:
            rows.append((name, item[0] + b" " + name + b"\0" + item[1]))
    content = b"".join(row for _, row in sorted(rows))
    return hashlib.sha1(b"tree %d\0" % len(content) + content, usedforsecurity=False).digest()
