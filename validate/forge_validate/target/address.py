"""A server that runs already: found at its address, asked whether it speaks the OpenAI way. No engine, no registry."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from forge_core.errors import EnvironmentFailure, UsageError
from forge_validate.exchange import Exchange, Request
from forge_validate.server import Server
from forge_validate.talk import send
from forge_validate.target import Url

_CHAT = "/v1/chat/completions"
_LOOK_S = 30
_GENERATE_S = 120


def attach(
    url: str, *, profile: str, served: str | None, key_variable: str | None, offline: bool = False
) -> tuple[Url, Server]:
    """The target at an address, and the server to ask; `served` is needed where it serves several models.

    Raises UsageError (2) for what is no address (`offline`: or not one of this machine), an unset variable, a model it
    does not serve, or several and none named; EnvironmentFailure (3) when nobody answers, not the OpenAI way, or not to
    this key.
    """
    address, key = _address(url), _key(key_variable)
    server = Server(url=address, served=served or "", api_key=key)
    if offline and not server.local:
        raise UsageError(f"--offline, but {address} is not on this machine")
    names = _models(server, key_variable)
    if served is None and len(names) > 1:
        raise UsageError(f"{address} serves {len(names)} models", hint="name one with --served", details=tuple(names))
    if served is not None and served not in names:
        raise UsageError(f"{address} does not serve {served!r}", hint="--served NAME", details=tuple(names))
    server = Server(url=address, served=served or names[0], api_key=key)
    _demand_chat(server, key_variable)
    return Url(profile=profile, url=address, served=server.served), server


def _address(url: str) -> str:
    hint = "--url http://HOST:PORT, the address that `/v1/models` is below"
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError as error:
        raise UsageError(f"--url {url!r} is no address: {error}", hint=hint) from error
    if parts.username or parts.password:
        # Not repeated here: it holds a secret.
        raise UsageError("--url holds a user or a password", hint="name the variable of an API key: --api-key-env")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or parts.query or parts.fragment:
        raise UsageError(f"--url {url!r} is no address of a server", hint=hint)
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1').rstrip('/')}"


def _key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise UsageError(f"--api-key-env {variable}: this variable is not set, or empty")
    if not key.isascii() or not key.isprintable():
        raise UsageError(f"--api-key-env {variable}: what it holds is no API key: it cannot be sent in a header")
    return key


def _models(server: Server, key_variable: str | None) -> list[str]:
    found = send(server, "models", Request(method="GET", path="/v1/models"), _LOOK_S)
    _demand_answer(server, found, key_variable)
    body = found.response
    listed = body.get("data") if isinstance(body, dict) else None
    names = [one["id"] for one in listed or () if isinstance(one, dict) and isinstance(one.get("id"), str)]
    if found.status != 200 or not names:
        raise _foreign(server, found, "no list of models")
    return names


def _demand_chat(server: Server, key_variable: str | None) -> None:
    """One token of a chat: a server may list models to everybody, and may serve something else than chats."""
    body: dict[str, Any] = {"model": server.served, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    found = send(server, "chat", Request(method="POST", path=_CHAT, body=body), _GENERATE_S)
    if found.error is not None:
        return  # it listed its models and does not chat: that is for the suite to find
    _demand_answer(server, found, key_variable)
    if found.status in (404, 405, 501):
        raise _foreign(server, found, f"it does not chat as {server.served!r}")
    if found.status == 200 and not (isinstance(found.response, dict) and "choices" in found.response):
        raise _foreign(server, found, "no reply")


def _demand_answer(server: Server, found: Exchange, key_variable: str | None) -> None:
    if found.error is not None:
        hint = "is the server up, and the address right? A start may take minutes"
        raise EnvironmentFailure(f"no server answers at {server.url}: {found.error}", hint=hint)
    if found.status in (401, 403):
        if key_variable is None:
            hint = "put its API key into a variable and name that one: --api-key-env VARIABLE"
            raise EnvironmentFailure(f"{server.url} wants an API key: HTTP {found.status}", hint=hint)
        raise EnvironmentFailure(
            f"{server.url} refuses the API key: HTTP {found.status}", hint=f"correct what {key_variable} holds"
        )
    if found.status in (502, 503, 504):
        raise EnvironmentFailure(
            f"{server.url} is there and not ready: {found.request.path} gives HTTP {found.status}",
            hint="wait until it has started, or read its log",
        )


def _foreign(server: Server, found: Exchange, what: str) -> EnvironmentFailure:
    moved = f" to {found.headers['location']}" if "location" in found.headers else ""
    return EnvironmentFailure(
        f"{server.url} is no OpenAI-compatible server: "
        f"{found.request.method} {found.request.path} gives HTTP {found.status}{moved}, {what}",
        hint="--url wants the address that `/v1/models` and `/v1/chat/completions` are below",
    )
