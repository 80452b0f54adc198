"""Downloads into the store: parallel, resumable, verified on arrival."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import httpx
import stamina

from forge_build.fetch.indexes import unreachable
from forge_core.console import Step
from forge_core.errors import EnvironmentFailure, IntegrityError
from forge_core.store import Store

PARALLEL = 6
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Download:
    """One file to bring."""

    name: str
    location: str | Path
    sha256: str
    size: int
    """Bytes."""


class _Stopped(Exception):
    """Another download failed or the user interrupted."""


class _Transient(Exception):
    """Worth another try: a broken connection, a server that is busy."""


class _Progress:
    def __init__(self, step: Step, total: int) -> None:
        self._step, self._total, self._done, self._lock = step, total, 0, threading.Lock()

    def add(self, amount: int, name: str) -> None:
        with self._lock:
            self._done += amount
            self._step.progress(self._done, self._total, unit="B", note=name)


def download(items: Sequence[Download], store: Store, client: httpx.Client, step: Step) -> None:
    """Bring every item into the store; returns when all are there and verified.

    Raises IntegrityError when a file has other bytes than the lock says (it is deleted), EnvironmentFailure when it
    cannot be had. What had arrived stays in `partial/` and the next call resumes it.
    """
    progress = _Progress(step, sum(item.size for item in items))
    stop = threading.Event()
    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="fetch") as pool:
        # the largest first: one of them last would leave the other connections idle
        ordered = sorted(items, key=lambda item: -item.size)
        pending: set[Future[None]] = {pool.submit(_bring, item, store, client, stop, progress) for item in ordered}
        try:
            done, _ = wait(pending, return_when=FIRST_EXCEPTION)
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        failures = [e for f in done if (e := f.exception()) is not None]
        if failures:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise next((e for e in failures if not isinstance(e, _Stopped)), failures[0])


def _bring(item: Download, store: Store, client: httpx.Client, stop: threading.Event, progress: _Progress) -> None:
    # Two builds on one store: one brings the file, the other waits here and then finds it.
    with store.lock(f"fetch-{item.sha256}"):
        if store.has(item.sha256):
            progress.add(item.size, item.name)
            return
        if isinstance(item.location, Path):
            try:
                store.add_file(item.location, sha256=item.sha256)
            except FileNotFoundError as error:
                raise EnvironmentFailure(f"{item.name}: {item.location} is gone") from error
            progress.add(item.size, item.name)
            return
        partial = store.root / "partial" / item.sha256
        try:
            # The last byte may be there already when an earlier run was stopped between it and the rename.
            for attempt in stamina.retry_context(on=_Transient, attempts=5, timeout=300, wait_initial=0.5):
                with attempt:
                    _transfer(item, str(item.location), partial, client, stop, progress)
        except _Transient as error:
            raise unreachable(str(item.location), error) from error
        try:
            store.add_file(partial, sha256=item.sha256, move=True)
        except IntegrityError as error:
            partial.unlink(missing_ok=True)
            raise IntegrityError(
                f"{item.name}: what arrived has other bytes than the lock names, and was deleted: {error.message}",
                hint="a mirror or proxy that changes files, or a file that was replaced upstream; nothing used it",
            ) from error


def _transfer(
    item: Download, address: str, partial: Path, client: httpx.Client, stop: threading.Event, progress: _Progress
) -> None:
    have = partial.stat().st_size if partial.exists() else 0
    if have >= item.size > 0:
        if have == item.size and _sha256(partial) == item.sha256:
            return
        partial.unlink()
        have = 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        with client.stream("GET", address, headers=headers) as response:
            if response.status_code in (408, 425, 429, 500, 502, 503, 504):
                raise _Transient(f"it answers {response.status_code}")
            if response.status_code >= 400:
                raise _refused(item, response)
            resumed = response.status_code == 206
            with partial.open("ab" if resumed else "wb") as sink:
                if resumed:
                    progress.add(have, item.name)
                for chunk in response.iter_bytes(_CHUNK):
                    if stop.is_set():
                        raise _Stopped
                    sink.write(chunk)
                    progress.add(len(chunk), item.name)
    except httpx.TransportError as error:
        if "certificate" in str(error).lower():
            raise unreachable(address, error) from error
        raise _Transient(str(error) or type(error).__name__) from error
    # A server that closes early is a transient fault, unless it sent something else altogether.
    if partial.stat().st_size < item.size:
        raise _Transient(f"{item.name} ended after {partial.stat().st_size} of {item.size} bytes")


def _refused(item: Download, response: httpx.Response) -> EnvironmentFailure:
    host, status = response.url.host, response.status_code
    hint = {
        401: "credentials for the host go into ~/.netrc",
        403: "the host or a proxy on the way forbids it",
        404: "the file is gone from there; `store import` brings it from a folder, `nox -s lock -- --upgrade` moves on",
        407: "the proxy wants credentials: HTTPS_PROXY=http://user:password@host:port",
    }.get(status)
    return EnvironmentFailure(f"{item.name}: {host} answers {status}", hint=hint)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
