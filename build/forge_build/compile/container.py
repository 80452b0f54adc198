"""A builder container: no network, no mounts (a remote engine sees none of our folders), files copied in and out."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import docker.errors
from docker.models.containers import Container

from forge_core.engine import Engine
from forge_core.errors import EnvironmentFailure
from forge_core.redact import redact

LABEL = "sm120-forge"


@contextmanager
def builder(
    engine: Engine, image: str, argv: Sequence[str], env: Mapping[str, str], *, name: str, keep: bool
) -> Iterator[Container]:
    """A created, not yet started container; removed at the end whatever happens, unless `keep`."""
    try:
        container = engine.client.containers.create(
            image,
            list(argv),
            entrypoint=[],
            environment=dict(env),
            network_mode="none",
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            labels={LABEL: name},
        )
    except docker.errors.DockerException as error:
        raise EnvironmentFailure(f"the engine does not create the container for {name}: {error}") from error
    try:
        yield container
    finally:
        if not keep:
            container.remove(force=True, v=True)


def copy_in(container: Container, files: Mapping[str, Path | bytes], *, epoch: int) -> None:
    """Copy folders and files to absolute paths; owned by root, fixed modes, every time stamp `epoch` (seconds)."""

    def fixed(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = "root"
        member.mtime = epoch
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
        return member

    with tempfile.TemporaryFile() as spool:
        with tarfile.open(fileobj=spool, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for target, source in sorted(files.items()):
                name = target.lstrip("/")
                if isinstance(source, bytes):
                    member = tarfile.TarInfo(name)
                    member.size, member.mode = len(source), 0o644
                    tar.addfile(fixed(member), io.BytesIO(source))
                else:
                    tar.add(source, name, filter=fixed)
        spool.seek(0)
        container.put_archive("/", spool)


def copy_out(container: Container, path: str, into: Path) -> Path:
    """Copy a folder out of a container into `into`; returns where it is. Refuses members that leave the folder."""
    stream, _ = container.get_archive(path, chunk_size=1 << 20)
    with tempfile.TemporaryFile() as spool:
        for chunk in stream:
            spool.write(chunk)
        spool.seek(0)
        with tarfile.open(fileobj=spool) as tar:
            tar.extractall(into, filter="data")
    return into / Path(path).name


def follow(container: Container, log: Path, on_line: Callable[[str], None]) -> int:
    """Start the container, write its output to `log` line by line as it comes; returns its exit status."""
    log.parent.mkdir(parents=True, exist_ok=True)
    rest = b""
    with log.open("a", encoding="utf-8") as sink:
        # attached before the start, so that no line is lost
        stream = container.attach(stream=True, stdout=True, stderr=True, logs=False)
        container.start()
        for chunk in stream:
            *lines, rest = (rest + chunk).split(b"\n")
            for raw in lines:
                _write(sink, raw, on_line)
            sink.flush()
        if rest:
            _write(sink, rest, on_line)
    return int(container.wait()["StatusCode"])


def _write(sink: io.TextIOBase, raw: bytes, on_line: Callable[[str], None]) -> None:
    line = redact(raw.decode(errors="replace").rstrip("\r"))
    sink.write(line + "\n")
    on_line(line)
