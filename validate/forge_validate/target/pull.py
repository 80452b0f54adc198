"""From a registry into the engine, by digest."""

from __future__ import annotations

import socket

import docker.errors
import requests

from forge_core import registry
from forge_core.engine import Engine
from forge_core.errors import EnvironmentFailure, ForgeError, IntegrityError, UsageError
from forge_validate.target import Image, Recorded

_ABSENT = ("not found", "manifest unknown", "no such manifest", "does not exist", "name unknown")
_PULL_S = 3600


def pull(engine: Engine, target: Recorded | Image) -> str:
    """Bring the image by its digest into the engine; returns the engine's id of it.

    Raises IntegrityError (5) when the registry answers and has no digest that a record names, UsageError (2) for one
    that the user named, EnvironmentFailure (3) when it does not answer.
    """
    image = target.image
    registry.require_reachable(image.repository, remote_engine=engine.remote)
    demand_staged(target)
    client = engine.client
    usual, client.api.timeout = client.api.timeout, _PULL_S
    try:
        pulled = client.images.pull(image.repository, tag=image.digest)
    except (docker.errors.NotFound, docker.errors.ImageNotFound) as error:
        raise _absent(target) from error
    except docker.errors.APIError as error:
        text = str(error.explanation or error)
        if any(word in text.lower() for word in _ABSENT):
            raise _absent(target) from error
        raise EnvironmentFailure(f"the engine cannot pull {image}: {text}") from error
    except requests.RequestException as error:
        raise EnvironmentFailure(f"the engine cannot pull {image}: {error}") from error
    finally:
        client.api.timeout = usual
    known = {str(name).partition("@")[2] for name in pulled.attrs.get("RepoDigests") or ()}
    if image.digest not in known:
        raise IntegrityError(f"the engine holds {', '.join(sorted(known)) or 'nothing'} for {image}")
    # The containerd store's id is the manifest's digest, the classic one's is the config's, which only a record tells.
    if isinstance(target, Recorded) and pulled.id not in (image.digest, target.image_config):
        raise IntegrityError(f"{image} is image {pulled.id} here; the record says {target.image_config}")
    return str(pulled.id)


def demand_staged(target: Recorded | Image) -> None:
    """Ask the registry for the digest ourselves: an engine that holds the image already would not ask.

    Raises as `pull` does.
    """
    demand_answering(target.image.registry)
    if not registry.exists(target.image):
        raise _absent(target)


def demand_answering(host_and_port: str) -> None:
    """Raise EnvironmentFailure when nobody listens: skopeo tries a refused connection for a while, without a hint."""
    host, _, port = host_and_port.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise EnvironmentFailure(
            f"the registry {host_and_port} does not answer: {error.strerror or error}",
            hint="`nox -s engine` starts the rehearsal's own",
        ) from error


def _absent(target: Recorded | Image) -> ForgeError:
    image = target.image
    message = f"{image.registry} answers and has no {image.repository}@{image.digest}"
    if isinstance(target, Image):
        return UsageError(message, hint="name an image that is there, with its tag or digest")
    return IntegrityError(message, hint="the record names an image that is no longer in staging: build again")
