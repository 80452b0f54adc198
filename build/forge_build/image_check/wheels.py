"""What a wheel's RECORD says, in the short form in which the image tells of the installed one."""

from __future__ import annotations

import csv
import hashlib
import io
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

from packaging.utils import canonicalize_name

from forge_core.errors import IntegrityError

_RECORD = re.compile(r"^(?P<name>[^/-]+)-[^/]+\.dist-info/RECORD$")
_DATA = re.compile(r"^[^/]+\.data/(?P<scheme>[^/]+)/(?P<path>.+)$")
_INSTALLERS = re.compile(r"^[^/]+\.dist-info/(?:INSTALLER|REQUESTED|direct_url\.json|RECORD)$")


def record_digest(wheel: Path) -> tuple[str, str]:
    """The distribution's normalised name, and sha256 (hex) over the rows of its RECORD that an installation must keep.

    Those of scripts and data are left out (they are installed elsewhere and rewritten), as are an installer's own notes.
    Raises IntegrityError when the file is no wheel or has no RECORD.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            (found,) = (match for name in archive.namelist() if (match := _RECORD.match(name)))
            rows = list(csv.reader(io.StringIO(archive.read(found[0]).decode())))
    except (zipfile.BadZipFile, ValueError) as error:
        raise IntegrityError(f"{wheel} is no wheel with one RECORD: {error}") from error
    return canonicalize_name(found["name"]), _digest(rows)


def _digest(rows: Sequence[Sequence[str]]) -> str:
    kept = []
    for path, recorded, _ in rows:
        if data := _DATA.match(path):
            if data["scheme"] not in ("purelib", "platlib"):
                continue
            path = data["path"]
        if recorded and not _INSTALLERS.match(path):
            kept.append(f"{path},{recorded}")
    return hashlib.sha256("\n".join(sorted(kept)).encode()).hexdigest()
