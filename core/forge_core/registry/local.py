"""The staging registry on loopback: Debian's docker-registry, started for the line, outliving the command.

Layout below the store's folder `registry` (FORGE_REGISTRY_DATA names another): data/, config.yml, registry.pid,
registry.log, bin/ (the program, where the distribution's package is not installed).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from filelock import FileLock

from forge_core.console import Console
from forge_core.engine import packages
from forge_core.errors import EnvironmentFailure, UsageError
from forge_core.files import atomic_path, write_text
from forge_core.process import CommandFailed, ended, run
from forge_core.store import Store

DEFAULT_PORT = 5120
_START_S = 30
_RELEASE_S = 3
_STOP_S = 20

# Deletion is on, so that old builds can be dropped; nothing else but loopback is ever listened on.
_CONFIG = """\
version: 0.1
log: {{level: info, formatter: text}}
storage:
  filesystem: {{rootdirectory: {data}}}
  delete: {{enabled: true}}
  maintenance: {{uploadpurging: {{enabled: true, age: 24h, interval: 24h, dryrun: false}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


@dataclass(frozen=True)
class LocalRegistry:
    """Folder and port of the registry."""

    folder: Path
    port: int

    @classmethod
    def default(cls) -> LocalRegistry:
        """As FORGE_REGISTRY_DATA (else the store) and FORGE_REGISTRY_PORT (else 5120) say; raises UsageError."""
        setting = os.environ.get("FORGE_REGISTRY_PORT") or str(DEFAULT_PORT)
        if not setting.isdigit() or not 0 < int(setting) < 65536:
            raise UsageError(f"FORGE_REGISTRY_PORT {setting!r} is no port")
        named = os.environ.get("FORGE_REGISTRY_DATA")
        folder = Path(named).expanduser().absolute() if named else Store.open().root / "registry"
        return cls(folder, int(setting))

    @property
    def address(self) -> str:
        """Host and port, as image references have them."""
        return f"127.0.0.1:{self.port}"

    @property
    def config(self) -> Path:
        """The configuration, which also names the process: it is on its command line."""
        return self.folder / "config.yml"

    @property
    def pidfile(self) -> Path:
        """Process id."""
        return self.folder / "registry.pid"

    @property
    def log(self) -> Path:
        """What the registry says."""
        return self.folder / "registry.log"

    def process(self) -> psutil.Process | None:
        """Our running registry; None when the pid file is stale or names another process."""
        try:
            process = psutil.Process(int(self.pidfile.read_text(encoding="utf-8")))
            return process if str(self.config) in process.cmdline() else None
        except (OSError, ValueError, psutil.Error):
            return None


def ensure(console: Console, registry: LocalRegistry | None = None) -> str:
    """The address of the running registry, started if need be.

    Raises EnvironmentFailure when another process holds the port, or when docker-registry cannot be had.
    """
    registry = registry or LocalRegistry.default()
    registry.folder.mkdir(parents=True, exist_ok=True)
    with FileLock(registry.folder / "lock"):
        running = registry.process()
        if running is not None and _listens(running, registry.port):
            return registry.address
        if running is not None:
            _end(registry)  # on another port, or hung
        _refuse_foreign(registry)
        with console.step("registry", registry.address) as step:
            _start(registry, program(registry))
            step.result(f"listening, data in {registry.folder}")
    return registry.address


def stop(console: Console, registry: LocalRegistry | None = None) -> bool:
    """Stop the registry that we started; returns whether one ran. Its data stays."""
    registry = registry or LocalRegistry.default()
    if not registry.folder.is_dir():
        return False
    with FileLock(registry.folder / "lock"):
        if registry.process() is None:
            registry.pidfile.unlink(missing_ok=True)
            return False
        _end(registry)
    console.say(f"stopped the registry {registry.address}")
    return True


def program(registry: LocalRegistry | None = None) -> Path:
    """The docker-registry program: installed, or unpacked from the distribution's package into our folder.

    Unpacked rather than installed, as the package would start a service of its own on port 5000.
    """
    registry = registry or LocalRegistry.default()
    if found := shutil.which("docker-registry"):
        return Path(found)
    own = registry.folder / "bin" / "docker-registry"
    if own.is_file():
        return own
    hint = "as root: apt-get install docker-registry"
    if shutil.which("apt-get") is None:
        raise EnvironmentFailure("docker-registry is not installed", hint="install it (distribution 2.8 or newer)")
    log = registry.folder / "install.log"
    with tempfile.TemporaryDirectory(prefix="forge-registry-") as scratch:
        Path(scratch).chmod(0o755)
        try:
            _download(Path(scratch), log)
            package = next(Path(scratch).glob("docker-registry_*.deb"))
            run(["dpkg-deb", "-x", package, Path(scratch) / "root"], log=log)
            with atomic_path(own, mode=0o755) as aside:
                shutil.copyfile(Path(scratch) / "root/usr/bin/docker-registry", aside)
        except (CommandFailed, StopIteration, FileNotFoundError) as error:
            raise EnvironmentFailure(
                "docker-registry could not be had from the distribution", hint=hint, log=log
            ) from (error)
    return own


def _download(folder: Path, log: Path) -> None:
    # Root's apt would want to write as its own user, who may not write here.
    command = ["apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", "docker-registry"]
    if run(command, cwd=folder, log=log, check=False, timeout=300).returncode != 0:
        packages.update(log)
        run(command, cwd=folder, log=log, timeout=300)


def _start(registry: LocalRegistry, command: Path) -> None:
    data = registry.folder / "data"
    data.mkdir(exist_ok=True)
    write_text(registry.config, _CONFIG.format(data=data, port=registry.port))
    # The shell becomes the registry, so its number is the registry's; a session of its own outlives ours.
    serve = 'echo $$ >"$1"; exec </dev/null >>"$2" 2>&1; shift 2; exec "$@"'
    serve_argv = ["sh", "-c", serve, "sh", str(registry.pidfile), str(registry.log)]
    registry.pidfile.unlink(missing_ok=True)
    env = {"OTEL_TRACES_EXPORTER": "none", "REGISTRY_HTTP_SECRET": os.urandom(16).hex()}
    run(["setsid", "--fork", *serve_argv, str(command), "serve", str(registry.config)], env=env, timeout=30)
    began = time.monotonic()
    while time.monotonic() < began + _START_S:
        process = registry.process()
        if process is not None and _listens(process, registry.port) and _answers(registry):
            return
        if process is None and time.monotonic() > began + 3:
            break
        time.sleep(0.05)
    _end(registry)
    tail = registry.log.read_text(errors="replace").splitlines()[-5:] if registry.log.is_file() else []
    raise EnvironmentFailure("the registry on loopback did not start", log=registry.log, details=tuple(tail))


def _answers(registry: LocalRegistry) -> bool:
    try:
        # A proxy of the environment is never asked for loopback.
        with httpx.Client(trust_env=False, timeout=5) as client:
            return client.get(f"http://{registry.address}/v2/").status_code == 200
    except httpx.HTTPError:
        return False


def _listens(process: psutil.Process, port: int) -> bool:
    try:
        return any(
            c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port
            for c in process.net_connections(kind="tcp")
        )
    except psutil.Error:
        return False


def _refuse_foreign(registry: LocalRegistry) -> None:
    """Raise EnvironmentFailure when something else listens on our port, with its name where we may see it."""
    # A registry that was just killed may hold the port a moment longer than its process is seen.
    deadline = time.monotonic() + _RELEASE_S
    while True:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            # As the registry does: a connection of before in TIME_WAIT does not hold the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", registry.port))
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise EnvironmentFailure(
                        f"{registry.address} is held by {_holder(registry.port)}",
                        hint="stop it, or name another port in FORGE_REGISTRY_PORT",
                    ) from error
        time.sleep(0.1)


def _holder(port: int) -> str:
    for process in psutil.process_iter():
        if _listens(process, port):
            try:
                return f"process {process.pid} ({' '.join(process.cmdline())[:80] or process.name()})"
            except psutil.Error:
                break
    return "another process, which this user may not see"


def _end(registry: LocalRegistry) -> None:
    process = registry.process()
    if process is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
            if not ended(process, _STOP_S):
                process.kill()
                ended(process, _STOP_S)
    registry.pidfile.unlink(missing_ok=True)
