"""Downloads into the store: parallel, resumable, verified on arrival."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import httpx
import stamina

from forge_build.fetch.client import Transient, host_of, refused, transport_failure, unreachable
from forge_core.console import Step
from forge_core.errors import EnvironmentFailure, IntegrityError
from forge_core.model import file_sha256
from forge_core.store import Store
from forge_core.store.access import writing

PARALLEL = 6
# Bytes after which a connection that broke counts as working.
_GETS_ON = 1 << 20


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


class _Progress:
    """Bytes at hand per file, so that a resumed or repeated download is not counted twice."""

    def __init__(self, step: Step, total: int) -> None:
        self._step, self._total, self._lock = step, total, threading.Lock()
        self._have: dict[str, int] = {}
        self._done = 0

    def have(self, item: Download, amount: int) -> None:
        with self._lock:
            self._done += amount - self._have.get(item.sha256, 0)
            self._have[item.sha256] = amount
            self._step.progress(self._done, self._total, unit="B", note=item.name)

    def waits(self, item: Download) -> None:
        with self._lock:
            self._step.progress(
                self._done, self._total, unit="B", note=f"waiting for another process that brings {item.name}"
            )


def download(items: Sequence[Download], store: Store, client: httpx.Client, step: Step) -> None:
    """Bring every item into the store; returns when all are there and verified.

    Raises IntegrityError when a file has other bytes than the lock says (it is deleted), EnvironmentFailure when it
    cannot be had. What had arrived of the others stays in `partial/`, and the next call resumes it.
    """
    unique = {item.sha256: item for item in items}
    progress = _Progress(step, sum(item.size for item in unique.values()))
    stop = threading.Event()
    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="fetch") as pool:
        # the largest first: one of them last would leave the other connections idle
        ordered = sorted(unique.values(), key=lambda item: (-item.size, item.name))
        pending: set[Future[None]] = {pool.submit(_bring, item, store, client, stop, progress) for item in ordered}
        try:
            wait(pending, return_when=FIRST_EXCEPTION)
        finally:
            # at an interrupt too: what runs ends at its next chunk
            stop.set() if any(not f.done() for f in pending) else None
            pool.shutdown(wait=True, cancel_futures=True)
    failures = [e for f in pending if not f.cancelled() and (e := f.exception()) is not None]
    causes = [e for e in failures if not isinstance(e, _Stopped)]
    if causes:
        raise next((e for e in causes if isinstance(e, IntegrityError)), causes[0])


def _bring(item: Download, store: Store, client: httpx.Client, stop: threading.Event, progress: _Progress) -> None:
    def waiting() -> None:
        if stop.is_set():
            raise _Stopped
        progress.waits(item)

    # Two builds on one store: one brings the file, the other waits here and then finds it.
    with store.lock(f"fetch-{item.sha256}", waiting=waiting):
        if store.has(item.sha256):
            store.get(item.sha256, item.name)
        elif isinstance(item.location, Path):
            try:
                store.add_file(item.location, sha256=item.sha256, name=str(item.location))
            except FileNotFoundError as error:
                raise EnvironmentFailure(f"{item.name}: {item.location} is gone") from error
        else:
            _over_http(item, item.location, store, client, stop, progress)
    progress.have(item, item.size)


def _over_http(
    item: Download, address: str, store: Store, client: httpx.Client, stop: threading.Event, progress: _Progress
) -> None:
    partial = store.root / "partial" / item.sha256
    for last in (False, True):
        resumed = False
        try:
            resumed = _to_the_end(item, address, partial, client, stop, progress)
            store.add_file(partial, sha256=item.sha256, move=True, name=item.name)
            return
        except IntegrityError as error:
            partial.unlink(missing_ok=True)
            progress.have(item, 0)
            # A partial file may have been torn by a crash, or come from a server that had something else.
            if resumed and not last:
                continue
            raise IntegrityError(
                f"{error.message}; it came from {host_of(address)} and was deleted before anything used it",
                hint=error.hint or "a mirror or proxy that changes files, or a file that was replaced upstream",
            ) from error


def _to_the_end(
    item: Download, address: str, partial: Path, client: httpx.Client, stop: threading.Event, progress: _Progress
) -> bool:
    """Transfer until the server has no more, through broken connections; returns whether any part was resumed."""
    resumed = False
    try:
        for attempt in stamina.retry_context(on=Transient, attempts=5, timeout=None, wait_initial=0.5, wait_max=10):
            with attempt:
                while True:
                    before = _size(partial)
                    try:
                        return _transfer(item, address, partial, client, stop, progress) or resumed
                    except Transient:
                        resumed = resumed or _size(partial) > 0
                        # A connection that breaks but gets on is not out of attempts, however large the file is.
                        if _size(partial) < before + _GETS_ON:
                            raise
    except Transient as error:
        raise unreachable(address, error, item.name) from error
    raise AssertionError("stamina ends by a return or a raise")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _transfer(
    item: Download, address: str, partial: Path, client: httpx.Client, stop: threading.Event, progress: _Progress
) -> bool:
    """One request; returns whether it went on from bytes that were there."""
    if stop.is_set():
        raise _Stopped
    have = _size(partial)
    if have and have >= item.size:
        # An earlier run may have been stopped between the last byte and the rename.
        if have == item.size and file_sha256(partial) == item.sha256:
            return True
        partial.unlink()
        have = 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        with client.stream("GET", address, headers=headers) as response:
            if response.status_code == 416 or (response.status_code == 206 and not _goes_on(response, have, item.size)):
                partial.unlink(missing_ok=True)
                raise Transient("it does not resume")
            if error := _refusal(item, response):
                raise error
            resumed = response.status_code == 206
            _take(item, response, partial, have if resumed else 0, stop, progress.have)
            return resumed
    except httpx.TransportError as error:
        raise transport_failure(address, error) from error


def _goes_on(response: httpx.Response, have: int, size: int) -> bool:
    """Whether a partial answer starts where we stopped, in a file of the size we expect."""
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("content-range", ""))
    return bool(match and int(match[1]) == have and match[2] in ("*", str(size)))


def _take(
    item: Download,
    response: httpx.Response,
    partial: Path,
    have: int,
    stop: threading.Event,
    report: Callable[[Download, int], None],
) -> None:
    stated = response.headers.get("content-length")
    plain = "content-encoding" not in response.headers
    if plain and stated and have + int(stated) != item.size:
        raise IntegrityError(
            f"{item.name}: {response.url.host} would send {have + int(stated)} bytes, the lock names {item.size}",
            hint="a login page or a block page of a proxy, or a file that was replaced upstream",
        )
    with writing(partial), partial.open("ab" if have else "wb") as sink:
        # as it comes from the network: a larger piece would be lost with the connection
        for chunk in response.iter_bytes():
            if stop.is_set():
                raise _Stopped
            have += len(chunk)
            if have > item.size:
                break
            sink.write(chunk)
            report(item, have)
    # Without a length the end of the connection is all that tells the end of the file.
    if have < item.size and plain and not stated and "chunked" not in response.headers.get("transfer-encoding", ""):
        raise Transient(f"it ended after {have} of {item.size} bytes")


def _refusal(item: Download, response: httpx.Response) -> Exception | None:
    host, status = response.url.host, response.status_code
    if status < 400:
        return None
    if status in (408, 425, 429, 500, 502, 503, 504):
        return Transient(f"it answers {status}")
    return refused(f"{item.name}: {host}", status)
