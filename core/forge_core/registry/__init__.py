"""Images in a registry, through skopeo: pushed by digest, looked up, tagged without a rebuild.

Credentials and TLS are docker's own: ~/.docker/config.json (or DOCKER_CONFIG) with its helpers, /etc/docker/certs.d.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from forge_core.errors import EnvironmentFailure, IntegrityError, UsageError
from forge_core.model import ImageRef
from forge_core.registry import skopeo
from forge_core.registry.skopeo import is_loopback

__all__ = ["digest_of", "exists", "is_loopback", "push", "tag"]


def push(archive: Path, repository: str, *, digest: str, tag: str | None, log: Path) -> ImageRef:
    """Copy an OCI archive into `repository` and prove that it lies there by `digest` (and under `tag`, if given).

    Without a tag nothing but the digest names it. Raises EnvironmentFailure (registry, credentials, disk),
    IntegrityError when the archive or the registry has another digest.
    """
    reference = _reference(repository, digest)
    # By digest first: an archive of other bytes must not get as far as the tag.
    skopeo.copy(f"oci-archive:{archive}", f"docker://{reference}", source=None, destination=repository, log=log)
    if not exists(reference):
        raise IntegrityError(f"{reference} is not there after the push of {archive}", log=log)
    if tag is not None:
        _tag(reference, tag, log)
    return reference


def digest_of(repository: str, tag: str) -> str | None:
    """The digest that a tag names; None only when the registry says that there is no such tag.

    Raises EnvironmentFailure when the registry is unreachable or wants other credentials.
    """
    raw = skopeo.manifest(f"{repository}:{tag}", repository)
    return None if raw is None else _sha256(raw)


def exists(reference: ImageRef) -> bool:
    """Whether the registry holds the image, its manifest's bytes verified; raises as `digest_of` does.

    Raises IntegrityError when the registry answers with other bytes.
    """
    raw = skopeo.manifest(str(reference), reference.repository)
    if raw is None:
        return False
    if (found := _sha256(raw)) != reference.digest:
        raise IntegrityError(f"{reference}: the registry answered with {found}")
    return True


def tag(reference: ImageRef, tag: str, log: Path) -> None:
    """Let a tag of the same repository name the image, without a rebuild; prove it by reading the tag back.

    Raises EnvironmentFailure when the registry refuses, IntegrityError when the tag names another digest afterwards.
    """
    _tag(reference, tag, log)


def _tag(reference: ImageRef, tag: str, log: Path) -> None:
    repository = reference.repository
    skopeo.copy(
        f"docker://{reference}", f"docker://{repository}:{tag}", source=repository, destination=repository, log=log
    )
    if (found := digest_of(repository, tag)) != reference.digest:
        raise IntegrityError(f"{repository}:{tag} names {found} after it was set to {reference.digest}", log=log)


def _reference(repository: str, digest: str) -> ImageRef:
    host, separator, path = repository.partition("/")
    if not (separator and path and host) or "@" in repository or ":" in path:
        raise UsageError(f"{repository!r} is no repository", hint="HOST[:PORT]/NAME, without a tag or digest")
    try:
        return ImageRef(repository=repository, digest=digest)
    except ValueError as error:
        raise UsageError(f"{digest!r} is no digest") from error


def _sha256(raw: bytes) -> str:
    return f"sha256:{hashlib.sha256(raw).hexdigest()}"


def registry_of(repository: str) -> str:
    """Host and port of a repository."""
    return repository.partition("/")[0]


def require_reachable(repository: str, *, remote_engine: bool) -> None:
    """Refuse what cannot work: an engine on another machine does not see a registry on this one's loopback."""
    if remote_engine and is_loopback(repository):
        raise EnvironmentFailure(
            f"the engine runs on another machine and cannot pull from {registry_of(repository)} on this one",
            hint="name a registry that both reach, or use an engine on this machine",
        )
