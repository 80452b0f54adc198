"""Write a wheel whose bytes depend on its content alone: sorted members, one time stamp, fixed modes, no compression level
of a library's choosing."""

from __future__ import annotations

import base64
import hashlib
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path


def write_wheel(
    folder: Path,
    *,
    name: str,
    version: str,
    tag: str,
    members: Mapping[str, bytes | Path],
    epoch: int,
    summary: str,
    headers: Mapping[str, str] | None = None,
) -> Path:
    """Write `name`-`version`-`tag`.whl into `folder` and return its path.

    `members` are paths inside the wheel with their content or the file that has it; `epoch` (seconds) is every member's
    time stamp; METADATA, WHEEL and RECORD are made here.
    """
    info = f"{name}-{version}.dist-info"
    metadata = [
        "Metadata-Version: 2.1",
        f"Name: {name.replace('_', '-')}",
        f"Version: {version}",
        f"Summary: {summary}",
        *(f"{key}: {value}" for key, value in (headers or {}).items()),
    ]
    wheel = ["Wheel-Version: 1.0", "Generator: sm120-forge", "Root-Is-Purelib: false", f"Tag: {tag}"]
    content: dict[str, bytes | Path] = {
        **members,
        f"{info}/METADATA": ("\n".join(metadata) + "\n").encode(),
        f"{info}/WHEEL": ("\n".join(wheel) + "\n").encode(),
    }
    target = folder / f"{name}-{version}-{tag}.whl"
    stamp = time.gmtime(epoch)[:6]
    record = []
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for path in sorted(content):
            source = content[path]
            data = source.read_bytes() if isinstance(source, Path) else source
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={digest},{len(data)}")
            _add(archive, path, data, stamp)
        record.append(f"{info}/RECORD,,")
        _add(archive, f"{info}/RECORD", ("\n".join(record) + "\n").encode(), stamp)
    return target


def _add(archive: zipfile.ZipFile, path: str, data: bytes, stamp: tuple[int, ...]) -> None:
    member = zipfile.ZipInfo(path, (stamp[0], stamp[1], stamp[2], stamp[3], stamp[4], stamp[5]))
    member.compress_type = zipfile.ZIP_DEFLATED
    member.create_system = 3
    member.external_attr = (0o100755 if path.endswith(".so") else 0o100644) << 16
    archive.writestr(member, data)
