"""Containers from their image to their removal, and why there is no server: cause first, and whose fault it is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker.errors
import requests
from docker.models.containers import Container

from forge_core.engine import Engine
from forge_core.errors import EnvironmentFailure, ForgeError, Refused, UsageError

_LAST_LINES = 15
_WIDTH = 240


@dataclass(frozen=True)
class _Sign:
    """A line that tells the cause."""

    pattern: re.Pattern[str]
    error: type[ForgeError]
    hint: str


# The first sign in this order that stands anywhere in the log wins. Wording drifts: they tell kinds, not letters.
_SIGNS = (
    _Sign(
        re.compile(r"error: (unrecognized arguments|argument \S+: |the following arguments|ambiguous option)"),
        UsageError,
        "correct `flags` in the serving",
    ),
    _Sign(re.compile(r"(?i)address already in use"), EnvironmentFailure, "another server holds the port"),
    _Sign(
        re.compile(
            r"(?i)(cannot find any (of the )?(model )?weights|no such file or directory: '/model|"
            r"does not appear to have (a )?files? named|is not a local folder|no safetensors|"
            r"unrecognized model in /model|can't load (the )?(tokenizer|configuration|model))"
        ),
        UsageError,
        "the model folder is not complete, or not a model this server knows",
    ),
    _Sign(
        re.compile(r"PermissionError: .*/model"),
        UsageError,
        "the image's user must be able to read the model folder: chmod -R a+rX",
    ),
    _Sign(
        re.compile(r"(?i)(no cuda gpus are available|driver version is insufficient|found no nvidia driver)"),
        EnvironmentFailure,
        "this machine's driver or GPU is not what the image needs",
    ),
)
_EXCEPTION = re.compile(r"^(?:[\w ]+\] )?((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt)\b(?:: .*)?)$")
_KILLED = re.compile(r"(?i)(exit code: -9\b|\bSIGKILL\b|out of memory: killed|signal 9\b)")


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


def cause_line(lines: Sequence[str]) -> str | None:
    """The line that says why: the last line of the first traceback that was not handled on the way.

    Later tracebacks are consequences (`Received sigquit from a child process`, `Rank 0 scheduler is dead`).
    """
    for number, line in enumerate(lines):
        if not line.rstrip().endswith("Traceback (most recent call last):"):
            continue
        found: str | None = None
        for later, candidate in enumerate(lines[number + 1 :], number + 1):
            text = candidate.strip()
            if match := _EXCEPTION.match(text):
                found = match.group(1)
                if not _chained(lines[later + 1 : later + 4]):
                    return found
        if found:
            return found
    return next((line.strip() for line in reversed(lines) if "error" in line.lower()), None)


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


def launch_failure(
    lines: Sequence[str], *, exit_code: int | None, oom_killed: bool, memory: str, log: Path
) -> ForgeError:
    """The error for a server that died before it was ready: cause first, then the last lines of its log."""
    last = last_lines(lines)
    killed = next((line.strip() for line in lines if _KILLED.search(line)), None)
    if oom_killed or (exit_code == 137 and killed is not None):
        return Refused(
            f"the server was killed at launch: out of memory, its limit is {memory}",
            hint="raise `limits.memory` in the serving, or make the server take less",
            log=log,
            details=last,
        )
    for sign in _SIGNS:
        if (line := next((line.strip() for line in lines if sign.pattern.search(line)), None)) is not None:
            # A rejected flag is preceded by a screenful of usage that tells nothing more.
            rest = () if sign is _SIGNS[0] else last
            return sign.error(f"the server did not start: {line}", hint=sign.hint, log=log, details=rest)
    cause = killed or cause_line(lines) or "it said nothing about why"
    return Refused(f"the server died at launch with exit code {exit_code}: {cause}", log=log, details=last)


def last_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """The end of a log for people: each line cut to a readable width."""
    return tuple(line if len(line) <= _WIDTH else line[:_WIDTH] + "…" for line in lines[-_LAST_LINES:])


def _chained(following: Sequence[str]) -> bool:
    """Whether the traceback goes on: `During handling of the above exception, ...`."""
    return any("above exception" in line for line in following)
