"""Cache volumes: what a server compiles at its first start (Triton, FlashInfer, Inductor) is kept for the next one.

They outlive the container on purpose. The image's digest is part of a volume's name and its label, so what one image
compiled is never run, and never judged, with another.
"""

from __future__ import annotations

import io
import re
import secrets
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import docker.errors
import requests
from docker.types import Mount

from forge_core.engine import Engine
from forge_core.errors import EnvironmentFailure, UsageError
from forge_core.interrupt import undisturbed
from forge_core.model import Frozen
from forge_validate.serving import Serving

LABEL = "sm120-forge.validate"
"""On every container we create; its value is the profile."""
CACHE_LABEL = "sm120-forge.cache"
"""On every cache volume; its value is the profile."""
IMAGE_LABEL = "sm120-forge.cache.image"
"""On every cache volume; its value is the digest of the image whose cache it is."""

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_DIGITS = 16
_ROOT = "/forge-caches"


class Volume(Frozen):
    """A cache volume, as the engine has it."""

    name: str
    profile: str
    digest: str
    """Of the image whose cache it is."""


def volume_name(serving: Serving, cache: str, digest: str) -> str:
    """The volume of one cache of one image; raises UsageError when `digest` is no `sha256:...`."""
    match = _DIGEST.fullmatch(digest)
    if match is None:
        raise UsageError(
            f"the serving of {serving.profile} keeps caches, and the image has no digest to keep them by",
            hint="name the image by its digest, or take `caches` out of the serving",
        )
    return f"sm120-forge-{serving.profile}-{cache}-{match[1][:_DIGITS]}"


def mounts(serving: Serving, digest: str) -> list[Mount]:
    """The mounts of a serving's caches; none for a serving without."""
    return [
        Mount(path, volume_name(serving, cache, digest), type="volume", labels=_labels(serving, digest))
        for cache, path in serving.caches.items()
    ]


def prepare(engine: Engine, image: str, serving: Serving, digest: str) -> tuple[str, ...]:
    """Make the volumes of a serving's caches, writable for the image's user; returns their names.

    A new volume belongs to root, and the image's user is another. A container that is never started gives the engine
    the way in, so nothing of the image runs as root. Raises EnvironmentFailure for a volume of that name that is
    another image's, or for an engine that cannot make one.
    """
    if not serving.caches:
        return ()
    labels = _labels(serving, digest)
    names = {cache: volume_name(serving, cache, digest) for cache in serving.caches}
    with _engine_errors("make the cache volumes"):
        for name in names.values():
            # The engine gives back one that is there already, whatever its labels.
            made = engine.client.volumes.create(name, labels=labels)
            if not labels.items() <= (made.attrs.get("Labels") or {}).items():
                raise EnvironmentFailure(
                    f"there is a volume {name} that is no cache of {digest}",
                    hint=f"look what it is; `docker volume rm {name}` removes it",
                )
        _open(engine, image, serving, names)
    return tuple(names.values())


def volumes(engine: Engine, profile: str | None = None) -> tuple[Volume, ...]:
    """The cache volumes of a profile, or of all, sorted by name."""
    wanted = CACHE_LABEL if profile is None else f"{CACHE_LABEL}={profile}"
    with _engine_errors("list volumes"):
        found = engine.client.volumes.list(filters={"label": wanted})
    return tuple(
        sorted(
            (
                Volume(name=str(v.name), profile=v.attrs["Labels"][CACHE_LABEL], digest=v.attrs["Labels"][IMAGE_LABEL])
                for v in found
            ),
            key=lambda volume: volume.name,
        )
    )


def remove(engine: Engine, found: Iterable[Volume]) -> tuple[str, ...]:
    """Remove volumes that `volumes` listed; returns the names of those in use, which stay."""
    busy = []
    for volume in found:
        with _engine_errors(f"remove {volume.name}"):
            try:
                engine.client.api.remove_volume(volume.name)
            except docker.errors.NotFound:
                pass
            except docker.errors.APIError as error:
                if error.status_code != 409:
                    raise
                busy.append(volume.name)
    return tuple(busy)


def _labels(serving: Serving, digest: str) -> dict[str, str]:
    return {CACHE_LABEL: serving.profile, IMAGE_LABEL: digest}


def _open(engine: Engine, image: str, serving: Serving, names: dict[str, str]) -> None:
    """Give each volume's root the mode of /tmp, by unpacking folders of its name over the mount points."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for cache in names:
            entry = tarfile.TarInfo(cache)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
            archive.addfile(entry)
    name = f"sm120-forge-{serving.profile}-caches-{secrets.token_hex(3)}"
    try:
        container = engine.client.containers.create(
            image,
            entrypoint=["never-started"],
            name=name,
            labels={LABEL: serving.profile},
            mounts=[Mount(f"{_ROOT}/{cache}", volume) for cache, volume in names.items()],
            network_mode="none",
        )
        container.put_archive(_ROOT, packed.getvalue())
    finally:
        with undisturbed(), suppress(docker.errors.NotFound):
            engine.client.api.remove_container(name, force=True)


@contextmanager
def _engine_errors(what: str) -> Iterator[None]:
    try:
        yield
    except (docker.errors.APIError, requests.RequestException) as error:
        text = getattr(error, "explanation", None) or error
        raise EnvironmentFailure(f"the engine does not {what}: {text}") from error
