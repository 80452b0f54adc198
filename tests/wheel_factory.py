"""Makes real wheels, right and wrong, from C sources."""

import base64
import hashlib
import subprocess
import zipfile
from pathlib import Path

TAG = "cp311-cp311-manylinux_2_36_x86_64"


def shared_object(folder: Path, name: str, source: str, *options: str | Path) -> Path:
    """Compile C to a shared object with the machine's gcc."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    command = ["gcc", "-shared", "-fPIC", "-O0", "-fno-builtin", "-x", "c", "-", "-x", "none", "-o", str(path)]
    done = subprocess.run([*command, *map(str, options)], input=source, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    return path


def make_wheel(
    folder: Path,
    members: dict[str, bytes | str | Path],
    *,
    name: str = "demo",
    version: str = "1.0",
    tag: str = TAG,
    file: str | None = None,
    metadata_version: str | None = None,
    purelib: bool = False,
    requires: tuple[str, ...] = (),
    date: tuple[int, ...] = (2020, 1, 1, 0, 0, 0),
    record: dict[str, str | None] | None = None,
    extra: dict[str, bytes] | None = None,
) -> Path:
    """Write a wheel that is right unless told otherwise.

    `record` replaces RECORD lines by member (None drops one); `extra` members are added behind RECORD's back.
    """
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    python, abi, platforms = tag.split("-")
    tags = "".join(f"Tag: {python}-{abi}-{platform}\n" for platform in platforms.split("."))
    content = {
        member: data.read_bytes() if isinstance(data, Path) else data.encode() if isinstance(data, str) else data
        for member, data in members.items()
    }
    content[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {metadata_version or version}\n"
        + "".join(f"Requires-Dist: {line}\n" for line in requires)
    ).encode()
    content[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: {str(purelib).lower()}\n{tags}".encode()
    )
    lines: dict[str, str | None] = {}
    for member, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines[member] = f"{member},sha256={digest},{len(data)}"
    lines[f"{info}/RECORD"] = f"{info}/RECORD,,"
    lines |= record or {}
    content[f"{info}/RECORD"] = "".join(f"{line}\n" for line in lines.values() if line is not None).encode()
    path = folder / (file or f"{name}-{version}-{tag}.whl")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in [*content.items(), *(extra or {}).items()]:
            archive.writestr(zipfile.ZipInfo(member, date), data, zipfile.ZIP_DEFLATED)
    return path
