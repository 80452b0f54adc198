"""The manifest's words for sources from git, and for what their CMake files take by name."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from forge_build.manifest.text import Name, git_address, version_text
from forge_core.model import Frozen, GitOid


def _inner_path(text: str) -> str:
    if any(part in (".", "..") for part in text.split("/")):
        raise ValueError(f"{text!r} leaves the tree or names it in a roundabout way")
    return text


InnerPath = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9_.+-]+(/[A-Za-z0-9_.+-]+)*$"), AfterValidator(_inner_path)
]
"""A file or folder inside a tree, with forward slashes."""


class GitDependency(Frozen):
    """A repository that a source's CMake files take by name (`FetchContent_Declare`)."""

    url: Annotated[str, AfterValidator(git_address)]
    """Address of the repository."""
    commit: GitOid | None = None
    """None: what the `tag` names when it is locked."""
    tag: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.+/-]+$")] | None = None
    """What the tree says, where it names no commit; beside a `commit` it is compared with the tree and not looked up."""
    paths: tuple[InnerPath, ...] = ()
    """The files and folders that are needed; none: all."""
    needed: bool = True
    """False: a patch drops it, and nothing of it enters the build."""
    reason: Annotated[str, StringConstraints(min_length=15)] | None = None
    """Why it is not needed."""
    of: Name | None = None
    """The dependency whose own CMake files declare it; none: the source's do."""
    declared: str | None = None
    """The archive's address, where the tree declares one; `url` and `commit` are then what stands for it."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.commit is None and self.tag is None:
            raise ValueError("`commit` or `tag` must be given")
        if self.needed == (self.reason is not None):
            raise ValueError("`needed: false` needs a `reason`, and nothing else has one")
        for first, second in pairwise(sorted(f"{path}/" for path in self.paths)):
            if second.startswith(first):
                raise ValueError(f"paths: {second[:-1]!r} lies in {first[:-1]!r}, or is named twice")
        return self


class GitSource(Frozen):
    """A source tree in a git repository."""

    url: Annotated[str, AfterValidator(git_address)]
    """Address of the repository; the user's git may send it elsewhere (`url.<base>.insteadOf`), the commit is what counts."""
    commit: GitOid
    version: Annotated[str, AfterValidator(version_text)]
    """What the tree calls itself; the patches' `Applies-To` ranges are held against it."""
    subfolder: InnerPath | None = None
    """The tree that is built, where it is not the repository's whole."""
    dependencies: dict[Name, GitDependency] = Field(default_factory=dict)
    """By the name that CMake has for each, in lower case; every one that the tree declares must be here."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        for name, item in self.dependencies.items():
            owner = self.dependencies.get(item.of) if item.of else None
            if item.of and (owner is None or owner.of or not owner.needed):
                raise ValueError(f"dependencies.{name}.of: {item.of!r} is no needed dependency of the source itself")
        return self
