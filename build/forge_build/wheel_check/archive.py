"""The wheel as a zip: member names, RECORD, and its objects streamed to a folder (never held in memory)."""

from __future__ import annotations

import lzma
import re
import stat
import time
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, BinaryIO, cast

from installer.records import InvalidRecordEntry, RecordEntry, parse_record_file

from forge_build.wheel_check import elf
from forge_core.errors import IntegrityError, Refused, UsageError
from forge_core.model import Finding

SHARED_OBJECT = re.compile(r"\.so(?:\.\d+)*$")

# A fatbin file: device code for several architectures without an ELF around it.
FATBIN_MAGIC = b"\x50\xed\x55\xba"

_CHUNK = 1 << 20
# PEP 427: sha256 or better.
_HASHES = frozenset({"sha256", "sha384", "sha512"})
_TEXT_LIMIT = 64 << 20
_DAMAGE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ValueError)


@dataclass(frozen=True)
class Object:
    """A member that a loader would map, streamed out of the archive."""

    member: str
    path: Path
    size: int
    """Bytes."""


@contextmanager
def opened(wheel: Path, *, locked: bool = False) -> Iterator[zipfile.ZipFile]:
    """Open a wheel's zip.

    Raises UsageError when there is no such file, Refused when it is no zip (IntegrityError for a `locked` one, whose
    bytes were named), IntegrityError when a member's bytes contradict the archive's own check sum.
    """
    try:
        archive = zipfile.ZipFile(wheel)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UsageError(f"{wheel} is no file") from error
    # zipfile's own word for archives in several parts
    except (*_DAMAGE, NotImplementedError) as error:
        kind = IntegrityError if locked else Refused
        raise kind(f"{wheel.name} cannot be read as a wheel: {error}", hint="make or fetch it again") from error
    with archive:
        try:
            yield archive
        except _DAMAGE as error:
            raise IntegrityError(f"{wheel.name} is damaged: {error}", hint="make or fetch it again") from error
        except (NotImplementedError, RuntimeError) as error:
            # zipfile's own words: NotImplementedError for an unknown compression method, RuntimeError for encryption
            raise Refused(f"{wheel.name} cannot be unpacked: {error}") from error


def text(archive: zipfile.ZipFile, member: str) -> str | None:
    """A small text member, or none if there is no such member."""
    try:
        info = archive.getinfo(member)
    except KeyError:
        return None
    with archive.open(info) as stream:
        return stream.read(_TEXT_LIMIT).decode(errors="replace")


def check_names(archive: zipfile.ZipFile, wheel: str, epoch: int | None) -> Iterator[Finding]:
    """Members that an installer would write twice, elsewhere or as a link; time stamps after `epoch` (seconds)."""
    for name, times in sorted(Counter(i.filename for i in archive.infolist()).items()):
        if times > 1:
            yield Finding(kind="duplicate-member", where=name, message=f"is in the archive {times} times")
        if name.startswith("/") or "\\" in name or ".." in PurePosixPath(name).parts:
            yield Finding(kind="unsafe-path", where=name, message="would be written outside the install folder")
    for info in archive.infolist():
        if stat.S_ISLNK(info.external_attr >> 16):
            yield Finding(kind="unsafe-path", where=info.filename, message="is a symbolic link")
    if epoch is not None:
        newest = time.gmtime(epoch)[:6]
        late = [i.filename for i in archive.infolist() if i.date_time > newest]
        if late:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(epoch))
            more = f" and {len(late) - 1} more" if len(late) > 1 else ""
            yield Finding(kind="newer-than-epoch", where=wheel, message=f"{late[0]}{more} dated after {stamp} UTC")


