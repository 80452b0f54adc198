"""The manifest: what we intend to build. Closed, frozen, every mistake reported at once at its path in the file."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from packaging.requirements import InvalidRequirement, Requirement
from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from forge_core.cli import project_root
from forge_core.errors import UsageError
from forge_core.model import Architecture, Frozen, GitOid, ImageRef, canonical_sha256

SCHEMA_VERSION = 1

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]*$")]


def _requirement(text: str) -> str:
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise ValueError(f"{text!r} is no PEP 508 requirement: {str(error).splitlines()[0]}") from error
    if requirement.url:
        raise ValueError(f"{text!r} names an address; a lock names packages, versions and sha256")
    return text


def _image(text: str) -> str:
    ImageRef.parse(text)
    return text


RequirementText = Annotated[str, AfterValidator(_requirement)]


class Target(Frozen):
    """What the wheels must fit."""

    python: Annotated[str, StringConstraints(pattern=r"^3\.\d+$")]
    """CPython of both bases, major.minor."""
    platform: Annotated[str, StringConstraints(pattern=r"^x86_64-manylinux_2_\d+$")]
    """The newest platform tag the bases' C library satisfies, as uv spells it."""


class Index(Frozen):
    """A package index other than the default, by name.

    Its address is `FORGE_INDEX_<NAME>` of the environment, else `url`, else what the user's pip is told to look at.
    """

    packages: tuple[Name, ...]
    """The packages that come from it, and nothing else does."""
    url: str | None = None


DebName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.+-]+$")]


class Rootfs(Frozen):
    """A root file system made of a distribution's packages."""

    packages: tuple[DebName, ...]
    """On top of the essential and required ones (mmdebstrap's minbase)."""


class Base(Frozen):
    """The two bases: built from a distribution's packages, or named by digest in a registry."""

    suite: Name | None = None
    """Suite of the distribution, for example `bookworm`."""
    mirror: str | None = None
    """Address of the mirror; none: mmdebstrap's own default."""
    builder: Rootfs | None = None
    runtime: Rootfs | None = None
    builder_image: Annotated[str, AfterValidator(_image)] | None = None
    runtime_image: Annotated[str, AfterValidator(_image)] | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        for side in ("builder", "runtime"):
            rootfs, image = getattr(self, side), getattr(self, f"{side}_image")
            if (rootfs is None) == (image is None):
                raise ValueError(f"exactly one of `{side}` and `{side}_image` must be given")
            if rootfs is not None and self.suite is None:
                raise ValueError(f"`{side}` needs `suite`")
        return self


class Environment(Frozen):
    """A set of wheels installed together."""

    requires: tuple[RequirementText, ...] = ()
    """Resolved together with all their dependencies."""
    without_dependencies: tuple[RequirementText, ...] = ()
    """Taken as they are: their own requirements name what this profile replaces."""
    overrides: tuple[RequirementText, ...] = ()
    """Replace what any package demands of these names."""


class GitSource(Frozen):
    """A source tree in a git repository."""

    url: str
    commit: GitOid
    subfolder: str | None = None


class Source(Frozen):
    """A source tree and the series of patches for it."""

    wheel: RequirementText | None = None
    """A wheel that carries its sources, pinned with `==`."""
    git: GitSource | None = None
    series: Name | None = None
    """`patches/<source>/<series>/series`."""

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.wheel is None) == (self.git is None):
            raise ValueError("exactly one of `wheel` and `git` must be given")
        return self


class CompileCheck(Frozen):
    """What the wheel check holds a built wheel to."""

    demand: tuple[Architecture, ...]
    """Cubin architectures every shared object with device code must hold."""
    allow: tuple[Architecture, ...]
    """Cubin architectures it may hold; any other is foreign."""
    ptx: Literal["forbid", "allow"] = "forbid"
    needed: tuple[str, ...] = ()
    """Libraries it may NEED beyond the C library's own family, by soname."""


class BuiltWheel(Frozen):
    """A wheel made here from a source tree."""

    source: Name
    recipe: Literal["flashinfer-jit", "sgl-kernel"]
    modules: tuple[Name, ...] = ()
    """What the recipe compiles: for `flashinfer-jit` the names of FlashInfer's JIT modules."""
    architectures: tuple[Annotated[str, StringConstraints(pattern=r"^\d+\.\d[af]?$")], ...]
    """Compute capabilities as torch and FlashInfer spell them, for example `12.0a`."""
    check: CompileCheck

    @model_validator(mode="after")
    def _demanded_is_allowed(self) -> Self:
        if missing := sorted(set(self.check.demand) - set(self.check.allow)):
            raise ValueError(f"demands {', '.join(missing)} but does not allow it")
        return self


