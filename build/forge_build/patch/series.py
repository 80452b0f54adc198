"""A quilt series: the file `series` and its patches, each with a DEP-3 header."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from forge_core.cli import project_root
from forge_core.errors import UsageError

_FIELDS = ("Description", "Author", "Forwarded", "Last-Update", "Applies-To", "Retire-When")
# DEP-3's own values; anything else must say where it was sent.
_FORWARDED = re.compile(r"^(?:no|not-needed|yes|https?://\S+)$")
_END = re.compile(r"^(?:---(?:\s|$)|diff --git |Index: )", re.MULTILINE)
_HUNK = re.compile(r"^@@ -", re.MULTILINE)


@dataclass(frozen=True)
class Patch:
    """One patch of a series."""

    path: Path
    description: str
    """First line of its Description; the commit's message."""
    last_update: str
    """ISO date; the commit's date."""
    applies_to: SpecifierSet
    """Versions of the source it is for."""
    retire_when: str

    @property
    def name(self) -> str:
        """File name."""
        return self.path.name


def series_folder(source: str, series: str | None) -> Path | None:
    """`patches/<source>/<series>` of the checkout; raises UsageError when it has no `series` file."""
    if series is None:
        return None
    folder = project_root() / "patches" / source / series
    if not (folder / "series").is_file():
        raise UsageError(
            f"{folder} has no file `series`", hint="the manifest's `series` names a folder below patches/<source>"
        )
    return folder


def read_series(folder: Path) -> tuple[Patch, ...]:
    """Read `series` and the headers of each patch; raises UsageError naming file and field of every mistake."""
    patches: dict[str, Patch] = {}
    wrong: list[str] = []
    for line in (folder / "series").read_text(encoding="utf-8").splitlines():
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        name, *options = words
        path = folder / name
        if options not in ([], ["-p1"]):
            wrong.append(f"{name}: `{' '.join(options)}` in `series`: patches are made with -p1")
        elif name in patches:
            wrong.append(f"{name}: named twice in `series`")
        elif not path.resolve().is_relative_to(folder.resolve()) or not path.is_file():
            wrong.append(f"{name}: named in `series`, but there is no such file beside it")
        else:
            text = path.read_text(encoding="utf-8", errors="surrogateescape")
            end = _END.search(text)
            headers = HeaderParser().parsestr(text[: end.start() if end else None].rstrip() + "\n")
            found = [f"{name}: {mistake}" for mistake in _mistakes(headers, has_diff=bool(_HUNK.search(text)))]
            wrong += found
            if not found:
                patches[name] = _patch(path, headers)
    if wrong:
        count = f"{len(wrong)} mistake{'s' if len(wrong) > 1 else ''}"
        raise UsageError(f"{folder / 'series'}: {count}", details=tuple(wrong))
    return tuple(patches.values())


def _patch(path: Path, headers: Message) -> Patch:
    return Patch(
        path=path,
        description=headers["Description"].strip().splitlines()[0],
        last_update=headers["Last-Update"].strip(),
        applies_to=SpecifierSet(headers["Applies-To"]),
        retire_when=" ".join(headers["Retire-When"].split()),
    )


def _mistakes(headers: Message, *, has_diff: bool) -> Iterator[str]:
    """What is wrong with one patch's header, field by field."""
    if not has_diff:
        yield "holds no diff"
    body = str(headers.get_payload()).strip()
    if body:
        yield f"{body.splitlines()[0]!r} is no header field (a longer text is indented by one space)"
    for field in _FIELDS:
        values = headers.get_all(field, [])
        value = values[0].strip() if values else ""
        if len(values) > 1:
            yield f"{field}: given {len(values)} times"
        elif not value:
            yield f"{field}: missing"
        elif field == "Applies-To":
            try:
                SpecifierSet(value)
            except InvalidSpecifier:
                yield f"{field}: {value!r} is no version range (PEP 440), for example `>=0.6.5,<0.7`"
        elif field == "Last-Update":
            try:
                date.fromisoformat(value)
            except ValueError:
                yield f"{field}: {value!r} is no date (YYYY-MM-DD)"
        elif field == "Forwarded" and not _FORWARDED.match(value):
            yield f"{field}: {value!r} is neither no, not-needed, yes nor an address"
