"""An engine on a bare machine: leave one that answers alone, otherwise install and start one.

Debian 13 and Ubuntu take it from the distribution. Debian 12, whose engine is too old, runs the newer suite's (see
`daemon`); this way is what the integration tests try. Debian 13's was tried in a chroot without systemd; systemd and
Ubuntu are tested by their decisions alone.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from forge_core.console import Console, Step
from forge_core.engine import daemon, packages, plugin
from forge_core.engine.client import Engine, NoEngine, connect, connect_own
from forge_core.engine.packages import Distribution
from forge_core.engine.place import Place
from forge_core.engine.probe import probe
from forge_core.errors import EnvironmentFailure
from forge_core.files import atomic_folder, write_text
from forge_core.process import CommandFailed, run

SUITE = "forky"
"""The suite whose engine serves Debian 12: Docker Engine 28.5, buildx 0.29; FORGE_ENGINE_SUITE names another."""

_SUITE_PACKAGES = ("apparmor", "ca-certificates", "docker.io", "docker-buildx", "containerd", "iproute2", "iptables")
_DISTRIBUTION_PACKAGES = ["docker.io", "docker-buildx"]
_DAEMON_JSON = Path("/etc/docker/daemon.json")
_APPARMOR = Path("/sys/module/apparmor/parameters/enabled")


def ensure(console: Console, place: Place | None = None) -> Engine:
    """The engine that answers, probed; where none does and we are root, installed and started.

    Installs the missing programs of the line too. Raises EnvironmentFailure with what to install when we may not.
    """
    place = place or Place.default()
    with console.step("engine") as step:
        tools = packages.missing_tools()
        try:
            engine = connect(place)
        except plugin.BuildxMissing:
            with _locked(place, "docker-buildx", *tools):
                _install_buildx(place, step)
            engine = connect(place)
        except NoEngine:
            with _locked(place, *_DISTRIBUTION_PACKAGES, *tools):
                _start(place, step)
            engine = connect(place)
        if tools and (tools := packages.missing_tools()):
            with _locked(place, *tools):
                step.say(f"installing {', '.join(tools)}")
                packages.install(tools, log=place.install_log)
        known = probe(engine)
        step.result(
            f"{engine.version} at {engine.address}, {engine.store} image store, buildx {engine.buildx_version},"
            f" one layer twice gives one digest{' (known from before)' if known else ''}"
        )
        return engine


def start(console: Console, place: Place) -> Engine:
    """Our own engine of that place, started whatever else answers: a second one beside another needs its own bridge.

    Raises EnvironmentFailure.
    """
    with console.step("engine", str(place.root)) as step:
        with _locked(place, *_DISTRIBUTION_PACKAGES):
            _start(place, step)
        return connect_own(place)


def stop(console: Console, place: Place | None = None) -> bool:
    """Stop the engine that we started, and no other; returns whether one ran."""
    place = place or Place.default()
    if not place.root.is_dir():
        console.say("no engine of ours runs")
        return False
    with _locked(place):
        if place.started() == "systemd":
            run(["systemctl", "stop", "docker.service", "docker.socket"], timeout=120)
            place.state.unlink(missing_ok=True)
            ran = True
        else:
            ran = daemon.stop(place)
    console.say(f"stopped the engine of {place.root}" if ran else "no engine of ours runs")
    return ran


def _start(place: Place, step: Step) -> None:
    """Install and start an engine, the way this distribution needs it."""
    if daemon.answers(place):
        return  # another run was faster
    distribution = Distribution.of()
    way = distribution.way()
    tools = packages.missing_tools()
    if way is None:
        raise EnvironmentFailure(
            f"no container engine answers, and how to install one on {distribution.name} is not known here",
            hint=f"install Docker Engine 25 or newer with buildx 0.13 or newer{_and(tools)}, then run again",
        )
    if way == "suite":
        packages.install(tools, log=place.install_log)
        _ensure_system(place, distribution, step)
        step.say("starting it")
        daemon.start(place, system=True)
        return
    # A second engine (its own bridge) is never the machine's service.
    service = packages.systemd_runs() and place.bridge is None
    if service and not _DAEMON_JSON.exists() and shutil.which("dockerd") is None:
        _DAEMON_JSON.parent.mkdir(parents=True, exist_ok=True)
        write_text(_DAEMON_JSON, json.dumps(daemon.DAEMON_JSON) + "\n")
    wanted = [p for p, there in zip(_DISTRIBUTION_PACKAGES, _installed(), strict=True) if not there]
    wanted += [*_beside_docker(place), *tools]
    if wanted:
        step.say(f"installing {', '.join(wanted)}")
        packages.install(wanted, log=place.install_log)
    if service:
        run(["systemctl", "enable", "--now", "docker.service"], log=place.install_log, timeout=120)
        write_text(place.state, json.dumps({"started": "systemd"}) + "\n")
    else:
        step.say("starting it")
        daemon.start(place, system=False)


def _beside_docker(place: Place) -> list[str]:
    """What docker.io merely recommends and this machine's kernel or our settings need."""
    wanted = []
    enforced = _APPARMOR.read_text(encoding="utf-8").startswith("Y") if _APPARMOR.is_file() else False
    if enforced and shutil.which("apparmor_parser") is None:
        wanted.append("apparmor")
    if place.bridge and shutil.which("ip") is None:
        wanted.append("iproute2")
    return wanted


