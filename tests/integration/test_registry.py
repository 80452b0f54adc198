"""Images through skopeo into real registries on loopback: plain, with a password, with a certificate of our own."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from forge_core import registry
from forge_core.console import Console
from forge_core.engine import packages
from forge_core.errors import EnvironmentFailure, IntegrityError, UsageError
from forge_core.model import ImageRef
from forge_core.process import ended
from forge_core.registry import local
from forge_core.registry.local import LocalRegistry

NAME, PASSWORD = "forge", "open-sesame"
HTPASSWD = "forge:$2y$05$zaHFi394R9fgq/1BuMqzG.1.4MTpaQdwfVi74jd8Sh89uP/iMMGKi\n"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def oci_archive(path: Path, text: str) -> str:
    """Write a one-layer image as an OCI archive; returns the manifest's digest."""
    blobs: dict[str, bytes] = {}

    def blob(data: bytes) -> dict[str, object]:
        name = hashlib.sha256(data).hexdigest()
        blobs[name] = data
        return {"digest": f"sha256:{name}", "size": len(data)}

    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        entry = tarfile.TarInfo("file")
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text.encode()))
    kind = "application/vnd.oci.image"
    packed = {"mediaType": f"{kind}.layer.v1.tar", **blob(layer.getvalue())}
    settings = {
        "architecture": "amd64",
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [packed["digest"]]},
    }
    config = {"mediaType": f"{kind}.config.v1+json", **blob(json.dumps(settings).encode())}
    document = {"schemaVersion": 2, "mediaType": f"{kind}.manifest.v1+json", "config": config, "layers": [packed]}
    manifest = {"mediaType": f"{kind}.manifest.v1+json", **blob(json.dumps(document, indent=3).encode())}
    files = {f"blobs/sha256/{name}": data for name, data in blobs.items()}
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [manifest]}).encode()
    files["oci-layout"] = b'{"imageLayoutVersion": "1.0.0"}'
    with tarfile.open(path, "w") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return str(manifest["digest"])


@pytest.fixture(scope="module", autouse=True)
def tools() -> None:
    if shutil.which("skopeo") is None:
        packages.install(["skopeo"], log=Path("/tmp/forge-test-install.log"))


@pytest.fixture
def image(tmp_path: Path) -> tuple[Path, str]:
    path = tmp_path / "image.tar"
    return path, oci_archive(path, "one")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return local.program(LocalRegistry(tmp_path_factory.mktemp("registry"), free_port()))


@pytest.fixture
def plain(tmp_path: Path, program: Path) -> Iterator[LocalRegistry]:
    made = LocalRegistry(tmp_path / "registry", free_port())
    if shutil.which("docker-registry") is None:
        (made.folder / "bin").mkdir(parents=True)
        shutil.copy(program, made.folder / "bin/docker-registry")
    local.ensure(Console(), made)
    yield made
    local.stop(Console(), made)


@dataclass
class Guarded:
    """A registry that the line did not start."""

    address: str
    certificate: Path | None = None


def serve(program: Path, folder: Path, *, password: bool = False, tls: bool = False) -> Iterator[Guarded]:
    folder.mkdir()
    port = free_port()
    http: dict[str, object] = {"addr": f"127.0.0.1:{port}"}
    config: dict[str, object] = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": http,
    }
    if password:
        (folder / "htpasswd").write_text(HTPASSWD)
        config["auth"] = {"htpasswd": {"realm": "forge", "path": str(folder / "htpasswd")}}
    if tls:
        command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=forge"]
        command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "ca.crt"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        http["tls"] = {"certificate": str(folder / "ca.crt"), "key": str(folder / "key.pem")}
    (folder / "config.yml").write_text(json.dumps(config))  # JSON is YAML
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen([program, "serve", folder / "config.yml"], stdout=log, stderr=log) as child,
    ):
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert child.poll() is None, (folder / "log").read_text()
            time.sleep(0.05)
        try:
            yield Guarded(f"127.0.0.1:{port}", folder / "ca.crt" if tls else None)
        finally:
            child.terminate()


@pytest.fixture
def locked(tmp_path: Path, program: Path) -> Iterator[Guarded]:
    yield from serve(program, tmp_path / "locked", password=True)


@pytest.fixture
def secure(tmp_path: Path, program: Path) -> Iterator[Guarded]:
    yield from serve(program, tmp_path / "secure", tls=True)


