"""Which way an engine comes to which machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forge_core.console import Console
from forge_core.engine import install, packages
from forge_core.engine.client import NoEngine
from forge_core.engine.packages import Distribution
from forge_core.engine.place import Place
from forge_core.errors import EnvironmentFailure


@pytest.mark.parametrize(
    ("text", "way"),
    [
        (
            'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\nVERSION_ID="12"\nVERSION_CODENAME=bookworm\n',
            "suite",
        ),
        ('ID=debian\nVERSION_ID="13"\n', "distribution"),
        ("ID=debian\nVERSION_CODENAME=forky\n", "distribution"),
        ('ID=debian\nVERSION_ID="11"\n', None),
        ('ID=ubuntu\nVERSION_ID="24.04"\n', "distribution"),
        ('ID=ubuntu\nVERSION_ID="22.04"\n', "distribution"),
        ('ID=ubuntu\nVERSION_ID="20.04"\n', None),
        ("ID='fedora'\nVERSION_ID=41\n", None),
        ("ID=arch\nVERSION_ID=rolling\n", None),
        ("", None),
    ],
)
def test_the_way(tmp_path: Path, text: str, way: str | None) -> None:
    (tmp_path / "os-release").write_text(text)
    assert Distribution.of(tmp_path / "os-release").way() == way


def test_no_os_release(tmp_path: Path) -> None:
    assert Distribution.of(tmp_path / "none").way() is None


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(place: Place) -> None:
        raise NoEngine("no container engine answers")

    monkeypatch.setattr(install, "connect", connect)
    monkeypatch.setattr(packages, "missing_tools", lambda: ["skopeo"])


@pytest.mark.usefixtures("silent")
def test_not_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(EnvironmentFailure) as caught:
        install.ensure(Console(quiet=True), Place(tmp_path / "engine"))
    assert caught.value.exit_code == 3
    for wanted in ("docker.io", "docker-buildx", "skopeo", "as root"):
        assert wanted in f"{caught.value.message} {caught.value.hint}"
    assert not (tmp_path / "engine").exists()


@pytest.mark.usefixtures("silent")
def test_an_unknown_distribution(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    unknown = Distribution("plan9", "4", "Plan 9", "")
    monkeypatch.setattr(Distribution, "of", classmethod(lambda cls: unknown))
    with pytest.raises(EnvironmentFailure, match="Plan 9") as caught:
        install.ensure(Console(quiet=True), Place(tmp_path / "engine"))
    assert "Docker Engine 25" in (caught.value.hint or "") and "skopeo" in (caught.value.hint or "")


@pytest.fixture
def debian13(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Records what would be installed and started on Debian 13."""
    done: list[str] = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(
        Distribution, "of", classmethod(lambda cls: Distribution("debian", "13", "Debian 13", "trixie"))
    )
    monkeypatch.setattr(packages, "missing_tools", lambda: ["skopeo"])
    monkeypatch.setattr(install, "_installed", lambda: (False, False))
    monkeypatch.setattr(install, "_APPARMOR", tmp_path / "enabled")
    monkeypatch.setattr(install.shutil, "which", lambda name: None)
    monkeypatch.setattr(install, "_DAEMON_JSON", tmp_path / "etc/daemon.json")
    monkeypatch.setattr(packages, "install", lambda names, log: done.append(f"install {' '.join(names)}"))
    monkeypatch.setattr(install, "run", lambda argv, **_: done.append(" ".join(argv)))
    monkeypatch.setattr(install.daemon, "start", lambda place, system: done.append(f"dockerd system={system}"))
    return done


def begin(place: Place) -> None:
    place.run.mkdir(parents=True)
    with Console(quiet=True).step("engine") as step:
        install._start(place, step)


def test_debian_13_with_systemd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, debian13: list[str]) -> None:
    monkeypatch.setattr(packages, "systemd_runs", lambda: True)
    place = Place(tmp_path / "engine")
    begin(place)
    assert debian13 == ["install docker.io docker-buildx skopeo", "systemctl enable --now docker.service"]
    assert "containerd-snapshotter" in (tmp_path / "etc/daemon.json").read_text()
    assert place.started() == "systemd"
    debian13.clear()
    assert install.stop(Console(quiet=True), place) is True
    assert debian13 == ["systemctl stop docker.service docker.socket"]
    assert place.started() is None


def test_debian_13_without_systemd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, debian13: list[str]) -> None:
    monkeypatch.setattr(packages, "systemd_runs", lambda: False)
    begin(Place(tmp_path / "engine"))
    assert debian13 == ["install docker.io docker-buildx skopeo", "dockerd system=False"]
    assert not (tmp_path / "etc").exists()


def test_what_docker_merely_recommends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, debian13: list[str]) -> None:
    monkeypatch.setattr(packages, "systemd_runs", lambda: True)
    (tmp_path / "enabled").write_text("Y\n")
    begin(Place(tmp_path / "engine", "forge1", "10.9.0.1/24"))
    # a second engine is never the machine's service
    assert debian13 == ["install docker.io docker-buildx apparmor iproute2 skopeo", "dockerd system=False"]


def test_a_daemon_json_of_the_machine_is_never_touched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, debian13: list[str]
) -> None:
    monkeypatch.setattr(packages, "systemd_runs", lambda: True)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/daemon.json").write_text("{}")
    begin(Place(tmp_path / "engine"))
    assert (tmp_path / "etc/daemon.json").read_text() == "{}"


def test_packages_that_only_root_may_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    packages.install([], log=tmp_path / "log")
    with pytest.raises(EnvironmentFailure) as caught:
        packages.install(["skopeo", "git"], log=tmp_path / "log")
    assert caught.value.hint == "as root: apt-get install skopeo git"


def test_missing_tools_are_named_by_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert {"git", "mmdebstrap", "skopeo"} <= set(packages.missing_tools())
    for name in ("git", "mmdebstrap", "skopeo"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    assert set(packages.missing_tools()) <= {"debian-archive-keyring"}


def test_services_are_held_and_a_stale_hold_is_lifted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    policy = tmp_path / "policy-rc.d"
    monkeypatch.setattr(packages, "_POLICY", policy)
    with packages._held():
        assert os.access(policy, os.X_OK) and "exit 101" in policy.read_text()
    assert not policy.exists()
    policy.write_text(packages._POLICY_TEXT)  # a run that was killed
    with packages._held():
        assert policy.exists()
    assert not policy.exists()
    policy.write_text("#!/bin/sh\nexit 0\n")  # the machine's own
    with packages._held():
        pass
    assert policy.read_text() == "#!/bin/sh\nexit 0\n"
