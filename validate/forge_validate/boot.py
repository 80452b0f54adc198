"""Boot: a container with the server in it, from creation to readiness, and always its removal."""

from __future__ import annotations

import io
import secrets
import tarfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import docker.errors
import docker.types
import httpx
import requests
from docker.models.containers import Container

from forge_core.console import Console, Step, duration
from forge_core.engine import Engine
from forge_core.errors import EnvironmentFailure, Refused
from forge_core.explain import Evidence
from forge_core.interrupt import undisturbed
from forge_core.model import ModelRef
from forge_validate import caches, launch, options
from forge_validate.follow import Follower
from forge_validate.injected import NOTHING, Injected
from forge_validate.offers import Offers
from forge_validate.phases import Watch
from forge_validate.server import Server
from forge_validate.serving import MODEL_MOUNT, Phase, Serving

_POLL_S = 0.25


@contextmanager
def boot(
    engine: Engine,
    image: str,
    serving: Serving,
    model: ModelRef,
    folder: Path,
    *,
    log: Path,
    console: Console,
    keep: bool = False,
    injected: Injected = NOTHING,
) -> Iterator[Server]:
    """Start a server on `image` (an id or a reference by digest) and yield it once it is ready.

    Raises Refused (1) when it dies or hangs at its start, UsageError (2) for a rejected flag or missing weights,
    EnvironmentFailure (3) for trouble with engine, port or mount. Whatever ends the block, the container is removed,
    unless `keep`. `injected` makes the server wrong on purpose; no validation gives any.
    """
    if engine.remote:
        raise EnvironmentFailure(
            f"the engine at {engine.address} is on another machine: it sees no model folder of this one",
            hint="run validate on the machine of the engine; it needs the record, the model and staging",
        )
    name = f"sm120-forge-{serving.profile}-{secrets.token_hex(3)}"
    identity = f"forge-{secrets.token_hex(8)}"
    # Made for this run and known to nobody else: SGLang prints it in its start-up line and tells it in /server_info.
    # Hexadecimal, since a leading dash would be another flag.
    api_key = secrets.token_hex(24) if serving.api_key_flag else None
    follower: Follower | None = None
    try:
        with console.step("boot", name) as step:
            container = _create(engine, image, name, serving, identity, api_key, folder, injected)
            _demand_model(container, model, folder)
            began = time.monotonic()
            _start(container, serving.host_port)
            follower = Follower(container, log, (api_key,) if api_key else ())
            follower.start()
            watch = Watch(serving.phases, serving.stall, began)
            url = _await_ready(container, serving, follower, watch, step, log)
            _demand_identity(url, serving, identity, api_key)
            step.result(f"ready at {url}")
        yield Server(
            url=url,
            served=serving.model,
            api_key=api_key,
            offers=Offers.certain(("container", "log"), "we started it"),
            container=name,
            log=log,
            phases=watch.taken,
            died=_death(container, log),
            memory=lambda: memory(container),
        )
    finally:
        with undisturbed():
            if keep:
                console.say(f"kept the container {name}; remove it with `docker rm -f {name}`")
            else:
                launch.remove(engine, name)
            if follower is not None:
                follower.join(1 if keep else 5)


def _create(
    engine: Engine,
    image: str,
    name: str,
    serving: Serving,
    identity: str,
    api_key: str | None,
    folder: Path,
    injected: Injected,
) -> Container:
    digest = launch.unprivileged(engine, image, serving.user)
    try:
        caches.prepare(engine, image, serving, digest)
        chosen = options.create(serving, name, identity, folder, api_key=api_key, digest=digest, injected=injected)
        return engine.client.containers.create(image, **chosen)
    except docker.errors.APIError as error:
        raise launch.engine_refused(error, folder, serving.host_port) from error


def _start(container: Container, port: int | None) -> None:
    try:
        container.start()
    except docker.errors.APIError as error:
        raise launch.engine_refused(error, None, port) from error


def _demand_model(container: Container, model: ModelRef, folder: Path) -> None:
    """Read the smallest file back through the engine: a mount that arrives empty is no missing model."""
    smallest = min((f for f in model.files if f.size > 0), key=lambda f: f.size)
    try:
        stream, _ = container.get_archive(f"{MODEL_MOUNT}/{smallest.path}")
        with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as archive:
            member = archive.extractfile(archive.getmembers()[0])
            arrived = sha256(member.read()).hexdigest() if member else None
    except docker.errors.NotFound:
        arrived = None
    if arrived != smallest.sha256:
        what = "empty" if arrived is None else "with other bytes"
        raise EnvironmentFailure(
            f"{folder} arrives {what} in the container: the engine has another folder under this path",
            hint="an engine in a container or a chroot sees only some folders: put the checkout, or --model, into one",
        )