class AllowedConflict(Frozen):
    """Complaints of `pip check` that are known and meant."""

    package: Name
    """Whose requirement is not met."""
    requirements: tuple[Name, ...]
    """What it misses or finds in another version."""
    reason: Annotated[str, StringConstraints(min_length=15)]


class Image(Frozen):
    """The runtime image."""

    name: Name
    title: str
    environment: dict[str, str] = Field(default_factory=dict)
    """ENV of the image."""
    stand_ins: tuple[Literal["sgl_kernel", "torchvision_ops", "cuda_runtime"], ...] = ()
    """Modules of `build/inside` that stand in for what a machine without a GPU cannot load."""
    imports: tuple[str, ...] = ()
    """Modules the image check imports."""
    allowed_conflicts: tuple[AllowedConflict, ...] = ()


class Model(Frozen):
    """A model folder made from a locked wheel, for rehearsals."""

    name: str
    wheel: RequirementText
    gguf: str
    """Path of the GGUF file inside the wheel."""
    chat_template: str
    """File of `build/inside`."""
    nan_token: str | None = None
    """Swapped with token 0, so that an argmax over NaN reads as this text."""


class Manifest(Frozen):
    """What one profile intends to build."""

    schema_version: Literal[1] = Field(alias="schema")
    profile: Name
    kind: Literal["rehearsal", "production"]
    """A production build stops where a rehearsal goes on with a recorded deviation."""
    description: str
    as_of: date
    """Names are resolved as of the end of this day (UTC)."""
    epoch: Annotated[int, Field(ge=315532800)]
    """SOURCE_DATE_EPOCH, seconds: the newest time stamp in any output."""
    target: Target
    indexes: dict[Name, Index] = Field(default_factory=dict)
    staging: str | None = None
    """Repository the image is pushed to by digest, `HOST/PATH`; none: FORGE_STAGING, or for a rehearsal one on loopback."""
    base: Base
    environments: dict[str, Environment]
    sources: dict[Name, Source] = Field(default_factory=dict)
    wheels: dict[Name, BuiltWheel] = Field(default_factory=dict)
    image: Image
    model: Model | None = None

    model_config = ConfigDict(populate_by_name=True)

    @model_validator(mode="after")
    def _names_exist(self) -> Self:
        for name, wheel in self.wheels.items():
            if wheel.source not in self.sources:
                raise ValueError(f"wheels.{name}.source: no source {wheel.source!r} in `sources`")
        if set(self.environments) != {"runtime", "builder"}:
            raise ValueError("environments: exactly `runtime` and `builder` are needed")
        return self

    def resolving_sha256(self) -> str:
        """Sha256 (hex) of the sections a lock resolves; a lock carries it, so that a stale lock is noticed."""
        relevant = {"profile", "as_of", "target", "indexes", "base", "environments", "sources", "model"}
        return canonical_sha256(self.model_dump(mode="json", include=relevant))


def manifests_folder() -> Path:
    """`build/manifests` of the checkout: user data, edited by people, so it lies beside the package."""
    return project_root() / "build" / "manifests"


def profiles() -> tuple[str, ...]:
    """Names of the profiles that have a manifest, sorted."""
    return tuple(sorted(p.stem for p in manifests_folder().glob("*.yaml") if not p.name.endswith(".lock.yaml")))


def load(profile: str | None) -> Manifest:
    """Read the manifest of a profile; raises UsageError (exit 2) naming every mistake with its path in the file."""
    known = profiles()
    if profile is None:
        raise UsageError("no --profile given", hint=f"profiles: {', '.join(known)}; e.g. `-- --profile rehearsal`")
    if profile not in known:
        raise UsageError(f"no profile {profile!r}", hint=f"profiles: {', '.join(known)}")
    return parse(manifests_folder() / f"{profile}.yaml", profile)


def parse(path: Path, profile: str | None = None) -> Manifest:
    """Read a manifest file; raises UsageError with one detail per mistake."""
    data = read_yaml(path)
    try:
        manifest = Manifest.model_validate(data)
    except ValidationError as error:
        raise UsageError(
            f"{path}: {error.error_count()} mistake{'s' if error.error_count() > 1 else ''}",
            details=mistakes(error),
            hint="`python -m forge_build schema` prints the JSON schema for your editor",
        ) from error
    if profile is not None and manifest.profile != profile:
        raise UsageError(f"{path}: profile is {manifest.profile!r}, but the file is named {profile!r}")
    return manifest


def read_yaml(path: Path) -> Any:
    """Read a YAML file as plain data; raises UsageError with line and column."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not YAML: {error}") from error


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
