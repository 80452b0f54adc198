"""An engine behind ssh: a private socket here, one `docker system dial-stdio` over there per connection.

As docker's own command line does it; docker-py would need a second implementation of ssh that reads neither the user's
ssh configuration nor the agent's in full.
"""

from __future__ import annotations

import atexit
import contextlib
import shutil
import socket
import subprocess
import tempfile
import threading
from pathlib import Path
from urllib.parse import urlsplit

from forge_core.process import environment


class Bridge:
    """Listens on a Unix socket of this process and forwards each connection; ends with the process or by `close`."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self._argv = ["ssh", "-o", "ConnectTimeout=30", "-o", "BatchMode=yes", "-T"]
        if parts.username:
            self._argv += ["-l", parts.username]
        if parts.port:
            self._argv += ["-p", str(parts.port)]
        host = ["--host", f"unix://{parts.path}"] if parts.path not in ("", "/") else []
        self._argv += ["--", parts.hostname or "", "docker", *host, "system", "dial-stdio"]
        self._folder = Path(tempfile.mkdtemp(prefix="forge-ssh-"))
        self._said = self._folder / "stderr"
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._folder / "docker.sock"))
        self._listener.listen()
        self._children: list[subprocess.Popen[bytes]] = []
        threading.Thread(target=self._serve, name="ssh-bridge", daemon=True).start()
        atexit.register(self.close)

    @property
    def address(self) -> str:
        """The socket's address."""
        return f"unix://{self._folder / 'docker.sock'}"

    @property
    def said(self) -> str:
        """The last line that ssh wrote to its stderr."""
        lines = self._said.read_text(errors="replace").strip().splitlines() if self._said.is_file() else []
        return lines[-1] if lines else ""

    def close(self) -> None:
        """End every connection and remove the socket."""
        self._listener.close()
        for child in self._children:
            with contextlib.suppress(OSError):
                child.terminate()
            child.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        atexit.unregister(self.close)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            # The connection itself is the child's stdin and stdout; a session of its own keeps Ctrl-C from it.
            with connection, self._said.open("ab") as stderr:
                self._children = [child for child in self._children if child.poll() is None]
                self._children.append(
                    subprocess.Popen(
                        self._argv,
                        stdin=connection.fileno(),
                        stdout=connection.fileno(),
                        stderr=stderr,
                        env=environment(),
                        start_new_session=True,
                    )
                )
