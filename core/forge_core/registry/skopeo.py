"""The skopeo command, with docker's credentials and errors that tell causes apart."""

from __future__ import annotations

import base64
import ipaddress
import json
import re
import socket
import ssl
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import docker.auth
import docker.errors

from forge_core.errors import EnvironmentFailure, ForgeError, IntegrityError, UsageError
from forge_core.process import CommandFailed, run

_COPY_S = 3600
_INSPECT_S = 120

_ABSENT = re.compile(r"manifest unknown|name unknown|repository name not known|not found: manifest", re.IGNORECASE)
_DENIED = re.compile(
    r"unauthorized|authentication required|denied|status:? (?:code )?40[13]\b|invalid username/password",
    re.IGNORECASE,
)
_CERTIFICATE = re.compile(r"x509:|certificate|tls: ", re.IGNORECASE)
_DISK_FULL = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)
_DIGESTS = re.compile(
    r"would not match destination reference|does not match.*digest|digest.*does not match|digest did not match"
    r"|provided digest|DIGEST_INVALID"
    r"|would change the manifest|Manifest list must be converted",
    re.IGNORECASE,
)
_NO_ARCHIVE = re.compile(r"unexpected EOF|invalid tar header|error creating temp|no such file or directory|index\.json")


def is_loopback(repository: str) -> bool:
    """Whether a repository's registry is on this machine's loopback: 127.0.0.0/8, ::1, localhost."""
    host = repository.partition("/")[0]
    bare = host[1:].partition("]")[0] if host.startswith("[") else host
    name = bare.partition(":")[0] if bare.count(":") <= 1 else bare
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def copy(source_reference: str, target: str, *, source: str | None, destination: str, log: Path) -> None:
    """`skopeo copy` with the digest preserved; `source` and `destination` are the repositories to authenticate for.

    Raises EnvironmentFailure or IntegrityError.
    """
    with _credentials(destination) as authfile:
        argv: list[str | Path] = ["skopeo", "--insecure-policy", "copy", "--all", "--preserve-digests"]
        if source is not None:
            argv += _settings("src-", source, authfile)
        argv += [*_settings("dest-", destination, authfile), source_reference, target]
        try:
            run(argv, log=log, timeout=_COPY_S)
        except CommandFailed as error:
            raise _explained(error, destination, log) from error


def manifest(reference: str, repository: str) -> bytes | None:
    """The manifest's own bytes; None when the registry says that there is none of that name.

    Raises EnvironmentFailure.
    """
    with _credentials(repository) as authfile:
        settings = _settings("", repository, authfile)
        argv = ["skopeo", "--insecure-policy", "inspect", "--raw", *settings, f"docker://{reference}"]
        completed = run(argv, timeout=_INSPECT_S, check=False)
    if completed.returncode == 0:
        return completed.stdout.encode()
    if _ABSENT.search(completed.stderr):
        return None
    raise _explained(CommandFailed(completed, None), repository, None)


def _settings(prefix: str, repository: str, authfile: Path | None) -> list[str]:
    settings = [f"--{prefix}authfile={authfile}"] if authfile else [f"--{prefix}no-creds"]
    # Like docker: plain HTTP on loopback only, and only where the registry does not speak TLS.
    if is_loopback(repository) and not _speaks_tls(repository):
        settings.append(f"--{prefix}tls-verify=false")
    return settings


def _speaks_tls(repository: str) -> bool:
    """Whether the registry on loopback answers a TLS handshake (whoever it is: skopeo verifies it afterwards)."""
    host, _, port = repository.partition("/")[0].rpartition(":")
    if not host or not port.isdigit():
        host, port = repository.partition("/")[0], "443"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with (
            socket.create_connection((host.strip("[]"), int(port)), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname=host.strip("[]")),
        ):
            return True
    except (OSError, ssl.SSLError):
        return False


@contextmanager
def _credentials(repository: str) -> Iterator[Path | None]:
    """A private file with the one entry that docker's config (or its credential helper) has for the registry."""
    registry = repository.partition("/")[0]
    try:
        found: dict[str, Any] | None = docker.auth.load_config().resolve_authconfig(registry)
    except docker.errors.DockerException as error:
        raise EnvironmentFailure(
            f"docker's credentials for {registry} cannot be read: {error}", hint=f"`docker login {registry}`"
        ) from error
    entry: dict[str, str] = {}
    if found:
        name, password = found.get("username") or found.get("Username"), found.get("password") or found.get("Password")
        token = found.get("identitytoken") or found.get("IdentityToken")
        if token:
            entry = {"auth": base64.b64encode(b"<token>:").decode(), "identitytoken": token}
        elif name and password:
            entry = {"auth": base64.b64encode(f"{name}:{password}".encode()).decode()}
    if not entry:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="forge-auth-") as folder:
        path = Path(folder) / "auth.json"
        path.touch(mode=0o600)
        path.write_text(json.dumps({"auths": {registry: entry}}), encoding="utf-8")
        yield path


def _explained(error: CommandFailed, repository: str, log: Path | None) -> ForgeError:
    """The error of a failed skopeo, by what it said."""
    registry = repository.partition("/")[0]
    said = error.completed.stderr or error.completed.stdout
    lines = [line for line in said.splitlines() if "level=fatal" in line] or said.splitlines()[-3:]
    details = tuple(re.sub(r'^time="[^"]*" level=fatal msg=', "", line) for line in lines)
    text = "\n".join(lines)
    if _DISK_FULL.search(text):
        return EnvironmentFailure(
            f"no space left on the disk while copying to {registry}", hint="free space", log=log, details=details
        )
    if _DIGESTS.search(text):
        return IntegrityError(f"the digest did not survive the copy to {repository}", log=log, details=details)
    if _DENIED.search(text):
        return EnvironmentFailure(
            f"{registry} refuses the credentials it was given, or wants some",
            hint=f"`docker login {registry}`",
            log=log,
            details=details,
        )
    if _CERTIFICATE.search(text):
        return EnvironmentFailure(
            f"the certificate of {registry} is not trusted",
            hint=f"put its authority's certificate into /etc/docker/certs.d/{registry}/ca.crt",
            log=log,
            details=details,
        )
    if _ABSENT.search(text):
        return EnvironmentFailure(f"the image to copy is not in {registry}", log=log, details=details)
    if "oci-archive:" in " ".join(error.completed.argv) and _NO_ARCHIVE.search(text):
        return UsageError(f"not an OCI archive: {details[-1] if details else ''}", log=log)
    return EnvironmentFailure(f"the registry {registry} cannot be used", log=log, details=details)
