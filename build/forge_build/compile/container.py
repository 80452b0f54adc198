"""A builder container: no network, no folder of ours mounted (a remote engine sees none), files copied in and out.

Whatever ends the work, the container is gone after it, unless it is to be kept.
"""

from __future__ import annotations

import io
import queue
import secrets
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import docker.errors
import requests
import urllib3.exceptions
from docker.models.containers import Container
from docker.types import LogConfig

from forge_core.engine import Engine
from forge_core.engine.client import HINT
from forge_core.errors import EnvironmentFailure
from forge_core.interrupt import undisturbed
from forge_core.redact import redact

LABEL = "sm120-forge"
_IDLE_S = 0.5


@contextmanager
def builder(
    engine: Engine,
    image: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    *,
    name: str,
    keep: bool,
    mark: Mapping[str, str] | None = None,
    memory: int | None = None,
    read_only: bool = False,
    volumes: Mapping[str, Mapping[str, str]] | None = None,
) -> Iterator[Container]:
    """A created, not yet started container; removed at the end whatever happens, with `keep` only stopped.

    `memory` is its limit in bytes, swap included: a compiler is killed before it makes the machine thrash. With `read_only`
    nothing can be copied in and only /tmp, in memory, can be written. `volumes` (volume or folder -> `bind`, `mode`) is for a
    compiler cache alone. What an earlier
    process left behind with the same labels `mark` is removed first, so the caller must hold a lock for them. Raises
    EnvironmentFailure, here and for what happens inside, when the engine refuses or goes away.
    """
    unique = f"sm120-forge-{name}-{secrets.token_hex(6)}"
    marked = [f"{label}={value}" for label, value in (mark or {}).items()]
    with _engine_errors(engine, image):
        if marked:
            for left in engine.client.containers.list(all=True, filters={"label": marked}):
                left.remove(force=True, v=True)
        try:
            yield engine.client.containers.create(
                image,
                list(argv),
                name=unique,
                entrypoint=[],
                environment=dict(env),
                labels={LABEL: name, **(mark or {})},
                network_mode="none",
                read_only=read_only,
                tmpfs={"/tmp": "rw,nosuid,nodev,exec,mode=1777,size=1g"} if read_only else None,  # noqa: S108 - inside the container
                mem_limit=memory,
                memswap_limit=memory,
                volumes={place: dict(mount) for place, mount in (volumes or {}).items()},
                pids_limit=4096,
                cap_drop=["ALL"],
                security_opt=["no-new-privileges"],
                # whatever the engine's default is, this one can be read back
                log_config=LogConfig(type="json-file"),
            )
        finally:
            # By name: an interrupt may have come before the engine's answer brought the id.
            with undisturbed(), suppress(docker.errors.NotFound):
                if keep:
                    with suppress(docker.errors.APIError):
                        engine.client.api.kill(unique)
                else:
                    engine.client.api.remove_container(unique, force=True, v=True)


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
    with tempfile.TemporaryFile(dir=into) as spool:
        for chunk in stream:
            spool.write(chunk)
        spool.seek(0)
        with tarfile.open(fileobj=spool) as tar:
            tar.extractall(into, filter="data")
    return into / Path(path).name


def follow(
    container: Container, log: Path, on_line: Callable[[str], None], on_idle: Callable[[], None] = lambda: None
) -> int:
    """Start the container and follow it to its end; returns its exit status.

    Every line goes to `log` (written anew) and to `on_line`; `on_idle` is called while there is none. Needs `builder`'s handling of
    errors around it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    lines: queue.SimpleQueue[str | Exception | None] = queue.SimpleQueue()
    with log.open("w", encoding="utf-8") as sink:
        container.start()
        threading.Thread(target=_read, args=(container, lines), daemon=True).start()
        while True:
            try:
                item = lines.get(timeout=_IDLE_S)
            except queue.Empty:
                on_idle()
                continue
            if item is None:
                break
            if isinstance(item, Exception):
                raise item
            line = redact(item)
            sink.write(line + "\n")
            sink.flush()
            on_line(line)
    return int(container.wait()["StatusCode"])


def out_of_memory(container: Container) -> bool:
    """Whether the engine saw the container reach its memory limit."""
    container.reload()
    return bool(container.attrs["State"].get("OOMKilled"))


def _read(container: Container, lines: queue.SimpleQueue[str | Exception | None]) -> None:
    """Lines of both streams as they come; in a thread of its own, so that the one that waits can be interrupted at once."""
    rest = b""
    try:
        for chunk in container.logs(stream=True, follow=True):
            *whole, rest = (rest + chunk).split(b"\n")
            for raw in whole:
                lines.put(raw.decode(errors="replace").rstrip("\r"))
        if rest:
            lines.put(rest.decode(errors="replace"))
        lines.put(None)
    except Exception as error:  # raised again by the thread that follows
        lines.put(error)


@contextmanager
def _engine_errors(engine: Engine, image: str) -> Iterator[None]:
    try:
        yield
    except docker.errors.ImageNotFound as error:
        raise EnvironmentFailure(f"the image {image} is not in the engine", hint="run the build again") from error
    except docker.errors.APIError as error:
        if "no space left" in str(error).lower():
            raise EnvironmentFailure(
                "no space left on the engine's disk", hint="free space: `docker system df` shows who has it"
            ) from error
        raise EnvironmentFailure(f"the engine refuses: {error.explanation or error}") from error
    except (requests.RequestException, urllib3.exceptions.HTTPError, ConnectionError) as error:
        raise EnvironmentFailure(
            f"the engine at {engine.address} went away before the work was done", hint=HINT
        ) from error
