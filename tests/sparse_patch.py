"""What a series of patches knows of the files it changes: the lines of its hunks, each at its place before the first patch."""

import re
from dataclasses import dataclass
from pathlib import Path

_FILE = re.compile(r"^\+\+\+ b/(\S+)")
_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass
class Hunk:
    """One hunk: where its lines begin, and what they are, before and after."""

    old_start: int
    new_start: int
    old: list[str]
    new: list[str]


def hunks(text: str) -> dict[str, list[Hunk]]:
    """The hunks of a unified diff by file."""
    found: dict[str, list[Hunk]] = {}
    file, left = "", [0, 0]
    for line in text.splitlines():
        if any(left):
            kind, rest = line[:1] or " ", line[1:]
            if kind in " -":
                found[file][-1].old.append(rest)
                left[0] -= 1
            if kind in " +":
                found[file][-1].new.append(rest)
                left[1] -= 1
        elif match := _FILE.match(line):
            file = match[1]
            found.setdefault(file, [])
        elif match := _HUNK.match(line):
            left = [int(match[2] or 1), int(match[4] or 1)]
            found[file].append(Hunk(int(match[1]), int(match[3]), [], []))
    return found


def before(folder: Path) -> dict[str, dict[int, str]]:
    """Per file, line number -> line, as the files are before the first patch of the series in `folder`."""
    known: dict[str, dict[int, str]] = {}
    for name in reversed((folder / "series").read_text(encoding="utf-8").split()):
        for file, changes in hunks((folder / name).read_text(encoding="utf-8")).items():
            known[file] = _undone(known.get(file, {}), changes, f"{name}: {file}")
    return known


def _undone(after: dict[int, str], changes: list[Hunk], where: str) -> dict[int, str]:
    """What is known of a file before a patch, from what is known of it after the patch, and the patch."""
    found = {}
    for number, line in after.items():
        moved = number
        for hunk in changes:
            end = hunk.new_start + len(hunk.new)
            if hunk.new_start <= number < end:
                made = hunk.new[number - hunk.new_start]
                assert made == line, f"{where}:{number}: the patch leaves {made!r}, a later one finds {line!r}"
                break
            if number >= end:
                moved += len(hunk.old) - len(hunk.new)
        else:
            found[moved] = line
    return found | {hunk.old_start + n: line for hunk in changes for n, line in enumerate(hunk.old)}


def filled(known: dict[int, str], gaps: dict[str, str]) -> str:
    """A whole file: the known lines at their places, and between them what `gaps` says.

    A key of `gaps` is part of one of the first lines that follow the gap, or empty for what follows the last known line. Each text
    must be used once, and must fit.
    """
    rest, lines = dict(gaps), []
    previous = 0
    for number in sorted(known):
        if number != previous + 1:
            room = number - previous - 1
            ahead = [known.get(number + n, "") for n in range(5)]
            key = next((key for key in rest if key and any(key in line for line in ahead)), None)
            assert key is not None, f"nothing is written for the {room} lines before line {number}: {ahead}"
            text = rest.pop(key).strip("\n").splitlines()
            assert len(text) <= room, f"{len(text)} lines before {ahead[0]!r}, there is room for {room}"
            lines += text + [""] * (room - len(text))
        lines.append(known[number])
        previous = number
    lines += rest.pop("", "").strip("\n").splitlines()
    assert not rest, f"the patches leave no gap for {sorted(rest)}"
    return "\n".join(lines) + "\n"
