"""A container's log, followed: every line redacted, written to a file, and handed on."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import docker.errors
import requests
import urllib3.exceptions
from docker.models.containers import Container

from forge_core.redact import redact

_KEPT_LINES = 3000


class Follower(threading.Thread):
    """Reads a container's log to its end in the background."""

    def __init__(self, container: Container, path: Path, secrets: Sequence[str] = (), *, stdout: bool = True) -> None:
        """Follow both streams, or stderr alone where stdout is data."""
        super().__init__(name="container-log", daemon=True)
        self._container = container
        self._path = path
        self._secrets = tuple(secrets)
        self._stdout = stdout
        self._fresh: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._kept: deque[str] = deque(maxlen=_KEPT_LINES)
        self._received = 0

    def run(self) -> None:
        """Follow until the container ends or is gone."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("w", encoding="utf-8") as sink:
            rest = b""
            while True:
                skip = self._received
                try:
                    for chunk in self._container.logs(stream=True, follow=True, stdout=self._stdout):
                        # A stream that broke off begins again at the first byte.
                        dropped, skip = chunk[skip:], max(0, skip - len(chunk))
                        self._received += len(dropped)
                        # Progress bars redraw one line with carriage returns.
                        *lines, rest = (rest + dropped).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
                        for line in lines:
                            self._take(line, sink)
                        sink.flush()
                except (requests.Timeout, requests.ConnectionError, urllib3.exceptions.TimeoutError):
                    # The engine's client gives up on a stream that is silent for its time-out.
                    continue
                except (docker.errors.APIError, requests.RequestException, urllib3.exceptions.HTTPError):
                    pass
                break
            if rest:
                self._take(rest, sink)

    def fresh(self) -> list[str]:
        """The lines that came since the last call."""
        lines = []
        while True:
            try:
                lines.append(self._fresh.get_nowait())
            except queue.Empty:
                return lines

    def lines(self) -> list[str]:
        """The last lines, oldest first."""
        return list(self._kept)

    def _take(self, raw: bytes, sink: object) -> None:
        line = redact(raw.decode(errors="replace").rstrip(), self._secrets)
        if line:
            self._kept.append(line)
            self._fresh.put(line)
            print(line, file=sink)  # type: ignore[call-overload]
