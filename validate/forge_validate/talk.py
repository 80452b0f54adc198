"""One plain HTTP request to a server, as an exchange."""

from __future__ import annotations

import json
import os
import ssl
import time
from functools import cache
from typing import Any

import httpx

from forge_validate.exchange import Exchange, Request
from forge_validate.server import Server


def send(server: Server, name: str, request: Request, timeout: float) -> Exchange:
    """Send a request and record what came back; a time-out or a broken connection is an exchange with an `error`."""
    began = time.monotonic()
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    try:
        with httpx.Client(timeout=timeout, trust_env=not server.local, headers=headers, verify=trust()) as client:
            response = client.request(request.method, server.url + request.path, json=request.body)
    except httpx.TimeoutException:
        return lost(name, request, time.monotonic() - began, out_of_time(timeout))
    except httpx.HTTPError as error:
        return lost(name, request, time.monotonic() - began, f"{type(error).__name__}: {error}")
    return arrived(name, request, time.monotonic() - began, response.status_code, dict(response.headers), response.text)


def arrived(name: str, request: Request, seconds: float, status: int, headers: dict[str, str], text: str) -> Exchange:
    """The exchange of a response: its body as JSON where it says it is and parses, as text otherwise."""
    body, rest = _body(headers, text)
    return Exchange(
        name=name,
        request=request,
        status=status,
        headers=headers,
        seconds=round(seconds, 3),
        response=body,
        text=rest,
    )


def lost(name: str, request: Request, seconds: float, why: str) -> Exchange:
    """The exchange of a request without a response."""
    return Exchange(name=name, request=request, status=None, seconds=round(seconds, 3), error=why)


def out_of_time(timeout: float) -> str:
    """What an exchange says that came too late; seconds."""
    return f"no complete response within {timeout:.0f} s"


def trust() -> ssl.SSLContext:
    """The certificates that are trusted: the usual ones, or those of SSL_CERT_FILE. Read once: it takes a while."""
    return _trust(os.environ.get("SSL_CERT_FILE"))


@cache
def _trust(certificates: str | None) -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=certificates is not None)


def _body(headers: dict[str, str], text: str) -> tuple[Any, str | None]:
    if "json" in headers.get("content-type", ""):
        try:
            return json.loads(text), None
        except ValueError:
            pass
    return None, text
