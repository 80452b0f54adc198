"""Unpack a wheel that serves as a source tree."""

from __future__ import annotations

import shutil
import stat
import zipfile
import zlib
from pathlib import Path

from forge_core.errors import IntegrityError


def unpack_wheel(wheel: Path, into: Path) -> Path:
    """Unpack a wheel's files into the new folder `into` with fixed modes; returns it.

    Raises IntegrityError for a member that would leave the folder, or a broken archive.
    """
    into.mkdir(parents=True)
    root = into.resolve()
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.infolist():
                target = (root / member.filename).resolve()
                if not target.is_relative_to(root):
                    raise IntegrityError(f"{wheel.name}: its member {member.filename!r} leaves the folder")
                if member.is_dir():
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as source, target.open("wb") as sink:
                    shutil.copyfileobj(source, sink, 1 << 20)
                executable = (member.external_attr >> 16) & stat.S_IXUSR
                target.chmod(0o755 if executable else 0o644)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise IntegrityError(f"{wheel} is no whole wheel: {error}") from error
    return into
