"""The target: what is to be validated. Here a build record, the only kind that can be promoted."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Literal

import docker.errors
import requests

from forge_core import record, registry
from forge_core.engine import Engine
from forge_core.errors import EnvironmentFailure, IntegrityError, UsageError
from forge_core.model import Deviation, Frozen, ImageRef, ModelRef, Sha256

_ABSENT = ("not found", "manifest unknown", "no such manifest", "does not exist", "name unknown")
_PULL_S = 3600


class Recorded(Frozen):
    """An image that a build record names, and the model it is to serve."""

    target: Literal["recorded"] = "recorded"
    profile: str
    kind: Literal["rehearsal", "production"]
    record: Sha256
    """The record's seal."""
    image: ImageRef
    image_config: str
    architectures: tuple[str, ...]
    """Device code in the image, for example `sm_120a`."""
    model: ModelRef
    """What lies in the model folder, hashed now."""
    deviations: tuple[Deviation, ...]
    """The record's, and the model's own."""


def recorded(path: Path, *, profile: str, served: str, model: Path | None, usual_model: Path) -> tuple[Recorded, Path]:
    """The target a record names, and the model folder (`model`, else `usual_model`).

    Raises UsageError (2) without a record or a model, IntegrityError (5) for an edited record, and for a model folder
    that is not the recorded one unless `model` was given: then that is a deviation.
    """
    found = record.load(path)
    if found.profile != profile:
        raise UsageError(
            f"{path} is of profile {found.profile!r}, not {profile!r}", hint=f"`--profile {found.profile}`"
        )
    folder = (model or usual_model).absolute()
    if not (folder / "config.json").is_file():
        hint = "`nox -s build -- --profile NAME` makes it" if found.model and not model else "name one with --model"
        raise UsageError(f"no model at {folder}: it holds no config.json", hint=hint)
    here = ModelRef.of_folder(found.model.name if found.model else served, folder)
    deviations = found.deviations
    if found.model is None:
        deviations += (_differs(here, "the record names no model"),)
    elif here.revision != found.model.revision:
        changed = _changed(found.model, here)
        if model is None:
            raise IntegrityError(
                f"{folder} is not the model of the record: {changed}",
                hint="build again, or judge it as it is with --model (a deviation: it will not be promoted)",
            )
        deviations += (_differs(here, changed),)
    target = Recorded(
        profile=profile,
        kind=found.kind,
        record=found.sha256,
        image=found.image,
        image_config=found.image_config,
        architectures=found.architectures,
        model=here,
        deviations=deviations,
    )
    return target, folder


def pull(engine: Engine, target: Recorded) -> str:
    """Bring the image by its digest from staging into the engine; returns the engine's id of it.

    Raises IntegrityError (5) when the registry answers and has no such digest, EnvironmentFailure (3) when it does
    not answer.
    """
    image = target.image
    registry.require_reachable(image.repository, remote_engine=engine.remote)
    demand_staged(image)
    client = engine.client
    usual, client.api.timeout = client.api.timeout, _PULL_S
    try:
        pulled = client.images.pull(image.repository, tag=image.digest)
    except (docker.errors.NotFound, docker.errors.ImageNotFound) as error:
        raise _absent(image) from error
    except docker.errors.APIError as error:
        text = str(error.explanation or error)
        if any(word in text.lower() for word in _ABSENT):
            raise _absent(image) from error
        raise EnvironmentFailure(f"the engine cannot pull {image}: {text}") from error
    except requests.RequestException as error:
        raise EnvironmentFailure(f"the engine cannot pull {image}: {error}") from error
    finally:
        client.api.timeout = usual
    known = {str(name).partition("@")[2] for name in pulled.attrs.get("RepoDigests") or ()}
    if image.digest not in known:
        raise IntegrityError(f"the engine holds {', '.join(sorted(known)) or 'nothing'} for {image}")
    # The containerd store's id is the manifest's digest, the classic one's is the config's.
    if pulled.id not in (image.digest, target.image_config):
        raise IntegrityError(f"{image} is image {pulled.id} here; the record says {target.image_config}")
    return str(pulled.id)


def demand_staged(image: ImageRef) -> None:
    """Ask staging for the digest ourselves: an engine that holds the image already would not ask.

    Raises IntegrityError when the registry lacks it, EnvironmentFailure when it does not answer.
    """
    host, _, port = image.registry.rpartition(":")
    if host and port.isdigit():
        # skopeo tries a refused connection for a while and names no way out.
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        except OSError as error:
            raise EnvironmentFailure(
                f"the staging registry {image.registry} does not answer: {error.strerror or error}",
                hint="`nox -s engine` starts the rehearsal's own",
            ) from error
    if not registry.exists(image):
        raise _absent(image)


def _absent(image: ImageRef) -> IntegrityError:
    return IntegrityError(
        f"{image.registry} answers and has no {image.repository}@{image.digest}",
        hint="the record names an image that is no longer in staging: build again",
    )


def _differs(model: ModelRef, detail: str) -> Deviation:
    return Deviation(kind="model-differs", subject=model.name, detail=detail)


def _changed(then: ModelRef, now: ModelRef) -> str:
    before, after = {f.path: f for f in then.files}, {f.path: f for f in now.files}
    parts = [f"{path} differs" for path in sorted(before.keys() & after.keys()) if before[path] != after[path]]
    parts += [f"{path} is missing" for path in sorted(before.keys() - after.keys())]
    parts += [f"{path} is new" for path in sorted(after.keys() - before.keys())]
    return ", ".join(parts[:6]) + (f" and {len(parts) - 6} more" if len(parts) > 6 else "")
