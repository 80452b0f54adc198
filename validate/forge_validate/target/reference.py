"""Any SGLang image by tag or digest: resolved to a digest once, and how it is to be started."""

from __future__ import annotations

from pathlib import Path

from forge_core import registry
from forge_core.engine import Engine
from forge_core.errors import UsageError
from forge_core.model import ImageRef, ModelRef
from forge_validate.serving import Serving
from forge_validate.target import Image
from forge_validate.target.pull import demand_answering
from forge_validate.target.record import model_folder

_COMMAND = ("python3", "-m", "sglang.launch_server")
# `nobody` of Debian and Ubuntu.
_NOBODY = "65534:65534"


def image(reference: str, *, profile: str, served: str, model: Path | None, usual_model: Path) -> tuple[Image, Path]:
    """The target that a reference names, and the model folder (`model`, else `usual_model`).

    Raises UsageError (2) for what is no reference, a tag the registry does not have, or no model;
    EnvironmentFailure (3) when the registry does not answer.
    """
    repository, tag, digest = parts(reference)
    folder = model_folder(model, usual_model, built=False)
    demand_answering(repository.partition("/")[0])
    digest = digest or registry.digest_of(repository, tag)
    if digest is None:
        raise UsageError(f"{repository} has no tag {tag!r}", hint="--image REPOSITORY:TAG or REPOSITORY@sha256:...")
    try:
        resolved = ImageRef(repository=repository, digest=digest)
    except ValueError as error:
        raise UsageError(f"--image {reference!r} is no reference of an image", hint="REPOSITORY@sha256:...") from error
    found = Image(profile=profile, reference=reference, image=resolved, model=ModelRef.of_folder(served, folder))
    return found, folder


def parts(reference: str) -> tuple[str, str, str | None]:
    """Repository with its registry, tag and digest, as docker reads a reference; the tag counts without a digest only.

    Raises UsageError.
    """
    name, at, digest = reference.partition("@")
    folder, slash, last = name.rpartition("/")
    last, colon, tag = last.partition(":")
    if not last or (colon and not tag) or (at and not digest):
        raise UsageError(f"--image {reference!r} is no reference of an image", hint="REPOSITORY[:TAG][@sha256:...]")
    repository = folder + slash + last
    first = repository.partition("/")[0]
    if "/" not in repository:
        repository = f"docker.io/library/{repository}"
    elif not ("." in first or ":" in first or first == "localhost"):
        repository = f"docker.io/{repository}"
    return repository, tag or "latest", digest or None


def fitted(engine: Engine, image: str, serving: Serving) -> Serving:
    """The serving for an image that was not built for it.

    An image whose entry point is no SGLang is started by `sglang.launch_server`; one that is run by root is run by
    nobody: what is judged gets no privileges. What the serving says itself stays.
    """
    settings = engine.client.images.get(image).attrs.get("Config") or {}
    changes: dict[str, object] = {}
    if not serving.command and not any("sglang" in word for word in settings.get("Entrypoint") or ()):
        changes["command"] = _COMMAND
    if serving.user is None and str(settings.get("User") or "").partition(":")[0] in ("", "0", "root"):
        changes["user"] = _NOBODY
    return serving.model_copy(update=changes)
