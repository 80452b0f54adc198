"""Where wheels are looked for: the manifest's indexes by name, what the user's pip is told, the default index."""

from __future__ import annotations

import configparser
import hashlib
import os
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx
import platformdirs
from packaging.utils import canonicalize_name
from pypi_simple import PYPI_SIMPLE_ENDPOINT, ProjectPage

from forge_build.manifest import Manifest
from forge_core.errors import EnvironmentFailure, UsageError

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

    A named index is `FORGE_INDEX_<NAME>` of the environment, else the manifest's `url`, else the extra indexes and
    find-links folders of the user's pip and uv. The default is the one they are told, else PyPI's.
    """
    if index is None:
        told = _setting("index-url", "UV_DEFAULT_INDEX", "UV_INDEX_URL")
        return Places((), tuple(told[:1]) or (PYPI_SIMPLE_ENDPOINT,))
    if index not in manifest.indexes:
        raise UsageError(f"the lock names the index {index!r}, the manifest has no such index")
    named = os.environ.get(variable(index)) or manifest.indexes[index].url
    addresses = [named] if named else _setting("extra-index-url", "UV_INDEX", "UV_EXTRA_INDEX_URL")
    links = [] if named else _setting("find-links", "UV_FIND_LINKS")
    folders = [Path(unquote(urlsplit(a).path)) for a in links if urlsplit(a).scheme in ("", "file")]
    if named and not re.match(r"^(https?|file)://", named):
        folders, addresses = [Path(named)], []
    return Places(tuple(folders), tuple(addresses))


def variable(index: str) -> str:
    """The environment variable that gives a named index its address."""
    return "FORGE_INDEX_" + re.sub(r"[^A-Z0-9]", "_", index.upper())


def offers(client: httpx.Client, where: Places, name: str) -> list[Offer]:
    """Every wheel of a package that the places have, folders first.

    Raises EnvironmentFailure when an index does not answer; one that does not know the package has no offers.
    """
    key = canonicalize_name(name)
    found = [
        Offer(path.name, path, None, path.stat().st_size)
        for folder in where.folders
        for path in sorted(folder.glob("*.whl"))
        if canonicalize_name(path.name.split("-", 1)[0]) == key
    ]
    for index in where.indexes:
        found += _page(client, index, key)
    return found


def _page(client: httpx.Client, index: str, key: str) -> list[Offer]:
    address = f"{index.rstrip('/')}/{key}/"
    if index.startswith("file:"):
        page_file = Path(unquote(urlsplit(address).path)) / "index.html"
        if not page_file.is_file():
            return []
        page = ProjectPage.from_html(key, page_file.read_text(encoding="utf-8"), base_url=address)
    else:
        try:
            response = client.get(address, headers={"Accept": _ACCEPT})
        except httpx.HTTPError as error:
            raise unreachable(address, error) from error
        if response.status_code == 404:
            return []
        if response.status_code >= 400:
            raise EnvironmentFailure(f"{_host(address)} answers {response.status_code} for {key}")
        if "json" in response.headers.get("content-type", ""):
            page = ProjectPage.from_json_data(response.json(), base_url=str(response.url))
        else:
            page = ProjectPage.from_html(key, response.text, base_url=str(response.url))
    found = []
    for package in page.packages:
        if not package.filename.endswith(".whl"):
            continue
        parts = urlsplit(package.url)
        location: str | Path = Path(unquote(parts.path)) if parts.scheme == "file" else package.url
        found.append(Offer(package.filename, location, package.digests.get("sha256"), package.size))
    return found


def unreachable(address: str, error: Exception) -> EnvironmentFailure:
    """The error for an address that does not answer, with the way out for certificates and proxies."""
    hint = "check the network; --offline serves from the store alone"
    if "certificate" in str(error).lower():
        hint = "a private CA goes into SSL_CERT_FILE (PEM), a proxy into HTTPS_PROXY"
    return EnvironmentFailure(f"{_host(address)} cannot be reached: {error or type(error).__name__}", hint=hint)


def new_client() -> httpx.Client:
    """An HTTP client that honours proxies and private CAs as pip, uv and requests do."""
    context = ssl.create_default_context()
    for name in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "CURL_CA_BUNDLE"):
        bundle = os.environ.get(name)
        if not bundle:
            continue
        try:
            context.load_verify_locations(cafile=bundle)
        except (OSError, ssl.SSLError) as error:
            raise EnvironmentFailure(f"{name} names {bundle}, which cannot be read as certificates: {error}") from error
    limits = httpx.Limits(max_connections=16)
    return httpx.Client(verify=context, follow_redirects=True, timeout=httpx.Timeout(30, read=60), limits=limits)


def file_sha256_of_offer(offer: Offer) -> str | None:
    """The offer's sha256: as stated, else of the local file; none for a remote file without one."""
    if offer.sha256 or not isinstance(offer.location, Path):
        return offer.sha256
    with offer.location.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _host(address: str) -> str:
    return urlsplit(address).hostname or address


def _setting(option: str, *uv_variables: str) -> list[str]:
    """A setting of the user's pip (environment, then its files) and of uv's environment; several values are split."""
    values = [os.environ.get(v, "") for v in ("PIP_" + option.upper().replace("-", "_"), *uv_variables)]
    parser = configparser.RawConfigParser()
    files = [
        Path(folder) / "pip/pip.conf" for folder in reversed(platformdirs.site_config_dir(multipath=True).split(":"))
    ]
    files += [Path("/etc/pip.conf"), Path.home() / ".pip/pip.conf", platformdirs.user_config_path("pip") / "pip.conf"]
    if own := os.environ.get("PIP_CONFIG_FILE"):
        files.append(Path(own))
    parser.read(files, encoding="utf-8")
    for section in ("global", "install", "download"):
        values.append(parser.get(section, option, fallback=""))
    unique: dict[str, None] = dict.fromkeys(part for value in values for part in value.split())
    return list(unique)