@pytest.fixture(autouse=True)
def docker_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "docker"
    folder.mkdir()
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))
    return folder / "config.json"


def login(docker_config: Path, address: str, password: str) -> None:
    auth = base64.b64encode(f"{NAME}:{password}".encode()).decode()
    docker_config.write_text(json.dumps({"auths": {address: {"auth": auth}}}))


def test_push_by_digest_then_tag_without_a_rebuild(
    plain: LocalRegistry, image: tuple[Path, str], tmp_path: Path
) -> None:
    archive, digest = image
    repository, log = f"{plain.address}/forge/rehearsal", tmp_path / "push.log"
    assert registry.digest_of(repository, "release") is None, "no such repository yet"
    reference = registry.push(archive, repository, digest=digest, tag=None, log=log)
    assert reference == ImageRef(repository=repository, digest=digest)
    assert registry.exists(reference)
    assert registry.digest_of(repository, "release") is None, "the digest alone names it"
    registry.tag(reference, "release", log)
    assert registry.digest_of(repository, "release") == digest
    again = registry.push(archive, repository, digest=digest, tag="staged", log=log)
    assert again == reference and registry.digest_of(repository, "staged") == digest
    assert "skopeo" in log.read_text()


def test_a_tag_moves_to_the_new_digest_and_back(plain: LocalRegistry, image: tuple[Path, str], tmp_path: Path) -> None:
    repository, log = f"{plain.address}/forge/rehearsal", tmp_path / "log"
    first = registry.push(image[0], repository, digest=image[1], tag="release", log=log)
    other = tmp_path / "other.tar"
    second = registry.push(other, repository, digest=oci_archive(other, "two"), tag=None, log=log)
    assert first != second and registry.digest_of(repository, "release") == first.digest
    registry.tag(second, "release", log)
    assert registry.digest_of(repository, "release") == second.digest
    registry.tag(first, "release", log)
    assert registry.digest_of(repository, "release") == first.digest


def test_what_is_not_there(plain: LocalRegistry, image: tuple[Path, str], tmp_path: Path) -> None:
    repository, log = f"{plain.address}/forge/rehearsal", tmp_path / "log"
    absent = ImageRef(repository=repository, digest=f"sha256:{'0' * 64}")
    assert registry.exists(absent) is False
    registry.push(image[0], repository, digest=image[1], tag=None, log=log)
    assert registry.exists(absent) is False
    with pytest.raises(EnvironmentFailure, match="not in"):
        registry.tag(absent, "release", log)
    assert registry.digest_of(repository, "release") is None


@pytest.mark.parametrize("tag", [None, "staged"])
def test_an_archive_of_another_digest(
    plain: LocalRegistry, image: tuple[Path, str], tmp_path: Path, tag: str | None
) -> None:
    repository = f"{plain.address}/forge/rehearsal"
    with pytest.raises(IntegrityError):
        registry.push(image[0], repository, digest=f"sha256:{'0' * 64}", tag=tag, log=tmp_path / "log")
    assert registry.digest_of(repository, "staged") is None


def test_bytes_that_changed_in_the_registry(plain: LocalRegistry, image: tuple[Path, str], tmp_path: Path) -> None:
    repository = f"{plain.address}/forge/rehearsal"
    reference = registry.push(image[0], repository, digest=image[1], tag="release", log=tmp_path / "log")
    name = image[1].removeprefix("sha256:")
    stored = plain.folder / "data/docker/registry/v2/blobs/sha256" / name[:2] / name / "data"
    stored.write_bytes(stored.read_bytes().replace(b'"schemaVersion": 2', b'"schemaVersion":  2'))
    with pytest.raises((IntegrityError, EnvironmentFailure)):
        registry.exists(reference)


def test_no_archive(plain: LocalRegistry, tmp_path: Path) -> None:
    (tmp_path / "image.tar").write_text("no archive")
    with pytest.raises(UsageError, match="OCI archive"):
        registry.push(
            tmp_path / "image.tar", f"{plain.address}/x", digest=f"sha256:{'0' * 64}", tag=None, log=tmp_path / "log"
        )


def test_nobody_listens(image: tuple[Path, str], tmp_path: Path) -> None:
    repository = f"127.0.0.1:{free_port()}/forge"
    with pytest.raises(EnvironmentFailure):
        registry.digest_of(repository, "release")
    with pytest.raises(EnvironmentFailure):
        registry.push(image[0], repository, digest=image[1], tag=None, log=tmp_path / "log")


