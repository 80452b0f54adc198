"""Containers from their image to their removal, and why there is no server: cause first, and whose fault it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import docker.errors
import requests
from docker.models.containers import Container

from forge_core.engine import Engine
from forge_core.errors import EnvironmentFailure, ForgeError, Refused, UsageError
from forge_core.explain import Evidence, LogFinding, explain, read_file

_LAST_LINES = 15
_WIDTH = 240
_FAULTS: Mapping[str, type[ForgeError]] = {"usage": UsageError, "machine": EnvironmentFailure, "image": Refused}


def unprivileged(engine: Engine, image: str, user: str | None = None) -> str:
    """The id of an image that is not run by root, by itself or by `user`; raises Refused for one that is."""
    found = engine.client.images.get(image)
    user = user or str(found.attrs.get("Config", {}).get("User") or "")
    if user.partition(":")[0] in ("", "0", "root"):
        raise Refused(f"the image {image} runs as root", hint="give it a USER in the Dockerfile")
    return str(found.id)


def state(container: Container) -> Mapping[str, Any]:
    """The engine's `State` of a container, asked anew; raises EnvironmentFailure when it has none or is gone."""
    try:
        container.reload()
    except docker.errors.NotFound as error:
        raise EnvironmentFailure(f"someone removed the container {container.name}") from error
    except (docker.errors.APIError, requests.RequestException) as error:
        raise EnvironmentFailure(f"the engine no longer answers: {error}") from error
    found: Mapping[str, Any] = container.attrs["State"]
    return found


def remove(engine: Engine, name: str) -> None:
    """By name: an interrupt may come after the engine made the container and before we learn of it."""
    with suppress(docker.errors.NotFound):
        engine.client.api.remove_container(name, v=True, force=True)


def engine_refused(error: docker.errors.APIError, folder: Path | None, port: int | None = None) -> ForgeError:
    """The error for a container that the engine does not make or start."""
    text = str(error.explanation or error)
    if "already in use" in text or "port is already allocated" in text:
        return EnvironmentFailure(
            f"another server holds port {port} of this host; nothing was judged",
            hint="stop it, or leave `host_port` out of the serving: then the engine finds a free one",
            details=(text,),
        )
    if "bind source path does not exist" in text:
        return EnvironmentFailure(
            f"the engine does not see {folder}",
            hint="an engine in a container or a chroot sees only some folders: put the checkout, or --model, into one",
        )
    if "executable file not found" in text or "no command specified" in text:
        return UsageError(f"the server's command is not in the image: {text}", hint="correct `command` in the serving")
    if "rlimit" in text:
        return EnvironmentFailure(
            f"the engine does not start the container: {text}",
            hint="the engine may not give that much itself: lower `limits.ulimits` in the serving",
        )
    if "device driver" in text or "CDI" in text:
        return EnvironmentFailure(f"the engine gives no GPU: {text}", hint="the engine needs nvidia-container-toolkit")
    return EnvironmentFailure(f"the engine does not start the container: {text}")


def why(lines: Sequence[str], log: Path, evidence: Evidence) -> LogFinding | None:
    """What the classifier says of a server's log: of all of it where there is the file, else of its last lines."""
    if not log.is_file():
        return explain(lines, evidence)
    return read_file(log, evidence).finding


def launch_failure(
    lines: Sequence[str], *, exit_code: int | None, oom_killed: bool, memory: str, log: Path
) -> ForgeError:
    """The error for a server that died before it was ready: cause first, then where it stands, then the log's last lines."""
    last = last_lines(lines)
    found = why(
        lines,
        log,
        Evidence(stage="boot", exit_code=exit_code, oom_killed=oom_killed, memory=memory, over=True),
    )
    # A process that a signal 9 ended, in a container that ended with it, whose limit the engine did not report on.
    killed = found is not None and found.kind == "killed_sigkill" and found.line is not None and exit_code == 137
    if oom_killed or killed:
        return Refused(
            f"the server was killed at launch: out of memory, its limit is {memory}",
            hint="raise `limits.memory` in the serving, or make the server take less",
            log=log,
            details=last,
        )
    if found is None or not found.known or found.line is None:
        cause = (found.message if found else "") or "it said nothing about why"
        return Refused(
            f"the server died at launch with exit code {exit_code}: {cause}",
            hint=found.hint if found else None,
            log=log,
            details=last,
        )
    # A rejected flag is preceded by a screenful of usage that tells nothing more.
    details = () if found.kind == "flag_rejected" else (*told(found), *last)
    return _FAULTS[found.fault](f"the server did not start: {found.message}", hint=found.hint, log=log, details=details)


def told(found: LogFinding) -> tuple[str, ...]:
    """Where a finding stands and what speaks for it, for an error's details."""
    phase = f", phase {found.phase}" if found.phase else ""
    others = (f"also {one.kind} at line {one.line}: {one.message[:_WIDTH]}" for one in found.others[:3])
    return (f"{found.where}{phase}, confidence {found.confidence}", *found.evidence, *others)


def obituary(state: Mapping[str, Any], log: Path) -> str:
    """What to say of a server that died while it was asked; `state` is the engine's."""
    killed = bool(state.get("OOMKilled"))
    text = f"the server died ({'out of memory' if killed else 'exit code ' + str(state.get('ExitCode'))})"
    evidence = Evidence(stage="boot", exit_code=state.get("ExitCode"), oom_killed=killed, over=True)
    found = why((), log, evidence)
    # Without a line it tells what the state told already.
    return text if killed or found is None or found.line is None else f"{text}: {found.message}"


def last_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """The end of a log for people: each line cut to a readable width."""
    return tuple(line if len(line) <= _WIDTH else line[:_WIDTH] + "…" for line in lines[-_LAST_LINES:])
