"""Asking: the script in a short-lived container of the image, with the serving's devices and caches, without model or network."""

from __future__ import annotations

import json
import secrets
import time
from importlib.resources import files
from pathlib import Path

import docker.errors
import requests
from docker.models.containers import Container

from forge_core.console import Step
from forge_core.engine import Engine
from forge_core.errors import EnvironmentFailure, ForgeError, Refused
from forge_core.files import write_text
from forge_core.interrupt import undisturbed
from forge_validate import caches, launch, options
from forge_validate.follow import Follower
from forge_validate.numeric.document import Document, parse
from forge_validate.policy import Numeric
from forge_validate.serving import Serving

FILE_NAME = "numeric.json"
_MOUNT = "/forge"
_POLL_S = 0.25
# Python and torch are imported before the script's own clock runs: 3 to 20 s, more from a cold disk.
_GRACE_S = 90.0


def script_folder() -> Path:
    """Where the script lies, in a checkout or in an installed package: the folder that is mounted."""
    return Path(str(files("forge_validate") / "inside"))


def ask(
    engine: Engine, image: str, serving: Serving, demand: Numeric, work: Path, step: Step
) -> tuple[Document | None, str]:
    """Run the script; returns its document, or why there is none. Writes `work/numeric.json` and its log.

    Raises EnvironmentFailure (3) when engine or container have no GPU or do not do as asked, Refused (1) for an image
    that runs as root or has no Python. Whatever ends it, the container is removed.
    """
    if engine.remote:
        raise EnvironmentFailure(f"the engine at {engine.address} is on another machine: it sees no file of this one")
    name = f"sm120-forge-{serving.profile}-numeric-{secrets.token_hex(3)}"
    result, log = work / FILE_NAME, work / "logs" / "numeric.log"
    result.unlink(missing_ok=True)
    follower: Follower | None = None
    try:
        container = _start(engine, image, name, serving, demand)
        follower = Follower(container, log, stdout=False)
        follower.start()
        why = _await_end(container, follower, demand.deadline + _GRACE_S, step)
        follower.join(5)
        said = container.logs(stdout=True, stderr=False).decode(errors="replace")
    except requests.RequestException as error:
        raise EnvironmentFailure(f"the engine no longer answers: {error}") from error
    finally:
        with undisturbed():
            launch.remove(engine, name)
            if follower is not None:
                follower.join(5)
    try:
        found = parse(said)
    except ValueError as error:
        last = next(reversed(follower.lines()), "it said nothing")
        return None, f"{why or f'no document: {error}'}; its last line: {last[:200]}"
    write_text(result, json.dumps(json.loads(said), indent=1) + "\n")
    if found.absent is not None:
        raise EnvironmentFailure(
            f"the container was given devices and sees no GPU: {found.absent}",
            hint="compare the driver with the CUDA of the image; `nvidia-smi` and nvidia-container-toolkit say more",
            log=log,
        )
    return found, ""


def _start(engine: Engine, image: str, name: str, serving: Serving, demand: Numeric) -> Container:
    digest = launch.unprivileged(engine, image, serving.user)
    words = ("python3", "-B", "-m", "numeric", "--deadline", f"{demand.deadline:g}", *demand.kernels)
    folder = script_folder()
    try:
        caches.prepare(engine, image, serving, digest)
        chosen = options.create_beside(serving, name, words, _MOUNT, folder, digest=digest)
        # `-m` finds the script through the working folder, so nothing is added to the image's own path.
        container = engine.client.containers.create(image, working_dir=_MOUNT, **chosen)
        container.start()
    except docker.errors.APIError as error:
        raise _refused(error, folder) from error
    return container


def _refused(error: docker.errors.APIError, folder: Path) -> ForgeError:
    if "executable file not found" in str(error.explanation or error):
        return Refused("the image has no python3 on its PATH", details=(str(error.explanation or error),))
    return launch.engine_refused(error, folder)


def _await_end(container: Container, follower: Follower, deadline_s: float, step: Step) -> str | None:
    """Wait until the container has ended, or end it; returns why it ended, none for a clean end."""
    end = time.monotonic() + deadline_s
    line = "imports"
    while True:
        state = launch.state(container)
        for line in follower.fresh():
            step.detail(line)
        if not state.get("Running"):
            if state.get("OOMKilled"):
                return "killed: out of memory"
            code = state.get("ExitCode")
            return f"ended with exit code {code}" if code else None
        if time.monotonic() > end:
            container.kill()
            return f"ended after {deadline_s:.0f} s"
        step.waiting(line[:160])
        time.sleep(_POLL_S)