def unpack(archive: zipfile.ZipFile, dist_info: str | None, folder: Path) -> tuple[list[Object], list[Finding]]:
    """Hold every member to RECORD and stream the objects to `folder`, in one pass over the bytes."""
    entries, findings = _record(archive, dist_info)
    listed = set(entries)
    objects = []
    for number, info in enumerate(archive.infolist()):
        if info.is_dir():
            continue
        listed.discard(info.filename)
        with archive.open(info) as stream:
            head = cast(zipfile.ZipExtFile, stream).peek(4)[:4]
            target = _target(head, info, folder / f"{number:05d}")
            with _Tee(stream, target) as tee:
                message = _against_record(info.filename, entries, dist_info, tee)
                tee.drain()
        if message:
            findings.append(Finding(kind="record", where=info.filename, message=message))
        if target is not None:
            objects.append(Object(info.filename, target, info.file_size))
    findings += [
        Finding(kind="record", where=name, message="is in RECORD but not in the wheel") for name in sorted(listed)
    ]
    return sorted(objects, key=lambda o: o.member), findings


def _target(head: bytes, info: zipfile.ZipInfo, folder: Path) -> Path | None:
    """Where a member goes if it is an object (by its first bytes or its name): cuobjdump repeats the file's own name."""
    name = PurePosixPath(info.filename).name
    if head not in (elf.MAGIC, FATBIN_MAGIC) and not SHARED_OBJECT.search(name):
        return None
    folder.mkdir()
    return folder / (name.replace("..", "_")[-120:] or "object")


def _record(archive: zipfile.ZipFile, dist_info: str | None) -> tuple[dict[str, RecordEntry], list[Finding]]:
    where = f"{dist_info}/RECORD"
    content = text(archive, where) if dist_info else None
    if content is None:
        return {}, [Finding(kind="record", where=where if dist_info else "RECORD", message="is missing")]
    entries: dict[str, RecordEntry] = {}
    findings = []
    try:
        rows = list(parse_record_file(content.splitlines()))
    except (InvalidRecordEntry, ValueError) as error:
        return {}, [Finding(kind="record", where=where, message=f"is malformed: {error}")]
    for row in rows:
        try:
            entry = RecordEntry.from_elements(*row)
        except InvalidRecordEntry as error:
            findings.append(Finding(kind="record", where=where, message=f"{row[0]}: {error}"))
            continue
        if entry.path in entries:
            findings.append(Finding(kind="record", where=where, message=f"lists {entry.path} twice"))
        entries[entry.path] = entry
    return entries, findings


def _against_record(name: str, entries: dict[str, RecordEntry], dist_info: str | None, stream: _Tee) -> str | None:
    """What is wrong with one member by RECORD, or none; reads the stream."""
    entry = entries.get(name)
    if name in (f"{dist_info}/RECORD.jws", f"{dist_info}/RECORD.p7s"):
        return "a signature must not be listed in RECORD" if entry else None
    if entry is None:
        return "is not listed in RECORD" if entries else None
    if name == f"{dist_info}/RECORD":
        return "lists its own hash" if entry.hash_ or entry.size is not None else None
    if entry.hash_ is None or entry.size is None:
        return "has no hash or size in RECORD"
    if entry.hash_.name not in _HASHES:
        return f"has a {entry.hash_.name} in RECORD; sha256 or better is required"
    return None if entry.validate_stream(cast(BinaryIO, stream)) else "differs from its hash and size in RECORD"


class _Tee:
    """A stream that also writes what is read from it to a file, so that bytes are unpacked once."""

    def __init__(self, stream: IO[bytes], target: Path | None) -> None:
        self._stream = stream
        self._sink = target.open("wb") if target else None

    def __enter__(self) -> _Tee:
        return self

    def __exit__(self, *_: object) -> None:
        if self._sink:
            self._sink.close()

    def read(self, amount: int = _CHUNK) -> bytes:
        data = self._stream.read(amount)
        if self._sink:
            self._sink.write(data)
        return data

    def drain(self) -> None:
        """Read the rest: the archive's own check sum is compared at the end of a member."""
        while self.read():
            pass
