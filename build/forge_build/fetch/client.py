"""One HTTP client that honours proxies, private CAs and credentials as pip, uv and requests do; its errors explained."""

from __future__ import annotations

import netrc
import os
import ssl
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import httpx

from forge_core.errors import EnvironmentFailure

_BUNDLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "CURL_CA_BUNDLE")
_PROXIES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


class Transient(Exception):
    """Worth another try: a broken connection, a server that is busy."""


class _Credentials(httpx.Auth):
    """Of the address itself, else of ~/.netrc."""

    def __init__(self) -> None:
        path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
        try:
            self._netrc = netrc.netrc(str(path)) if path.is_file() else None
        except (netrc.NetrcParseError, OSError) as error:
            raise EnvironmentFailure(f"{path} cannot be read: {error}") from error

    def auth_flow(self, request: httpx.Request) -> Iterator[httpx.Request]:  # type: ignore[override]
        found = self._netrc.authenticators(request.url.host) if self._netrc else None
        name, password = (found[0], found[2]) if found else ("", "")
        if request.url.username or request.url.password:
            name, password = request.url.username, request.url.password
        if name or password:
            yield from httpx.BasicAuth(name, password or "").auth_flow(request)
        else:
            yield request


def new_client(extra_bundles: tuple[str, ...] = ()) -> httpx.Client:
    """A client; raises EnvironmentFailure when the environment names a CA bundle or a proxy that cannot be used."""
    context = ssl.create_default_context()
    named = [(name, os.environ.get(name, "")) for name in _BUNDLES] + [("pip's `cert`", b) for b in extra_bundles]
    # Often all of them name one file, and reading it takes its time.
    for bundle, name in {bundle: name for name, bundle in reversed(named) if bundle}.items():
        try:
            if Path(bundle).is_dir():
                context.load_verify_locations(capath=bundle)
            else:
                context.load_verify_locations(cafile=bundle)
        except (OSError, ssl.SSLError) as error:
            raise EnvironmentFailure(
                f"{name} names {bundle}, which cannot be read as certificates: {error}", hint="it must be a PEM file"
            ) from error
    try:
        return httpx.Client(
            verify=context,
            auth=_Credentials(),
            follow_redirects=True,
            timeout=httpx.Timeout(20, connect=15),
            limits=httpx.Limits(max_connections=16),
        )
    except (ImportError, ValueError) as error:
        raise EnvironmentFailure(f"the proxy of the environment cannot be used: {error}", hint=_proxy_hint()) from error


def transport_failure(address: str, error: httpx.TransportError) -> Exception:
    """What a failed request means: Transient where another try may help, else an EnvironmentFailure with the way out."""
    text = str(error) or type(error).__name__
    host = host_of(address)
    if "certificate" in text.lower():
        return EnvironmentFailure(
            f"the certificate of {host} is not trusted: {text}",
            hint="a private CA goes into SSL_CERT_FILE (a PEM file); a proxy that opens TLS has one too",
        )
    if isinstance(error, httpx.ProxyError) and not text.startswith("5"):
        return EnvironmentFailure(f"the proxy does not let us through to {host}: {text}", hint=_proxy_hint())
    if isinstance(error, httpx.UnsupportedProtocol):
        return EnvironmentFailure(f"{address} is no address: {text}")
    return Transient(text)


def unreachable(address: str, error: Exception, what: str = "") -> EnvironmentFailure:
    """The error for an address that stayed unreachable through all attempts; `what` was wanted from there."""
    hint = "check the network; --offline serves from the store alone"
    if any(os.environ.get(name) for name in _PROXIES):
        hint += f"; {_proxy_hint()}"
    wanted = f"{what}: " if what else ""
    return EnvironmentFailure(
        f"{wanted}{host_of(address)} cannot be reached: {error or type(error).__name__}", hint=hint
    )


def refused(what: str, status: int) -> EnvironmentFailure:
    """The error for an answer that no retry will change, with the way out."""
    hint = {
        401: "credentials go into ~/.netrc, or into the address of the index",
        403: "the host, or a proxy on the way, forbids it: ask who runs them, or name another index",
        404: "the file is gone from there; `store import` brings it from a folder, `nox -s lock -- --upgrade` moves on",
        407: "the proxy wants credentials: HTTPS_PROXY=http://USER:PASSWORD@HOST:PORT",
    }.get(status)
    return EnvironmentFailure(f"{what} answers {status}", hint=hint)


def _proxy_hint() -> str:
    used = sorted({name for name in _PROXIES if os.environ.get(name)})
    return (
        f"{', '.join(used) or 'a proxy'} is set: HTTPS_PROXY=http://[USER:PASSWORD@]HOST:PORT, exceptions in NO_PROXY"
    )


def host_of(address: str) -> str:
    """Host of an address, for messages: never its credentials."""
    return urlsplit(address).hostname or unquote(urlsplit(address).path)
