"""Passes bytes between a port or Unix socket here and another there: so a container without network reaches one server alone."""

import contextlib
import socket
import threading
from pathlib import Path


class Relay:
    """Listens until it is closed; each connection is passed on to one that `connect` makes."""

    def __init__(self, server, connect):
        self._server = server
        self._connect = connect
        self._open = set()
        threading.Thread(target=self._accept, daemon=True).start()

    @classmethod
    def to_unix(cls, path):
        """From a free port on loopback to a Unix socket; `port` tells which."""
        relay = cls(socket.create_server(("127.0.0.1", 0)), lambda: _unix(path))
        relay.port = relay._server.getsockname()[1]
        return relay

    @classmethod
    def to_port(cls, path, host, port):
        """From a new Unix socket, which everybody who sees its folder may use, to a port."""
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(path))
        Path(path).chmod(0o777)
        server.listen(64)
        return cls(server, lambda: socket.create_connection((host, port), timeout=10))

    def close(self):
        """End every connection."""
        # shutdown wakes the thread that accepts; close alone does not
        for end in (self._server, *list(self._open)):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self):
        while True:
            try:
                near = self._server.accept()[0]
            except OSError:
                return
            try:
                far = self._connect()
            except OSError:
                near.close()
                continue
            far.settimeout(None)
            self._open |= {near, far}
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one, other):
        with contextlib.suppress(OSError):
            while data := one.recv(65536):
                other.sendall(data)
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            self._open.discard(end)


def _unix(path):
    link = socket.socket(socket.AF_UNIX)
    link.connect(path)
    return link
