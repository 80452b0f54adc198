"""Where our own engine lies, and whether what runs there is really ours.

Layout below FORGE_ENGINE_ROOT (default /var/lib/sm120-forge/engine; two roots are two engines):
    system/     the newer suite whose /usr the engine runs with, only where the distribution's own engine is too old
    data/       images and containers
    run/        docker.sock, dockerd.pid, dockerd.log, install.log, exec/
    state.json  how the engine was started
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from forge_core.errors import UsageError

DEFAULT_ROOT = "/var/lib/sm120-forge/engine"

MARKER = "FORGE_ENGINE_PLACE"
"""Environment variable of our dockerd, inherited by containerd and its shims: tells our processes from others'."""

# A Unix socket's path holds 107 bytes; the longest of ours is run/exec/containerd/containerd-debug.sock.ttrpc.
_LONGEST_ROOT = 60


@dataclass(frozen=True)
class Place:
    """The folder of our own engine and the network settings that let two engines live side by side."""

    root: Path
    bridge: str | None = None
    """Name of the bridge; None: docker0, which belongs to one engine of a machine only."""
    subnet: str | None = None
    """Address of that bridge with its prefix, for example `10.209.0.1/24`."""

    @classmethod
    def default(cls) -> Place:
        """The place of FORGE_ENGINE_ROOT and FORGE_ENGINE_BRIDGE (`NAME=ADDRESS/PREFIX`); raises UsageError."""
        root = Path(os.environ.get("FORGE_ENGINE_ROOT") or DEFAULT_ROOT).expanduser().absolute()
        if len(str(root)) > _LONGEST_ROOT:
            raise UsageError(
                f"FORGE_ENGINE_ROOT {root} is longer than {_LONGEST_ROOT} characters",
                hint="name a shorter folder: the path of a Unix socket is limited",
            )
        setting = os.environ.get("FORGE_ENGINE_BRIDGE", "")
        bridge, _, subnet = setting.partition("=")
        if setting and not (bridge and "/" in subnet and len(bridge) <= 15):
            raise UsageError(f"FORGE_ENGINE_BRIDGE {setting!r} is not NAME=ADDRESS/PREFIX")
        return cls(root, bridge or None, subnet or None)

    @property
    def run(self) -> Path:
        """Folder of the socket, pid file and logs."""
        return self.root / "run"

    @property
    def system(self) -> Path:
        """Root file system of the newer suite."""
        return self.root / "system"

    @property
    def socket(self) -> Path:
        """The engine's Unix socket."""
        return self.run / "docker.sock"

    @property
    def address(self) -> str:
        """The engine's address, as DOCKER_HOST takes it."""
        return f"unix://{self.socket}"

    @property
    def pidfile(self) -> Path:
        """Written by dockerd itself."""
        return self.run / "dockerd.pid"

    @property
    def log(self) -> Path:
        """What dockerd says."""
        return self.run / "dockerd.log"

    @property
    def install_log(self) -> Path:
        """What the package tools say."""
        return self.run / "install.log"

    @property
    def exec_root(self) -> Path:
        """Run-time files of dockerd and containerd; worthless once no process is left."""
        return self.run / "exec"

    @property
    def state(self) -> Path:
        """How the engine was started."""
        return self.root / "state.json"

    def started(self) -> str | None:
        """`own` or `systemd`, as the state file has it; None when we started nothing."""
        try:
            how = json.loads(self.state.read_text(encoding="utf-8")).get("started")
        except (OSError, ValueError, AttributeError):
            return None
        return how if how in ("own", "systemd") else None

    def dockerd(self) -> psutil.Process | None:
        """Our running dockerd; None when the pid file is stale (a machine that stopped hard) or names another."""
        try:
            process = psutil.Process(int(self.pidfile.read_text(encoding="utf-8")))
            command = process.cmdline()
        except (OSError, ValueError, psutil.Error):
            return None
        return process if f"--pidfile={self.pidfile}" in command else None

    def processes(self) -> list[psutil.Process]:
        """Every process of this engine: those that carry our marker, what they started, and orphaned containers."""
        containers = {p.name for p in self.containers.iterdir()} if self.containers.is_dir() else set()
        ours: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARKER) == str(self.root) or containers & _groups(process.pid):
                    ours[process.pid] = process
                    ours.update({child.pid: child for child in process.children(recursive=True)})
            except (psutil.Error, OSError):
                continue
        # A caller that exported the marker is no part of the engine; neither are we.
        ours.pop(os.getpid(), None)
        return list(ours.values())

    @property
    def containers(self) -> Path:
        """One folder per container, named by its id."""
        return self.root / "data" / "containers"


def _groups(pid: int) -> set[str]:
    """The last names of a process's control groups: docker names them by container id."""
    lines = Path(f"/proc/{pid}/cgroup").read_text(encoding="utf-8").splitlines()
    # systemd's driver calls it docker-ID.scope
    return {line.rpartition("/")[2].removeprefix("docker-").removesuffix(".scope") for line in lines}