def _installed() -> tuple[bool, bool]:
    """Whether dockerd and a buildx are there."""
    try:
        plugin.find()
    except EnvironmentFailure:
        return shutil.which("dockerd") is not None, False
    return shutil.which("dockerd") is not None, True


def _install_buildx(place: Place, step: Step) -> None:
    """An engine answers but there is no buildx: bring that alone."""
    distribution = Distribution.of()
    way = distribution.way()
    if way == "distribution":
        step.say("installing docker-buildx")
        packages.install(["docker-buildx"], log=place.install_log)
    elif way == "suite":
        packages.install(packages.missing_tools(), log=place.install_log)
        _ensure_system(place, distribution, step)
    else:
        raise EnvironmentFailure("an engine answers, but there is no buildx", hint=plugin.MISSING_HINT)


def _ensure_system(place: Place, distribution: Distribution, step: Step) -> None:
    """Make the newer suite's root, whole or not at all."""
    if (place.system / "usr/sbin/dockerd").is_file():
        return
    for stale in place.root.glob(f".{place.system.name}.*"):
        shutil.rmtree(stale, ignore_errors=True)
    suite = os.environ.get("FORGE_ENGINE_SUITE") or SUITE
    step.say(f"{distribution.name} has no engine that can do it: taking {suite}'s into {place.system} (about 30 s)")
    options = [f"--aptopt={line}" for line in packages.apt_settings()]
    # The suite moves on, and a mirror that is a snapshot serves a Release file past its date.
    options += [
        "--variant=apt",
        '--aptopt=Acquire::Check-Valid-Until "false"',
        f"--include={','.join(_SUITE_PACKAGES)}",
    ]
    source = packages.mirror(distribution.codename)
    if source is None:  # no package lists yet
        packages.update(place.install_log)
        source = packages.mirror(distribution.codename)
    # In a mount namespace of its own: what it mounts inside the new root goes with it, whatever ends it.
    command = ["unshare", "--mount", "--propagation", "private", "mmdebstrap", "--mode=root", *options]
    try:
        with atomic_folder(place.system) as aside:
            aside.chmod(0o755)
            run([*command, suite, aside, *([source] if source else [])], log=place.install_log, timeout=1800)
            daemon.link_programs(aside)
    except CommandFailed as error:
        raise EnvironmentFailure(
            f"the engine of the suite {suite} could not be installed",
            hint="check the machine's package sources and network, then run again",
            log=place.install_log,
            details=error.details,
        ) from error


@contextmanager
def _locked(place: Place, *wanted: str) -> Iterator[None]:
    """One installation at a time; only root may."""
    if os.geteuid() != 0:
        raise EnvironmentFailure(
            f"the machine lacks {', '.join(wanted)} or a started engine, and only root may change that"
            if wanted
            else "only root may stop the engine",
            hint=f"run `nox -s engine` as root{_and(list(wanted), 'or install and start')}",
        )
    place.run.mkdir(parents=True, exist_ok=True)
    with FileLock(place.root / "lock"):
        yield


def _and(packages_: list[str], verb: str = "and") -> str:
    return f", {verb} {', '.join(packages_)}" if packages_ else ""
