"""The manifest's models: closed and frozen."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date
from typing import Annotated, Any, Literal, Self, cast

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import InitErrorDetails

from forge_build.manifest.crossed import crossed
from forge_build.manifest.git import GitSource
from forge_build.manifest.serves import Serves
from forge_build.manifest.text import (
    DebName,
    Distribution,
    Name,
    RequirementText,
    image_reference,
)
from forge_core.model import Architecture, Frozen, canonical_sha256


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

    packages: tuple[Distribution, ...]
    """The packages that come from it, and nothing else does."""
    url: str | None = None


class Rootfs(Frozen):
    """A root file system made of a distribution's packages."""

    packages: tuple[DebName, ...]
    """On top of the essential and required ones (mmdebstrap's minbase)."""


class Base(Frozen):
    """The two bases: built from a distribution's packages, or named by digest in a registry."""

    suite: Name | None = None
    """Suite of the distribution, for example `bookworm`."""
    mirror: str | None = None
    """Address of the mirror, for the suite and its updates; none: mmdebstrap's own defaults, security included."""
    security_mirror: str | None = None
    """Address that has `<suite>-security`, beside a `mirror`."""
    builder: Rootfs | None = None
    runtime: Rootfs | None = None
    builder_image: Annotated[str, AfterValidator(image_reference)] | None = None
    runtime_image: Annotated[str, AfterValidator(image_reference)] | None = None
    provides: tuple[str, ...] = ()
    """Libraries a `runtime_image` has that no wheel brings, by soname; of a `runtime` they follow from its packages."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.security_mirror and not self.mirror:
            raise ValueError("`security_mirror` needs `mirror`; without one mmdebstrap's defaults include security")
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
    requires_of: tuple[Name, ...] = ()
    """Sources from git: what the pyproject.toml of each asks for is resolved together with `requires`."""
    without_dependencies: tuple[RequirementText, ...] = ()
    """Taken as they are, also over what `requires` brings: their own requirements name what this profile replaces."""
    overrides: tuple[RequirementText, ...] = ()
    """Replace what any package demands of these names."""


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


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from error
    return text


class DemandedInstruction(Frozen):
    """Machine code that must be there for the demanded architectures."""

    pattern: Annotated[str, AfterValidator(_pattern)]
    """Regular expression over nvdisasm's text, for example `OMMA.*E2M1` (native FP4 MMA)."""
    at_least: Annotated[int, Field(ge=1)] = 1
    """In each object it is for."""
    objects: str = "*"
    """Glob over the paths inside the wheel: the objects with device code it is for."""


class CompileCheck(Frozen):
    """What the wheel check holds a wheel to."""

    demand: tuple[Architecture, ...]
    """Cubin architectures every shared object with device code must hold."""
    allow: tuple[Architecture, ...]
    """Cubin architectures it may hold; any other is foreign."""
    ptx: Literal["forbid", "allow"] = "forbid"
    needed: tuple[str, ...] | Literal["provided"] = ()
    """Libraries it may NEED beyond what the base has, by soname; `provided`: whatever the lock's wheels hold."""
    instructions: tuple[DemandedInstruction, ...] = ()
    max_size: Annotated[int, Field(ge=1)] | None = None
    """Bytes of the wheel file."""
    max_object_size: Annotated[int, Field(ge=1)] | None = None
    """Bytes of each shared object, unpacked."""


class BuiltWheel(Frozen):
    """A wheel made here from a source tree."""

    source: Name
    recipe: Literal["flashinfer-jit", "pyproject", "sgl-kernel"]
    modules: tuple[Name, ...] = ()
    """What the recipe compiles: for `flashinfer-jit` the names of FlashInfer's JIT modules."""
    serves: Serves | None = None
    """For `flashinfer-jit`: what the image is to serve; the modules follow from it, and `modules` names more."""
    architectures: tuple[Annotated[str, StringConstraints(pattern=r"^\d+\.\d[af]?$")], ...] = ()
    """Compute capabilities as torch and FlashInfer spell them, for example `12.0a`; none where nothing is compiled."""
    check: CompileCheck = CompileCheck(demand=(), allow=())
    """Unless given: no device code at all."""

    @model_validator(mode="after")
    def _demanded_is_allowed(self) -> Self:
        if missing := sorted(set(self.check.demand) - set(self.check.allow)):
            raise ValueError(f"demands {', '.join(missing)} but does not allow it")
        if bool(self.architectures) == (self.recipe == "pyproject"):
            raise ValueError("`architectures` is for recipes that compile: all but `pyproject`")
        return self


class AllowedConflict(Frozen):
    """Complaints of `pip check` that are known and meant."""

    package: Name
    """Whose requirement is not met."""
    requirements: tuple[Name, ...]
    """What it misses or finds in another version."""
    reason: Annotated[str, StringConstraints(min_length=15)]


class AllowedFile(Frozen):
    """Files that the image check complains of, known and meant: claimed by two wheels, or of another CUDA."""

    path: Annotated[str, StringConstraints(min_length=1)]
    """Shell pattern over the path below site-packages."""
    reason: Annotated[str, StringConstraints(min_length=15)]


class Image(Frozen):
    """The runtime image."""

    name: Name
    title: str
    environment: dict[str, str] = Field(default_factory=dict)
    """ENV of the image."""
    cuda_home: Annotated[str, StringConstraints(pattern=r"^(?:/[A-Za-z0-9._-]+)+$")] | None = None
    """Where the CUDA tool chain of the `nvidia-*` wheels is to be found, on PATH and as CUDA_HOME; none: the image has none."""
    start_period: Annotated[int, Field(gt=0)] = 600
    """Seconds in which a failing health check does not count yet: the model is being loaded."""
    stand_ins: tuple[Literal["sgl_kernel", "torchvision_ops", "cuda_runtime"], ...] = ()
    """Modules of `build/inside` that stand in for what a machine without a GPU cannot load."""
    imports: tuple[str, ...] = ()
    """Modules the image check imports."""
    command: tuple[str, ...] = ("sglang", "serve")
    """What the entry point starts, below an init."""
    allowed_conflicts: tuple[AllowedConflict, ...] = ()
    allowed_files: tuple[AllowedFile, ...] = ()


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
    newer: dict[Distribution, date] = Field(default_factory=dict)
    """Packages that are resolved as of the end of another, later day."""
    epoch: Annotated[int, Field(ge=315532800)]
    """SOURCE_DATE_EPOCH, seconds: the newest time stamp in any output."""
    disk_gb: Annotated[int, Field(ge=1)] | None = None
    """GB (10^9 bytes) a build that starts from nothing takes at its peak, as measured; with less free it warns."""
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

    @model_validator(mode="wrap")
    @classmethod
    def _every_mistake(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Names that must exist elsewhere are checked even where fields are wrong: all mistakes come at once."""
        between = list(crossed(data)) if isinstance(data, Mapping) else []
        try:
            made = handler(data)
        except ValidationError as error:
            if not between:
                raise
            found = [cast(InitErrorDetails, item) for item in error.errors(include_url=False)]
            raise ValidationError.from_exception_data(cls.__name__, [*found, *between]) from error
        if between:
            raise ValidationError.from_exception_data(cls.__name__, between)
        return made

    def resolving_sha256(self) -> str:
        """Sha256 (hex) of the sections a lock resolves; a lock carries it, so that a stale lock is noticed."""
        relevant = {"profile", "as_of", "newer", "target", "indexes", "base", "environments", "sources", "model"}
        # without defaults, so that a field the models gain later leaves every lock as it is
        return canonical_sha256(self.model_dump(mode="json", include=relevant, exclude_defaults=True))
