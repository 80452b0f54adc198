"""The manifest: what we intend to build. Every mistake is reported at once, at its path in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from forge_build.manifest.git import GitDependency, GitSource
from forge_build.manifest.models import (
    AllowedConflict,
    AllowedFile,
    Base,
    BuiltWheel,
    CompileCheck,
    DemandedInstruction,
    Environment,
    Image,
    Index,
    Manifest,
    Model,
    Rootfs,
    Source,
    Target,
)
from forge_build.manifest.reading import read, read_yaml
from forge_core.cli import project_root
from forge_core.errors import UsageError


def manifests_folder() -> Path:
    """`build/manifests` of the checkout: user data, edited by people, so it lies beside the package."""
    return project_root() / "build" / "manifests"


def profiles() -> tuple[str, ...]:
    """Names of the profiles that have a manifest, sorted."""
    return tuple(sorted(p.stem for p in manifests_folder().glob("*.yaml") if not p.name.endswith(".lock.yaml")))


def known(profile: str | None) -> str:
    """The profile, if it has a manifest; raises UsageError (exit 2) that names those that do."""
    names = profiles()
    if profile is None:
        raise UsageError("no --profile given", hint=f"profiles: {', '.join(names)}; e.g. `-- --profile rehearsal`")
    if profile not in names:
        raise UsageError(f"no profile {profile!r}", hint=f"profiles: {', '.join(names)}")
    return profile


def load(profile: str | None) -> Manifest:
    """Read the manifest of a profile; raises UsageError (exit 2) naming every mistake with its path in the file."""
    name = known(profile)
    return parse(manifests_folder() / f"{name}.yaml", name)


def parse(path: Path, profile: str | None = None) -> Manifest:
    """Read a manifest file; raises UsageError with one detail per mistake."""
    data, wrong = read(path)
    manifest = None
    try:
        manifest = Manifest.model_validate(data)
    except ValidationError as error:
        wrong += mistakes(error)
    if wrong or manifest is None:
        raise UsageError(
            f"{path}: {len(wrong)} mistake{'s' if len(wrong) > 1 else ''}",
            details=wrong,
            hint="`python -m forge_build schema` prints the JSON schema for your editor",
        )
    if profile is not None and manifest.profile != profile:
        raise UsageError(f"{path}: profile is {manifest.profile!r}, but the file is named {profile!r}")
    return manifest


def mistakes(error: ValidationError) -> tuple[str, ...]:
    """One line per mistake: the path in the file, what is wrong, and what stands there."""
    lines = []
    for item in error.errors(include_url=False):
        where = ".".join(str(part) for part in item["loc"]) or "(top level)"
        text = item["msg"].removeprefix("Value error, ")
        given = item.get("input")
        shown = f" (found {given!r})" if isinstance(given, str | int | float | bool) else ""
        lines.append(f"{where}: {text}{shown}")
    return tuple(lines)


def json_schema() -> dict[str, Any]:
    """JSON schema of a manifest, for editors."""
    return Manifest.model_json_schema(by_alias=True)


__all__ = [
    "AllowedConflict",
    "AllowedFile",
    "Base",
    "BuiltWheel",
    "CompileCheck",
    "DemandedInstruction",
    "Environment",
    "GitDependency",
    "GitSource",
    "Image",
    "Index",
    "Manifest",
    "Model",
    "Rootfs",
    "Source",
    "Target",
    "json_schema",
    "known",
    "load",
    "manifests_folder",
    "mistakes",
    "parse",
    "profiles",
    "read_yaml",
]
