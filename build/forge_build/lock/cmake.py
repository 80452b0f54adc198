"""What CMake files declare to fetch: read, not run; enough of the language to see names, repositories and tags."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_TOKEN = re.compile(
    r"""
    \#\[(?P<c>=*)\[.*?\](?P=c)\]        # bracket comment
  | \#[^\n]*                            # comment
  | "(?P<quoted>(?:[^"\\]|\\.)*)"
  | \[(?P<b>=*)\[(?P<bracket>.*?)\](?P=b)\]
  | (?P<paren>[()])
  | (?P<word>[^\s()#"]+)
    """,
    re.VERBOSE | re.DOTALL,
)
_VARIABLE = re.compile(r"\$\{([\w.+-]+)\}")
_KEYWORDS = ("GIT_REPOSITORY", "GIT_TAG", "URL")


@dataclass(frozen=True)
class Declaration:
    """One `FetchContent_Declare`."""

    name: str
    """In lower case: CMake does not tell cases apart here."""
    repository: str | None
    tag: str | None
    """Commit, tag or branch, as it stands there."""
    url: str | None
    """Of an archive, where it is no repository."""
    where: str
    """File and line."""

    def __str__(self) -> str:
        return f"{self.url or self.repository} {self.tag or ''}".strip()


def declarations(tree: Path) -> dict[str, tuple[Declaration, ...]]:
    """By name, what `CMakeLists.txt` and `cmake/*.cmake` of a tree declare; several where conditions choose among them.

    A variable is replaced by what a plain `set(NAME VALUE)` of the same files gives it, as far as they do.
    """
    found: dict[str, list[Declaration]] = {}
    variables: dict[str, str] = {}
    files = [tree / "CMakeLists.txt", *sorted((tree / "cmake").glob("*.cmake"))]
    for path in files:
        if not path.is_file() or path.is_symlink():
            continue
        for command, line, words in _commands(path.read_text(encoding="utf-8", errors="replace")):
            words = [_VARIABLE.sub(lambda match: variables.get(match[1], match[0]), word) for word in words]
            if command == "set" and len(words) == 2:
                variables[words[0]] = words[1]
            elif command == "fetchcontent_declare" and words:
                given = _given(words[1:])
                where = f"{path.relative_to(tree).as_posix()}:{line}"
                name = words[0].lower()
                found.setdefault(name, []).append(
                    Declaration(name, given.get("GIT_REPOSITORY"), given.get("GIT_TAG"), given.get("URL"), where)
                )
    return {name: tuple(items) for name, items in found.items()}


def _given(words: list[str]) -> Mapping[str, str]:
    return {word: value for word, value in pairwise(words) if word in _KEYWORDS}


def _commands(text: str) -> Iterator[tuple[str, int, list[str]]]:
    """Name in lower case, line and arguments of each command."""
    words: list[str] = []
    name, line, depth, last = "", 0, 0, ""
    for match in _TOKEN.finditer(text):
        paren, word = match["paren"], match["word"]
        if paren == "(":
            depth += 1
            if depth == 1:
                name, line, words = last.lower(), text.count("\n", 0, match.start()) + 1, []
        elif paren == ")":
            depth = max(0, depth - 1)
            if depth == 0:
                yield name, line, words
        else:
            value = next((v for v in (match["quoted"], match["bracket"], word) if v is not None), None)
            if value is None:
                continue
            if depth == 0:
                last = value
            else:
                words.append(value)
