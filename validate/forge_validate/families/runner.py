"""Sends the waves of a family and records what came back. It never judges.

One client, one loop; an event stream is read as it comes, so that a silence is seen while it lasts and a client can hang
up in the middle.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from forge_validate import exchange
from forge_validate.checks.result import CheckResult
from forge_validate.exchange import Exchange
from forge_validate.families.family import GPU_MEMORY, MEMORY, Ask, Family, Wave
from forge_validate.families.shrink import Shrinks, Tried, shrink
from forge_validate.server import Server

if TYPE_CHECKING:
    from forge_validate.judge import Bench

Progress = Callable[[Wave, int], None]
"""Told of every wave before it is sent, with the number of exchanges so far."""


class Sender:
    """Sends waves to one server, within a `with` block; every exchange is written to `folder`."""

    def __init__(self, server: Server, folder: Path) -> None:
        self._server = server
        self._folder = folder
        self._loop = asyncio.Runner()
        # Made in the loop at the first wave: it belongs to it.
        self._client: httpx.AsyncClient | None = None

    def __enter__(self) -> Sender:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._client is not None:
                self._loop.run(self._client.aclose())
        finally:
            # Closing the loop ends what an interrupt left behind.
            self._loop.close()

    def send(self, wave: Wave) -> tuple[Exchange, ...]:
        """Send one wave and wait for its end; the exchanges stand in the order of the asks.

        A time-out, a silence, a broken connection or a dead server is an exchange with an `error`, not an exception.
        """
        if wave.pause:
            time.sleep(wave.pause)
        if (why := self._server.died()) is not None:
            found = [_lost(ask, 0.0, f"not asked: {why}") for ask in wave.asks]
        else:
            found = self._loop.run(self._wave(wave))
            if any(one.error for one in found) and (why := self._server.died()) is not None:
                found = [one.model_copy(update={"error": f"{one.error}; {why}"}) if one.error else one for one in found]
        secrets = (self._server.api_key,) if self._server.api_key else ()
        masked = tuple(exchange.masked(one, secrets) for one in found)
        for one in masked:
            exchange.save(one, self._folder)
        return masked

    async def _wave(self, wave: Wave) -> list[Exchange]:
        client = self._client = self._client or _client(self._server)
        spoke = {ask.name: asyncio.Event() for ask in wave.asks}
        began = time.monotonic()
        tasks = [asyncio.create_task(self._one(client, ask, began, spoke)) for ask in wave.asks]
        return list(await asyncio.gather(*tasks))

    async def _one(
        self, client: httpx.AsyncClient, ask: Ask, began: float, spoke: Mapping[str, asyncio.Event]
    ) -> Exchange:
        try:
            if ask.follows is not None:
                await spoke[ask.follows].wait()
            if ask.request.path == MEMORY:
                return await _memory(ask, began, self._server.memory)
            if ask.request.path == GPU_MEMORY:
                return await _memory(ask, began, self._server.gpu_memory)
            return await _talk(client, self._server.url, ask, began, spoke[ask.name])
        finally:
            spoke[ask.name].set()


async def _memory(ask: Ask, began: float, read: Callable[[], int | None] | None) -> Exchange:
    at = time.monotonic() - began
    amount = await asyncio.to_thread(read) if read is not None else None
    if amount is None:
        return _lost(ask, at, "this memory cannot be read from here")
    ended = time.monotonic() - began
    return Exchange(
        name=ask.name,
        request=ask.request,
        status=200,
        seconds=round(ended - at, 3),
        response={"bytes": amount},
        began=round(at, 4),
        first=round(ended, 4),
        ended=round(ended, 4),
    )


def run(
    sender: Sender, bench: Bench, family: Family, settings: Any, recorded: dict[str, Exchange], progress: Progress
) -> None:
    """Ask all waves of a family; adds the exchanges to `recorded` by name. Raises ValueError for a name used twice."""
    waves = family.waves(settings, bench)
    try:
        wave = next(waves)
        while True:
            if twice := [ask.name for ask in wave.asks if ask.name in recorded]:
                raise ValueError(f"a second exchange named {twice[0]}")
            progress(wave, len(recorded))
            found = sender.send(wave)
            recorded.update((one.name, one) for one in found)
            wave = waves.send(found)
    except StopIteration:
        return


def _client(server: Server) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    # No connection is kept: one that the server closes at the moment of its reuse would look like a fault.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    # trust_env: a proxy of the environment must not stand between us and our own loopback.
    # Every ask has a time-out of its own, and it is for the whole exchange.
    return httpx.AsyncClient(timeout=None, limits=limits, trust_env=False, headers=headers)  # noqa: S113


@dataclass
class _Heard:
    """What was read so far, in seconds since the wave began."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    first: float | None = None
    last: float | None = None
    events: int = 0
    encoding: str = "utf-8"


