"""What makes an image large: bytes per wheel, per package of the distribution, and per layer."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal
from zipfile import BadZipFile, ZipFile

from rich.table import Table

from forge_core.console import size
from forge_core.errors import IntegrityError
from forge_core.files import write_text
from forge_core.model import Frozen, ImageRef

FILE_NAME = "sizes.json"

_LIST = re.compile(r"^var/lib/dpkg/info/(?P<name>[^/:]+)(?::[^/]+)?\.list$")


class Part(Frozen):
    """One component."""

    kind: Literal["wheel", "built", "deb", "rest"]
    """`built`: a wheel made here; `rest`: files of the base that belong to no package."""
    name: str
    version: str
    size: int
    """Bytes of its files in the image, uncompressed."""


class Layer(Frozen):
    """One layer."""

    step: str
    """The instruction that made it."""
    size: int
    """Bytes as a registry stores it, compressed."""


class Sizes(Frozen):
    """An image's components and layers, each sorted: components by size, layers as they lie on each other."""

    image: ImageRef
    compressed: int
    """Bytes, layers and config."""
    parts: tuple[Part, ...]
    layers: tuple[Layer, ...]

    @property
    def uncompressed(self) -> int:
        """Bytes of all components."""
        return sum(part.size for part in self.parts)


def measure(
    image: ImageRef,
    compressed: int,
    layers: Iterable[tuple[str, int]],
    wheels: Mapping[tuple[str, str], Path],
    built: Mapping[tuple[str, str], Path],
    rootfs: Path | None,
    debs: Mapping[str, str],
) -> Sizes:
    """Add up what the image was made of.

    `wheels` and `built` map (name, version) to the wheel's file, `debs` names to versions; `rootfs` is none for a base of a
    registry, whose packages are not told apart. Raises IntegrityError when a file cannot be read.
    """
    parts = [_wheel("wheel", *key, path) for key, path in wheels.items()]
    parts += [_wheel("built", *key, path) for key, path in built.items()]
    for name, amount in (packages(rootfs) if rootfs else {}).items():
        kind: Literal["deb", "rest"] = "deb" if name else "rest"
        label = name or "files of no package"
        parts.append(Part(kind=kind, name=label, version=debs.get(name, ""), size=amount))
    return Sizes(
        image=image,
        compressed=compressed,
        parts=tuple(sorted(parts, key=lambda part: (-part.size, part.name))),
        layers=tuple(Layer(step=step, size=amount) for step, amount in layers),
    )


def _wheel(kind: Literal["wheel", "built"], name: str, version: str, path: Path) -> Part:
    try:
        with ZipFile(path) as archive:
            amount = sum(member.file_size for member in archive.infolist())
    except (OSError, BadZipFile) as error:
        raise IntegrityError(f"{path} is no wheel: {error}") from error
    return Part(kind=kind, name=name, version=version, size=amount)


def packages(rootfs: Path) -> dict[str, int]:
    """Bytes of the files of each package of a root file system; those of none under the empty name."""
    files: dict[str, int] = {}
    owner: dict[str, str] = {}
    try:
        with tarfile.open(rootfs) as tar:
            for member in tar:
                path = member.name.removeprefix("./")
                if not member.isfile():
                    continue
                files[path] = member.size
                if match := _LIST.match(path):
                    stream = tar.extractfile(member)
                    assert stream is not None
                    listed = stream.read().decode(errors="replace").split("\n")
                    owner |= dict.fromkeys((line.removeprefix("/") for line in listed), match["name"])
    except (OSError, tarfile.TarError) as error:
        raise IntegrityError(f"{rootfs} is no root file system: {error}") from error
    found: dict[str, int] = {}
    for path, amount in files.items():
        # /bin and /lib are links into /usr, packages name both
        name = owner.get(path) or owner.get(path.removeprefix("usr/")) or ""
        found[name] = found.get(name, 0) + amount
    return found


def write(sizes: Sizes, target: Path) -> None:
    """Write them as JSON, atomically."""
    write_text(target, sizes.model_dump_json(indent=1) + "\n")


def table(sizes: Sizes, most: int = 20) -> Table:
    """The largest components, and the sum of the others."""
    shown = Table(title=f"{size(sizes.uncompressed)} uncompressed, {size(sizes.compressed)} as a registry stores it")
    for heading in ("component", "version", "kind"):
        shown.add_column(heading)
    shown.add_column("size", justify="right")
    shown.add_column("share", justify="right")
    total = max(1, sizes.uncompressed)
    rows: list[tuple[str, str, str, int]] = [(p.name, p.version, p.kind, p.size) for p in sizes.parts[:most]]
    if others := sizes.parts[most:]:
        rows.append((f"{len(others)} others", "", "", sum(p.size for p in others)))
    for name, version, kind, amount in rows:
        shown.add_row(name, version, kind, size(amount), f"{amount / total:.1%}")
    return shown


def largest(sizes: Sizes, most: int = 6) -> str:
    """The largest components in one line."""
    return ", ".join(f"{part.name} {size(part.size)}" for part in sizes.parts[:most])
