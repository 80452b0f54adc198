"""File name, METADATA and WHEEL must say the same, and must fit what is inside."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser

from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import Tag, parse_tag
from packaging.utils import InvalidWheelFilename, NormalizedName, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from forge_build.wheel_check import archive as archives
from forge_build.wheel_check.families import LEGACY_TAGS
from forge_core.model import Finding

_MANYLINUX = re.compile(r"^manylinux_(\d+)_(\d+)_x86_64$")
_LEGACY = re.compile(r"^(manylinux(?:1|2010|2014))_x86_64$")


@dataclass(frozen=True)
class Named:
    """What a wheel's file name says."""

    name: NormalizedName
    version: Version
    build: str
    """Build number with its suffix, or empty."""
    tags: frozenset[Tag]


def named(file: str) -> tuple[Named | None, list[Finding]]:
    """Read a file name by PEP 427."""
    try:
        name, version, build, tags = parse_wheel_filename(file)
    except (InvalidWheelFilename, InvalidVersion) as error:
        return None, [Finding(kind="file-name", where=file, message=str(error))]
    return Named(name, version, "".join(map(str, build)), tags), []


def dist_info(archive: zipfile.ZipFile, wheel: str) -> tuple[str | None, list[Finding]]:
    """The one `.dist-info` folder at the top; none with a finding when there is not exactly one."""
    found = sorted({n.split("/", 1)[0] for n in archive.namelist() if n.split("/", 1)[0].endswith(".dist-info")})
    if len(found) == 1:
        return found[0], []
    message = f"has {len(found)} .dist-info folders" + (f": {', '.join(found)}" if found else "")
    return None, [Finding(kind="metadata", where=wheel, message=message)]


def requirements(archive: zipfile.ZipFile, folder: str | None) -> Iterator[Requirement]:
    """What the METADATA of `folder` (the .dist-info) requires; a malformed line is left out."""
    headers = _headers(archive, f"{folder}/METADATA") if folder else None
    for text in headers.get_all("Requires-Dist", []) if headers else []:
        with suppress(InvalidRequirement):
            yield Requirement(text)


def check(
    archive: zipfile.ZipFile, named: Named | None, folder: str, wheel: str, shared_objects: Sequence[str]
) -> Iterator[Finding]:
    """Compare `folder` (the .dist-info), METADATA and WHEEL with the file name and the shared objects inside."""
    metadata = _headers(archive, f"{folder}/METADATA")
    wheel_file = _headers(archive, f"{folder}/WHEEL")
    if metadata is None:
        yield Finding(kind="metadata", where=f"{folder}/METADATA", message="is missing")
    if wheel_file is None:
        yield Finding(kind="metadata", where=f"{folder}/WHEEL", message="is missing")
    if named is not None:
        stem, _, version = folder.removesuffix(".dist-info").rpartition("-")
        yield from _same(folder, "folder", stem, version, named, wheel)
        if metadata is not None:
            name, version = metadata.get("Name", ""), metadata.get("Version", "")
            yield from _same(f"{folder}/METADATA", "Name and Version", name, version, named, wheel)
    if wheel_file is not None:
        yield from _wheel_file(wheel_file, f"{folder}/WHEEL", named, wheel, shared_objects)


def _same(where: str, what: str, name: str, version: str, named: Named, wheel: str) -> Iterator[Finding]:
    try:
        equal_version = Version(version) == named.version
    except InvalidVersion:
        equal_version = False
    if canonicalize_name(name) != named.name:
        yield Finding(kind="metadata", where=where, message=f"{what} say name {name!r}, the file name {named.name!r}")
    if not equal_version:
        message = f"{what} say version {version!r}, the file name {str(named.version)!r}"
        yield Finding(kind="metadata", where=where, message=message)


def _wheel_file(
    headers: Message, where: str, named: Named | None, wheel: str, shared_objects: Sequence[str]
) -> Iterator[Finding]:
    if not re.fullmatch(r"1\.\d+", headers.get("Wheel-Version", "")):
        message = f"Wheel-Version is {headers.get('Wheel-Version')!r}, known is 1.x"
        yield Finding(kind="metadata", where=where, message=message)
    tags: frozenset[Tag] = frozenset().union(*map(_tags, headers.get_all("Tag", [])))
    if named is not None:
        if tags != named.tags:
            ours, theirs = (", ".join(sorted(map(str, t))) or "none" for t in (tags, named.tags))
            yield Finding(kind="metadata", where=where, message=f"tags are {ours}; the file name's are {theirs}")
        if headers.get("Build", "") != named.build:
            message = f"build is {headers.get('Build', '')!r}, the file name's is {named.build!r}"
            yield Finding(kind="metadata", where=where, message=message)
    purelib = headers.get("Root-Is-Purelib", "").lower()
    if purelib not in ("true", "false"):
        yield Finding(kind="metadata", where=where, message=f"Root-Is-Purelib is {purelib!r}, not true or false")
    if shared_objects:
        all_tags = tags | (named.tags if named else frozenset())
        if purelib == "true":
            message = f"Root-Is-Purelib is true, but it holds {shared_objects[0]}"
            yield Finding(kind="pure-with-object", where=where, message=message)
        if any(t.platform == "any" for t in all_tags):
            message = f"the platform tag is `any`, but it holds {shared_objects[0]}"
            yield Finding(kind="pure-with-object", where=wheel, message=message)


def glibc_limits(named: Named | None, platform: str | None) -> Iterator[tuple[str, tuple[int, int]]]:
    """What the newest glibc version asked for must not exceed: (tag or platform, version).

    The oldest manylinux tag of the file name counts, for the wheel claims to run on each. `platform` is the target's, as
    uv spells it (`x86_64-manylinux_2_36`).
    """
    promised = []
    for tag in {t.platform for t in named.tags} if named else ():
        if match := _MANYLINUX.match(tag):
            promised.append(((int(match[1]), int(match[2])), tag))
        elif match := _LEGACY.match(tag):
            promised.append((LEGACY_TAGS[match[1]], tag))
    if promised:
        version, tag = min(promised)
        yield tag, version
    if platform and (match := re.fullmatch(r"x86_64-manylinux_(\d+)_(\d+)", platform)):
        yield platform, (int(match[1]), int(match[2]))


def _headers(archive: zipfile.ZipFile, member: str) -> Message | None:
    content = archives.text(archive, member)
    return None if content is None else HeaderParser().parsestr(content)


def _tags(text: str) -> frozenset[Tag]:
    return parse_tag(text) if text.count("-") == 2 else frozenset({Tag(text, "?", "?")})
