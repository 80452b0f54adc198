"""A proxy on the loopback that breaks the protocol: a thread for each request, one answer passed on as it comes."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from forge_lab.faults.wire import CUT, HANG, Kind, Spoiler

_HANG_POLL_S = 0.2
_DROPPED = frozenset(("content-length", "transfer-encoding", "connection", "content-encoding"))


class Proxy:
    """Between a client and a server; `url` is where it listens, `fired` says whether the fault did anything."""

    def __init__(self, target: str, fault: Kind, parameters: Mapping[str, Any]) -> None:
        self.target, self.fault, self.parameters = target, fault, parameters
        self.over = threading.Event()
        self._spoilers: list[Spoiler] = []
        self._lock = threading.Lock()
        # No connection is kept: one that the server closes at the moment of its reuse would be another fault.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        # The client behind has its own deadlines.
        self.client = httpx.Client(timeout=None, limits=limits, trust_env=False)  # noqa: S113
        self.server = _Server(("127.0.0.1", 0), _handler(self))

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def spoiler(self, path: str, asked: Any) -> Spoiler:
        """The fault on the next answer."""
        with self._lock:
            number = len(self._spoilers)
            made = Spoiler(self.fault, path, asked if isinstance(asked, dict) else {}, number, self.parameters)
            self._spoilers.append(made)
        return made

    @property
    def fired(self) -> bool:
        """Whether the fault did anything so far."""
        return any(one.fired for one in self._spoilers)


@contextmanager
def proxy(target: str, fault: Kind, parameters: Mapping[str, Any]) -> Iterator[Proxy]:
    """A proxy in front of `target` for the length of the block."""
    made = Proxy(target, fault, parameters)
    thread = threading.Thread(target=made.server.serve_forever, name="proxy", daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.over.set()
        made.server.shutdown()
        made.server.server_close()
        made.client.close()
        thread.join(5)


class _Server(ThreadingHTTPServer):
    request_queue_size = 128
    # A thread may wait for a server that hangs; nobody waits for the thread.
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no news; a defect of ours is."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def _events(chunks: Iterator[bytes]) -> Iterator[str]:
    """The events of a stream as they come. Bytes, since a text may hold characters that end lines elsewhere."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip().decode("utf-8", "replace")


def _handler(owner: Proxy) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._pass_on()

        def do_POST(self) -> None:
            self._pass_on()

        def do_OPTIONS(self) -> None:
            self._pass_on()

        def log_message(self, format: str, *args: Any) -> None:
            """Silent."""

        def _pass_on(self) -> None:
            self.close_connection = True
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                asked = json.loads(body) if body else None
            except ValueError:
                asked = None
            spoiler = owner.spoiler(self.path.partition("?")[0], asked)
            try:
                if (instead := spoiler.instead()) is not None:
                    self._whole(instead[0], {"content-type": "application/json"}, json.dumps(instead[1]).encode())
                else:
                    self._ask(spoiler, body)
            except (httpx.HTTPError, ConnectionError, RuntimeError):
                # One of the two ends is gone, or the proxy is being closed.
                return

        def _ask(self, spoiler: Spoiler, body: bytes) -> None:
            kept = ("authorization", "content-type", "accept")
            headers = {name: value for name, value in self.headers.items() if name.lower() in kept}
            with owner.client.stream(self.command, owner.target + self.path, content=body, headers=headers) as told:
                status = spoiler.status(told.status_code)
                passed = {name: value for name, value in told.headers.items() if name not in _DROPPED}
                if "text/event-stream" in told.headers.get("content-type", ""):
                    self._stream(spoiler, status, passed, told)
                else:
                    self._whole(status, passed, spoiler.whole(told.read()))

        def _whole(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
            self._head(status, {**headers, "content-length": str(len(body))})
            self.wfile.write(body)

        def _stream(self, spoiler: Spoiler, status: int, headers: Mapping[str, str], told: httpx.Response) -> None:
            self._head(status, headers)
            for event in _events(told.iter_bytes()):
                for data in spoiler.event(event):
                    if data == CUT:
                        return
                    if data == HANG:
                        self._wait(told)
                        return
                    self.wfile.write(f"data: {data}\n\n".encode())
                    self.wfile.flush()

        def _wait(self, told: httpx.Response) -> None:
            """Say nothing more until the block of the proxy is over; the server is let go."""
            told.close()
            while not owner.over.wait(_HANG_POLL_S):
                pass

        def _head(self, status: int, headers: Mapping[str, str]) -> None:
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("connection", "close")
            self.end_headers()

    return Handler
