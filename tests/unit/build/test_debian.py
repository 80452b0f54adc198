"""Real apt over a repository made here, in a private root."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_build.fetch import debian
from forge_build.fetch.debian import Apt
from forge_build.lock import LockedDeb
from forge_build.manifest import Base
from forge_core.errors import EnvironmentFailure, UsageError
from forge_core.process import run

BASE = Base.model_validate({"suite": "bookworm", "builder": {"packages": []}, "runtime": {"packages": []}})


class Repository:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def deb(self, name: str, version: str, **fields: str) -> Path:
        tree = self.folder.parent / "tree"
        shutil.rmtree(tree, ignore_errors=True)
        (tree / "DEBIAN").mkdir(parents=True)
        known = {"Maintainer": "x <x@y>", "Architecture": "amd64", "Description": name}
        known |= {key.replace("_", "-"): value for key, value in fields.items()}
        control = "".join(f"{key}: {value}\n" for key, value in {"Package": name, "Version": version, **known}.items())
        (tree / "DEBIAN/control").write_text(control)
        subprocess.run(["dpkg-deb", "--build", "-Znone", tree, self.folder], check=True, capture_output=True)
        return next(self.folder.glob(f"{name}_{version.split(':')[-1]}_*.deb"))

    def index(self) -> None:
        stanzas = []
        for path in sorted(self.folder.glob("*.deb")):
            control = subprocess.run(["dpkg-deb", "-f", path], check=True, capture_output=True, text=True).stdout
            sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
            stanzas.append(f"{control}Filename: ./{path.name}\nSize: {path.stat().st_size}\nSHA256: {sha256}\n")
        (self.folder / "Packages").write_text("\n".join(stanzas))


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    made = Repository(tmp_path / "repository")
    monkeypatch.setattr(debian, "_sources", lambda base, folder: f"deb [trusted=yes] file:{made.folder} ./\n")
    made.deb("base-files", "1", Essential="yes", Priority="required")
    made.deb("tzdata", "2026a", Priority="required", Architecture="all")
    made.deb("python3", "1:3.11-1", Depends="libpython3 (>= 3.11)", Recommends="docs")
    made.deb("libpython3", "3.11-1", Depends="libc6")
    made.deb("libc6", "2.36")
    made.deb("docs", "1")
    made.index()
    return made


@pytest.fixture
def apt(repository: Repository, tmp_path: Path) -> Iterator[Apt]:
    yield Apt.open(BASE, tmp_path / "root")


def test_a_base_is_the_essential_the_required_and_the_named_without_recommendations(
    apt: Apt, repository: Repository
) -> None:
    found = apt.resolve(["python3"])
    assert [deb.name for deb, _ in found] == ["base-files", "libc6", "libpython3", "python3", "tzdata"]
    python, address = found[3]
    path = next(repository.folder.glob("python3_*.deb"))
    assert (python.version, python.architecture) == ("1:3.11-1", "amd64")
    assert python.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert python.size == path.stat().st_size
    assert python.file == "python3_1%3a3.11-1_amd64.deb"
    assert address == f"file:{repository.folder}/./{path.name}"
    assert found[4][0].architecture == "all"


def test_a_package_that_does_not_exist_is_named(apt: Apt) -> None:
    with pytest.raises(UsageError) as caught:
        apt.resolve(["python3", "pyhton3"])
    assert any("pyhton3" in line for line in caught.value.details)


def test_a_dependency_that_cannot_be_met_is_named(repository: Repository, tmp_path: Path) -> None:
    repository.deb("broken", "1", Depends="nothing-like-it")
    repository.index()
    with pytest.raises(UsageError) as caught:
        Apt.open(BASE, tmp_path / "root").resolve(["broken"])
    assert any("nothing-like-it" in line for line in caught.value.details)


def test_what_moved_and_what_is_gone_is_told_apart(repository: Repository, tmp_path: Path) -> None:
    locked = {d.name: d for d, _ in Apt.open(BASE, tmp_path / "before").resolve(["python3", "docs"])}
    next(repository.folder.glob("libpython3_*.deb")).unlink()
    repository.deb("libpython3", "3.11-2")
    next(repository.folder.glob("docs_*.deb")).unlink()
    # the same version with other bytes has moved as well
    next(repository.folder.glob("libc6_*.deb")).unlink()
    repository.deb("libc6", "2.36", Homepage="https://x.invalid")
    repository.index()
    located = debian.locate(BASE, list(locked.values()), tmp_path / "after")
    assert {d.name for d in located.urls} == {"base-files", "tzdata", "python3"}
    moved = {old.name: new for old, new in located.moved.items()}
    assert moved.keys() == {"libpython3", "docs", "libc6"}
    assert moved["docs"] is None
    assert moved["libpython3"] is not None
    assert moved["libpython3"][0].version == "3.11-2"
    assert moved["libpython3"][1].endswith("libpython3_3.11-2_amd64.deb")
    assert moved["libc6"] is not None
    assert moved["libc6"][0].sha256 != locked["libc6"].sha256


def test_of_two_versions_the_locked_one_is_found_beside_a_newer_one(repository: Repository, tmp_path: Path) -> None:
    (old,) = [d for d, _ in Apt.open(BASE, tmp_path / "before").resolve(["docs"]) if d.name == "docs"]
    repository.deb("docs", "2")
    repository.index()
    located = debian.locate(BASE, [old], tmp_path / "after")
    assert located.urls[old].endswith("docs_1_amd64.deb")


def test_a_mirror_that_is_not_there_is_an_environment_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debian, "_sources", lambda base, folder: f"deb [trusted=yes] file:{tmp_path}/nowhere ./\n")
    with pytest.raises(EnvironmentFailure, match="indexes of bookworm") as caught:
        Apt.open(BASE, tmp_path / "root")
    assert caught.value.details


def test_the_host_lends_its_ways_to_the_net_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = tmp_path / "host.conf"
    host.write_text(
        'Acquire::http::Proxy "http://proxy.invalid:3128";\nAcquire::https::CaInfo "/etc/ca.pem";\n'
        'APT::Update::Post-Invoke { "rm -rf /var/cache/apt"; };\nAPT::Default-Release "sid";\n'
        'Acquire::http::Proxy::own.invalid "DIRECT";\n'
    )
    monkeypatch.setattr(debian, "run", lambda argv, **_: run([*argv, "-c", host]))
    lines = debian._configuration().splitlines()
    assert 'Acquire::http::Proxy "http://proxy.invalid:3128";' in lines
    assert 'Acquire::http::Proxy::own.invalid "DIRECT";' in lines
    assert 'Acquire::https::CaInfo "/etc/ca.pem";' in lines
    assert not any(re.search("Post-Invoke|Default-Release", line) for line in lines)
    assert 'Dir::Etc::parts "/dev/null";' in lines


def test_hooks_of_the_host_do_not_run(repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Apt.open(BASE, tmp_path / "root")
    dump = opened._run("apt-config", "dump").stdout
    assert re.search(r'^Dir::Etc::parts "/dev/null";$', dump, re.MULTILINE)
    assert not re.search(r'^APT::Update::Post-Invoke(-Success)?:: "', dump, re.MULTILINE)


def test_the_manifests_mirrors_are_used_as_given(tmp_path: Path) -> None:
    base = BASE.model_copy(update={"mirror": "http://mirror.invalid/debian"})
    assert debian._sources(base, tmp_path).splitlines() == [
        "deb http://mirror.invalid/debian bookworm main",
        "deb http://mirror.invalid/debian bookworm-updates main",
    ]
    both = base.model_copy(update={"security_mirror": "http://mirror.invalid/security"})
    assert "deb http://mirror.invalid/security bookworm-security main" in debian._sources(both, tmp_path)


def test_a_file_is_named_as_apt_names_it() -> None:
    deb = LockedDeb(name="zlib1g", version="1:1.2.13.dfsg-1", architecture="amd64", sha256="0" * 64, size=1)
    assert deb.file == "zlib1g_1%3a1.2.13.dfsg-1_amd64.deb"