def _await_ready(
    container: Container, serving: Serving, follower: Follower, watch: Watch, step: Step, log: Path
) -> str:
    """Wait for the log's last marker and a healthy answer; returns the address. Raises what `boot` documents."""
    url: str | None = None
    while True:
        state = launch.state(container)
        if not state.get("Running"):
            follower.join(5)
            raise launch.launch_failure(
                follower.lines(),
                exit_code=state.get("ExitCode"),
                oom_killed=bool(state.get("OOMKilled")),
                memory=serving.limits.memory,
                log=log,
            )
        url = url or _address(container, serving.port)
        now = time.monotonic()
        for phase in watch.see(follower.fresh(), now):
            step.say(f"{phase} took {duration(watch.taken[phase])}")
        if watch.done and url is not None and _healthy(url, serving.health):
            return url
        if (late := watch.late(now)) is not None:
            raise _hang(late, follower, watch.silent(now), log)
        if (silent := watch.stalled(now)) is not None:
            step.say(f"no line for {duration(silent)} in the phase `{watch.phase}`; the last one: {watch.last_line}")
        step.waiting(f"{watch.phase}: {watch.last_line or 'no line yet'}"[:160])
        time.sleep(_POLL_S)


def _hang(late: Phase, follower: Follower, silent: float, log: Path) -> Refused:
    """The error for a start that does not end; what the log says of a cause goes before its last lines."""
    found = launch.why(follower.lines(), log, Evidence(stage="boot", silent=silent))
    known = found if found is not None and found.known and found.severity == "error" else None
    return Refused(
        f"the server hangs at its start: the phase `{late.name}` is not over after {late.deadline:.0f} s",
        hint=(known and known.hint)
        or "read the log; if the machine is just slow, raise the phase's deadline in the serving",
        log=log,
        details=(
            *((known.message, *launch.told(known)) if known else ()),
            *launch.last_lines(follower.lines()),
        ),
    )


def _address(container: Container, port: int) -> str | None:
    """Where the engine published the server's port; none until it has."""
    published = (container.attrs["NetworkSettings"].get("Ports") or {}).get(f"{port}/tcp")
    return f"http://127.0.0.1:{published[0]['HostPort']}" if published else None


def _healthy(url: str, path: str) -> bool:
    """Whether the health endpoint says 200. Needed, but never evidence of anything."""
    try:
        return httpx.get(url + path, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _demand_identity(url: str, serving: Serving, identity: str, api_key: str | None) -> None:
    """The server that answers on the published port tells the random word we gave ours, and wants our key."""
    if serving.identity_flag is None:
        return
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        if api_key and (open_to_all := httpx.get(f"{url}/v1/models", timeout=30, trust_env=False)).is_success:
            raise EnvironmentFailure(
                f"the server at {url} answers without the API key ours was given: HTTP {open_to_all.status_code}",
                hint=f"another server holds the port, or --{serving.api_key_flag} has no effect; nothing was judged",
            )
        body = httpx.get(f"{url}/model_info", timeout=30, trust_env=False, headers=headers).json()
    except (httpx.HTTPError, ValueError) as error:
        raise EnvironmentFailure(f"{url}/model_info gives no description of the server: {error}") from error
    told = body.get(serving.identity_flag.replace("-", "_")) if isinstance(body, dict) else None
    if told != identity:
        raise EnvironmentFailure(
            f"the server at {url} is not the one we started: it tells {told!r}, ours was given {identity!r}",
            hint="another server holds the port; nothing was judged",
        )


def memory(container: Container) -> int | None:
    """Bytes that the container's processes hold, shared memory included and files' pages not; none: the engine cannot tell."""
    try:
        told = cast(dict[str, Any], container.stats(stream=False, one_shot=True))["memory_stats"]
    except (docker.errors.APIError, requests.RequestException, KeyError):
        return None
    counted = told.get("stats") or {}
    # Of cgroup v2, and of v1.
    for names in (("anon", "shmem"), ("total_rss", "total_shmem")):
        if all(name in counted for name in names):
            return int(sum(counted[name] for name in names))
    return int(told["usage"]) if "usage" in told else None


def _death(container: Container, log: Path) -> Callable[[], str | None]:
    """Asked anew each time whether the server lives; its log is read once, when it does not."""
    told: list[str] = []

    def died() -> str | None:
        state = launch.state(container)
        if state.get("Running"):
            return None
        if not told:
            told.append(launch.obituary(state, log))
        return told[0]

    return died