def test_a_password(locked: Guarded, image: tuple[Path, str], tmp_path: Path, docker_config: Path) -> None:
    repository, log = f"{locked.address}/forge/rehearsal", tmp_path / "log"
    for password in (None, "wrong"):
        if password:
            login(docker_config, locked.address, password)
        with pytest.raises(EnvironmentFailure) as caught:
            registry.push(image[0], repository, digest=image[1], tag="release", log=log)
        assert caught.value.hint == f"`docker login {locked.address}`"
        with pytest.raises(EnvironmentFailure, match="credentials"):
            registry.digest_of(repository, "release")
    login(docker_config, locked.address, PASSWORD)
    reference = registry.push(image[0], repository, digest=image[1], tag=None, log=log)
    registry.tag(reference, "release", log)
    assert registry.digest_of(repository, "release") == image[1]
    assert PASSWORD not in log.read_text()


def test_a_credential_helper(
    locked: Guarded, image: tuple[Path, str], tmp_path: Path, docker_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper = tmp_path / "bin" / "docker-credential-forge"
    helper.parent.mkdir()
    answer = json.dumps({"ServerURL": locked.address, "Username": NAME, "Secret": PASSWORD})
    helper.write_text(f"#!/bin/sh\ncat >/dev/null\necho '{answer}'\n")
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{helper.parent}:{os.environ['PATH']}")
    docker_config.write_text(json.dumps({"credHelpers": {locked.address: "forge"}}))
    registry.push(image[0], f"{locked.address}/forge", digest=image[1], tag="release", log=tmp_path / "log")
    docker_config.write_text(json.dumps({"credsStore": "forge"}))
    assert registry.digest_of(f"{locked.address}/forge", "release") == image[1]


def test_a_certificate_of_our_own(secure: Guarded, image: tuple[Path, str], tmp_path: Path) -> None:
    repository, log = f"{secure.address}/forge/rehearsal", tmp_path / "log"
    with pytest.raises(EnvironmentFailure, match="not trusted") as caught:
        registry.push(image[0], repository, digest=image[1], tag="release", log=log)
    assert "/etc/docker/certs.d" in (caught.value.hint or "")
    assert secure.certificate is not None
    trusted = Path("/etc/docker/certs.d") / secure.address
    made = [p for p in (trusted, *trusted.parents) if not p.exists()]
    trusted.mkdir(parents=True)
    try:
        shutil.copy(secure.certificate, trusted / "ca.crt")
        reference = registry.push(image[0], repository, digest=image[1], tag=None, log=log)
        registry.tag(reference, "release", log)
        assert registry.digest_of(repository, "release") == image[1]
    finally:
        shutil.rmtree(made[-1])


def test_the_local_registry_outlives_the_command_and_a_hard_stop(plain: LocalRegistry) -> None:
    process = plain.process()
    assert process is not None and os.getsid(process.pid) == process.pid != os.getsid(0)
    assert local.ensure(Console(), plain) == plain.address
    assert plain.process() == process
    process.send_signal(signal.SIGKILL)
    assert ended(process, 10)
    # The stale pid file names a process that is somebody else's by now.
    plain.pidfile.write_text(str(os.getpid()))
    assert plain.process() is None
    local.ensure(Console(), plain)
    assert plain.process() not in (None, process)
    assert local.stop(Console(), plain) is True
    assert local.stop(Console(), plain) is False


def test_a_port_held_by_another(plain: LocalRegistry, tmp_path: Path) -> None:
    other = LocalRegistry(tmp_path / "second", plain.port)
    with pytest.raises(EnvironmentFailure, match=rf"held by process \d+ \(.*{plain.config.name}|held by process"):
        local.ensure(Console(), other)
    assert local.stop(Console(), other) is False
    assert plain.process() is not None, "stopping ours never stops another's"


def test_two_that_ask_at_once_start_one(plain: LocalRegistry) -> None:
    local.stop(Console(), plain)
    code = (
        "from pathlib import Path; from forge_core.console import Console\n"
        "from forge_core.registry.local import LocalRegistry, ensure\n"
        f"print(ensure(Console(), LocalRegistry(Path({str(plain.folder)!r}), {plain.port})))"
    )
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [child.communicate()[0].strip() for child in children] == [plain.address] * 3
    held = [p for p in psutil.process_iter(["cmdline"]) if str(plain.config) in (p.info["cmdline"] or [])]
    assert len(held) == 1
