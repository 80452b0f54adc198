"""Write a wheel whose bytes depend on its content alone: sorted, stored, one time stamp, one mode.

Stored, not compressed: deflate's output differs between versions of zlib.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

_MODE = 0o100644


def file_name(name: str, version: str, tag: str) -> str:
    """The wheel's file name (PEP 427) for a distribution's name."""
    return f"{name.replace('-', '_')}-{version}-{tag}.whl"


def write_wheel(
    target: Path,
    *,
    name: str,
    version: str,
    tag: str,
    members: Mapping[str, bytes],
    fields: Sequence[tuple[str, str]],
    description: str,
    licenses: Mapping[str, bytes],
    epoch: int,
) -> None:
    """Write a wheel of platform-dependent `members` (path in the wheel -> content) to `target`.

    `fields` are METADATA's beyond name, version and licence files; `licenses` go below `.dist-info/licenses`; `epoch` (seconds) is
    every member's time stamp. METADATA, WHEEL and RECORD are made here.
    """
    headers = [("Metadata-Version", "2.4"), ("Name", name), ("Version", version), *fields]
    headers += [("License-File", path) for path in sorted(licenses)]
    metadata = {f"licenses/{path}": data for path, data in licenses.items()}
    metadata["METADATA"] = ("".join(f"{k}: {v}\n" for k, v in headers) + f"\n{description}\n").encode()
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    write_members(target, info=info, members=members, metadata=metadata, tag=tag, epoch=epoch)


def write_members(
    target: Path, *, info: str, members: Mapping[str, bytes], metadata: Mapping[str, bytes], tag: str, epoch: int
) -> None:
    """Write a wheel whose metadata is made already: `metadata` goes below `info`, WHEEL and RECORD are made here."""
    content = {**members, **{f"{info}/{path}": data for path, data in metadata.items()}}
    pure = "true" if tag.endswith("-none-any") else "false"
    content[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: sm120-forge\nRoot-Is-Purelib: {pure}\nTag: {tag}\n".encode()
    )
    # The specification wants .dist-info at the end of the archive, RECORD last of all.
    ordered = sorted(content, key=lambda path: (path.startswith(f"{info}/"), path))
    ordered.append(f"{info}/RECORD")
    content[f"{info}/RECORD"] = _record(content, ordered)
    moment = datetime.fromtimestamp(epoch, UTC).timetuple()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for path in ordered:
            member = zipfile.ZipInfo(path, (moment[0], moment[1], moment[2], moment[3], moment[4], moment[5]))
            member.create_system = 3
            member.external_attr = _MODE << 16
            archive.writestr(member, content[path])


def _record(content: Mapping[str, bytes], ordered: Sequence[str]) -> bytes:
    rows = io.StringIO()
    table = csv.writer(rows, lineterminator="\n")
    for path in ordered[:-1]:
        digest = base64.urlsafe_b64encode(hashlib.sha256(content[path]).digest()).rstrip(b"=").decode()
        table.writerow([path, f"sha256={digest}", len(content[path])])
    table.writerow([ordered[-1], "", ""])
    return rows.getvalue().encode()
