"""Where wheels are looked for: the manifest's indexes by name, what the user's pip and uv are told, the default index."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx
import stamina
from packaging.utils import canonicalize_name
from pypi_simple import PYPI_SIMPLE_ENDPOINT, ProjectPage, UnsupportedRepoVersionError

from forge_build.fetch import settings
from forge_build.fetch.client import Transient, host_of, refused, transport_failure
from forge_build.fetch.client import new_client as _new_client
from forge_build.fetch.client import unreachable as unreachable
from forge_build.manifest import Manifest
from forge_core.errors import EnvironmentFailure, UsageError
from forge_core.model import file_sha256

_ACCEPT = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.01"


@dataclass(frozen=True)
class Offer:
    """One wheel file that a place has."""

    file: str
    location: str | Path
    """Address, or path of a local file."""
    sha256: str | None
    """As the place states it; none where it does not."""
    size: int | None


@dataclass(frozen=True)
class Places:
    """Folders and indexes to look in, in order."""

    folders: tuple[Path, ...]
    indexes: tuple[str, ...]


def places(manifest: Manifest, index: str | None) -> Places:
    """Where the wheels of the named index (none: the default one) are looked for.

    A named index is `FORGE_INDEX_<NAME>` of the environment (an address or a folder), else the manifest's `url`, else the
    extra indexes and find-links folders of the user's pip and uv. The default is the one they are told, else PyPI's.
    """
    if index is None:
        return Places((), settings.default_indexes()[:1] or (PYPI_SIMPLE_ENDPOINT,))
    if index not in manifest.indexes:
        raise UsageError(f"the lock names the index {index!r}, the manifest has no such index")
    if named := os.environ.get(variable(index)) or manifest.indexes[index].url:
        if not re.match(r"^(https?|file)://", named):
            return Places((Path(named).expanduser(),), ())
        return Places((), (named,))
    return Places(settings.folders(), settings.extra_indexes())


def anywhere(manifest: Manifest, index: str | None) -> Places:
    """All places that might have a file whose sha256 is known: then it does not matter who gives it.

    After those of `places` come the user's folders and extra indexes, which make an air-gapped build possible.
    """
    first = places(manifest, index)
    more = () if settings.no_index() else settings.extra_indexes()
    indexes = () if index is None and settings.no_index() else first.indexes
    return Places(tuple(dict.fromkeys((*first.folders, *settings.folders()))), tuple(dict.fromkeys((*indexes, *more))))


def candidates(manifest: Manifest, index: str | None) -> list[str | Path]:
    """The places as one list, folders first."""
    where = places(manifest, index)
    return [*where.folders, *where.indexes]


def variable(index: str) -> str:
    """The environment variable that gives a named index its address."""
    return "FORGE_INDEX_" + re.sub(r"[^A-Z0-9]", "_", index.upper())


def new_client() -> httpx.Client:
    """An HTTP client that honours proxies, private CAs and credentials as pip, uv and requests do."""
    return _new_client(settings.certificates())


def offers(client: httpx.Client, where: Places, name: str) -> list[Offer]:
    """Every wheel of a package that the places have, folders first.

    Raises EnvironmentFailure when an index does not answer; one that does not know the package has no offers.
    """
    found = list(in_folders(where, name))
    for index in where.indexes:
        found += page(client, index, name)
    return found


def in_folders(where: Places, name: str) -> Iterator[Offer]:
    """The wheels of a package in the folders."""
    key = canonicalize_name(name)
    for folder in where.folders:
        for path in sorted(folder.glob("*.whl")):
            if canonicalize_name(path.name.split("-", 1)[0]) == key:
                yield Offer(path.name, path, None, path.stat().st_size)


def page(client: httpx.Client, index: str, name: str) -> list[Offer]:
    """The wheels of a package in one index (PEP 691 JSON or PEP 503 HTML, `file://` too).

    Raises EnvironmentFailure when it does not answer, or with something that is no index page.
    """
    key = canonicalize_name(name)
    address = f"{index.rstrip('/')}/{key}/"
    if index.startswith("file:"):
        file = Path(unquote(urlsplit(address).path)) / "index.html"
        if not file.is_file():
            return []
        found = ProjectPage.from_html(key, file.read_text(encoding="utf-8"), base_url=address)
    else:
        response = _answer(client, address)
        if response.status_code == 404:
            return []
        if response.status_code >= 400:
            raise refused(f"{key}: the index at {host_of(address)}", response.status_code)
        kind = response.headers.get("content-type", "")
        try:
            if "json" in kind:
                found = ProjectPage.from_json_data(response.json(), base_url=str(response.url))
            elif "html" in kind:
                found = ProjectPage.from_html(key, response.text, base_url=str(response.url))
            else:
                raise ValueError(f"content type {kind or 'not stated'}")
        except (ValueError, KeyError, TypeError, UnsupportedRepoVersionError) as error:
            raise EnvironmentFailure(f"{host_of(address)} does not answer as a package index: {error}") from error
    offered = []
    for package in found.packages:
        if package.filename.endswith(".whl"):
            parts = urlsplit(package.url)
            location: str | Path = Path(unquote(parts.path)) if parts.scheme == "file" else package.url
            offered.append(Offer(package.filename, location, package.digests.get("sha256"), package.size))
    return offered


def _answer(client: httpx.Client, address: str) -> httpx.Response:
    try:
        for attempt in stamina.retry_context(on=Transient, attempts=4, timeout=None, wait_initial=0.5, wait_max=5):
            with attempt:
                try:
                    response = client.get(address, headers={"Accept": _ACCEPT})
                except httpx.TransportError as error:
                    raise transport_failure(address, error) from error
                except (httpx.HTTPError, httpx.InvalidURL) as error:
                    raise EnvironmentFailure(f"{host_of(address)} cannot be asked: {error}") from error
                if response.status_code in (408, 425, 429, 500, 502, 503, 504):
                    raise Transient(f"it answers {response.status_code}")
                return response
    except Transient as error:
        raise unreachable(address, error, f"index page of {address.rstrip('/').rsplit('/', 1)[1]}") from error
    raise AssertionError("stamina ends by a return or a raise")


def file_sha256_of_offer(offer: Offer) -> str | None:
    """The offer's sha256: as stated, else of the local file; none for a remote file without one."""
    if offer.sha256 or not isinstance(offer.location, Path):
        return offer.sha256
    return file_sha256(offer.location)
