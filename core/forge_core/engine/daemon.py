"""Start and stop our own dockerd.

It runs in a mount namespace of its own, a slave of the host's: what it mounts is never seen outside and is gone with
its last process, however that ended, while every folder of the host, also one mounted later, lies at the same place
inside, so that bind mounts work. Where the distribution's engine is too old, the namespace has the newer suite's /usr
in the place of the host's; all else, /etc with its certificates included, stays the host's.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from pathlib import Path

import docker
import docker.errors
import psutil
import requests

from forge_core.engine.place import MARKER, Place
from forge_core.errors import EnvironmentFailure
from forge_core.files import write_text
from forge_core.process import ended, run

_START_S = 120
_STOP_S = 60

DAEMON_JSON = {"features": {"containerd-snapshotter": True}}
"""The image store that keeps manifest digests and can write OCI archives."""

# Names that the newer suite reaches through /etc/alternatives, which stays the host's.
_ALTERNATIVES = ("iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore")
_PROGRAMS = "usr/libexec/forge"

_ENTER = """
set -eu
system=$1; shift
if [ -n "$system" ]; then
  # The host's own programs and the kernel's modules stay; the engine loads modules for its networks.
  for keep in /usr/local /usr/lib/modules; do
    if [ -d "$keep" ]; then mkdir -p "$system$keep"; mount --rbind "$keep" "$system$keep"; fi
  done
  mount --rbind "$system/usr" /usr
fi
exec "$@"
"""

_SERVE = """
set -eu
log=$1 bridge=$2 subnet=$3; shift 3
exec </dev/null >>"$log" 2>&1
if [ -n "$bridge" ]; then
  ip link add "$bridge" type bridge 2>/dev/null || true
  ip address replace "$subnet" dev "$bridge"
  ip link set "$bridge" up
fi
exec "$@"
"""


def start(place: Place, *, system: bool) -> None:
    """Start dockerd (with the newer suite's /usr if `system`) and wait until it answers.

    Raises EnvironmentFailure with the log when it does not within two minutes.
    """
    if place.dockerd() is None:
        _clear(place)
        place.exec_root.mkdir(parents=True)
        write_text(place.root / "daemon.json", json.dumps(DAEMON_JSON) + "\n")
        place.log.unlink(missing_ok=True)
        command = ["sh", "-c", _SERVE, "sh", str(place.log), place.bridge or "", place.subnet or ""]
        _enter(place, [*command, *_dockerd(place)], system=system, detach=True)
        write_text(place.state, json.dumps({"started": "own", "bridge": place.bridge, "system": system}) + "\n")
    deadline = time.monotonic() + _START_S
    began = time.monotonic()
    while not answers(place):
        alive = place.dockerd() is not None or time.monotonic() < began + 5 or place.processes()
        if not alive or time.monotonic() > deadline:
            tail = place.log.read_text(errors="replace").splitlines()[-8:] if place.log.is_file() else []
            stop(place)
            raise EnvironmentFailure(
                "our container engine did not start" if not alive else f"our engine is silent after {_START_S} s",
                hint="the kernel must allow mounts, network bridges and control groups (a plain container does not)",
                log=place.log,
                details=tuple(tail),
            )
        time.sleep(0.2)


def stop(place: Place) -> bool:
    """Stop our dockerd and all it started; returns whether anything ran. Nothing is left but images and logs."""
    process = place.dockerd()
    ran = process is not None
    if process is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()  # dockerd stops its containers itself, politely
            ended(process, _STOP_S)
    ran = _clear(place) or ran
    settings = _settings(place)
    if isinstance(bridge := settings.get("bridge"), str):
        _enter(place, ["ip", "link", "delete", bridge], system=bool(settings.get("system")), check=False)
    place.state.unlink(missing_ok=True)
    return ran


def answers(place: Place) -> bool:
    """Whether the engine of this place answers on its socket."""
    if not place.socket.exists():
        return False
    try:
        client = docker.DockerClient(base_url=place.address, timeout=5)
    except (docker.errors.DockerException, requests.RequestException, OSError):
        return False
    try:
        return bool(client.ping())
    except (docker.errors.DockerException, requests.RequestException, OSError):
        return False
    finally:
        client.close()


def link_programs(system: Path) -> None:
    """Make the names in the newer suite's /usr that would otherwise go through /etc/alternatives."""
    folder = system / _PROGRAMS
    folder.mkdir(parents=True, exist_ok=True)
    for name in _ALTERNATIVES:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("/usr/sbin/xtables-nft-multi")


def _dockerd(place: Place) -> list[str]:
    argv = [
        "dockerd",
        f"--config-file={place.root / 'daemon.json'}",
        f"--host={place.address}",
        f"--data-root={place.root / 'data'}",
        f"--exec-root={place.exec_root}",
        f"--pidfile={place.pidfile}",
    ]
    if place.bridge:
        # Two engines would overwrite each other's rules; a port published on loopback goes through docker-proxy anyway.
        argv += [f"--bridge={place.bridge}", "--iptables=false", "--ip6tables=false"]
    return argv


def _enter(place: Place, argv: list[str], *, system: bool, detach: bool = False, check: bool = True) -> None:
    """Run a command in a new mount namespace; detached, it leaves our session and outlives us."""
    path = f"/{_PROGRAMS}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    enter = ["unshare", "--mount", "--propagation", "slave", "sh", "-c", _ENTER, "sh"]
    run(
        [*(("setsid", "--fork") if detach else ()), *enter, str(place.system) if system else "", *argv],
        env={MARKER: str(place.root), "PATH": path},
        cwd=place.root,
        timeout=60,
        check=check,
    )


def _clear(place: Place) -> bool:
    """End what a hard stop left of this engine, drop its stale files; returns whether a process was there."""
    found = False
    for _ in range(5):
        left = place.processes()
        if not left:
            break
        found = True
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for process in left:
            ended(process, 10)
    place.pidfile.unlink(missing_ok=True)
    place.socket.unlink(missing_ok=True)
    if place.exec_root.exists() and not _mounted_below(place):
        shutil.rmtree(place.exec_root, ignore_errors=True)
    return found


def _mounted_below(place: Place) -> bool:
    """Whether this namespace has mounts below the place (never made by us): then nothing is deleted there."""
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    return any(line.split()[4].startswith(f"{place.exec_root}/") for line in lines)


def _settings(place: Place) -> dict[str, object]:
    try:
        found = json.loads(place.state.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