async def _talk(client: httpx.AsyncClient, url: str, ask: Ask, began: float, spoke: asyncio.Event) -> Exchange:
    heard = _Heard()
    at = time.monotonic() - began
    error, aborted, ended = None, False, None
    limit = ask.timeout if ask.abort_after is None else min(ask.timeout, ask.abort_after)
    try:
        async with asyncio.timeout(limit):
            await _read(client, url, ask, began, spoke, heard)
        ended = heard.last or time.monotonic() - began
    except _Enough:
        ended, aborted = time.monotonic() - began, True
    except _Silent as silence:
        error = str(silence)
    except TimeoutError:
        aborted = ask.abort_after is not None and ask.abort_after <= ask.timeout
        error = None if aborted else f"no complete response within {ask.timeout:.0f} s"
    except httpx.HTTPError as problem:
        error = f"{type(problem).__name__}: {problem}"
    ended = time.monotonic() - began if ended is None else ended
    body, rest = _body(heard)
    return Exchange(
        name=ask.name,
        request=ask.request,
        status=heard.status,
        headers=heard.headers,
        seconds=round(ended - at, 3),
        response=body,
        text=rest,
        error=error,
        began=round(at, 4),
        first=None if heard.first is None else round(heard.first, 4),
        ended=round(ended, 4),
        aborted=aborted,
    )


async def _read(
    client: httpx.AsyncClient, url: str, ask: Ask, began: float, spoke: asyncio.Event, heard: _Heard
) -> None:
    async with client.stream(ask.request.method, url + ask.request.path, json=ask.request.body) as response:
        heard.status, heard.headers = response.status_code, dict(response.headers)
        heard.encoding = response.charset_encoding or "utf-8"
        chunks = response.aiter_bytes()
        while (chunk := await _next(chunks, ask.stall if heard.first is not None else None, heard)) is not None:
            heard.parts.append(chunk)
            heard.last = time.monotonic() - began
            heard.events += chunk.count(b"data:")
            if heard.first is None:
                heard.first = heard.last
                spoke.set()
            if ask.abort_at is not None and heard.events >= ask.abort_at:
                raise _Enough


class _Enough(Exception):
    """The client hangs up: so many events were asked for."""


class _Silent(Exception):
    """Nothing came for longer than the ask allows, after something had."""


async def _next(chunks: AsyncIterator[bytes], stall: float | None, heard: _Heard) -> bytes | None:
    """The next bytes; none at the end."""
    try:
        async with asyncio.timeout(stall):
            return await anext(chunks, None)
    except TimeoutError as error:
        # The time-out of the whole exchange is another, and cancels this one.
        raise _Silent(f"no byte for {stall:.0f} s after {len(heard.parts)} pieces of the answer") from error


def _body(heard: _Heard) -> tuple[Any, str | None]:
    """A body as JSON where it says it is and parses, as text otherwise; none when nothing was read."""
    if not heard.parts:
        return None, None
    text = b"".join(heard.parts).decode(heard.encoding, "replace")
    if "json" in heard.headers.get("content-type", ""):
        try:
            return json.loads(text), None
        except ValueError:
            pass
    return None, text


def _lost(ask: Ask, at: float, why: str) -> Exchange:
    return Exchange(name=ask.name, request=ask.request, status=None, seconds=0.0, error=why, began=round(at, 4))


def reproduce(
    sender: Sender,
    bench: Bench,
    family: Family,
    settings: Any,
    results: Sequence[CheckResult],
    recorded: dict[str, Exchange],
    progress: Progress,
) -> tuple[CheckResult, ...]:
    """The results, the first failed one with its smallest reproducer where the family can find one.

    What was asked for it is recorded as the rest is, below `FAMILY/shrink-N`, and judged by nobody else.
    """
    first = next((one for one in results if one.outcome == "failed"), None)
    if first is None or not isinstance(family, Shrinks):
        return tuple(results)
    start = family.start(settings, first, recorded)
    if start is None:
        return tuple(results)
    best = start
    if family.tries:
        sizes = shrink(start, family.tries)
        attempt = 0
        try:
            size = next(sizes)
            while True:
                attempt += 1
                tried = family.again(settings, bench, first, size, recorded, f"{family.name}/shrink-{attempt}")
                size = sizes.send(_fails(sender, tried, recorded, progress))
        except StopIteration as end:
            best = end.value
    shown = first.model_copy(update={"reproduce": family.line(settings, bench, first, best, recorded)})
    return tuple(shown if one is first else one for one in results)


def _fails(sender: Sender, tried: Tried, recorded: dict[str, Exchange], progress: Progress) -> bool:
    try:
        wave = next(tried)
        while True:
            progress(wave, len(recorded))
            found = sender.send(wave)
            recorded.update((one.name, one) for one in found)
            wave = tried.send(found)
    except StopIteration as end:
        return bool(end.value)
