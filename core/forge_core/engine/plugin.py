"""Find the buildx command: the engine's BuildKit front end, which docker-py does not have."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from forge_core.engine.place import Place
from forge_core.errors import EnvironmentFailure
from forge_core.process import run

# Where docker's command line looks for plugins on Linux (its own documentation of cli-plugins).
_SYSTEM_FOLDERS = (
    "/usr/local/lib/docker/cli-plugins",
    "/usr/local/libexec/docker/cli-plugins",
    "/usr/lib/docker/cli-plugins",
    "/usr/libexec/docker/cli-plugins",
)

MISSING_HINT = (
    "`nox -s engine` as root installs it; the package is docker-buildx, docker-buildx-plugin in Docker's own repository"
)


class BuildxMissing(EnvironmentFailure):
    """An engine answers, but there is nothing to build with."""


@dataclass(frozen=True)
class Buildx:
    """The command and its version."""

    argv: tuple[str, ...]
    version: str


def find(place: Place | None = None) -> Buildx:
    """The first buildx that runs: docker's plugin folders, PATH, `docker buildx`, our engine's root.

    Raises BuildxMissing when there is none.
    """
    for argv in _candidates(place or Place.default()):
        completed = run([*argv, "version"], check=False, timeout=60)
        if completed.returncode == 0 and (match := re.search(r"\bv?(\d+\.\d+\.\d+\S*)", completed.stdout)):
            return Buildx(argv, match[1])
    raise BuildxMissing("no buildx: the engine has no front end to build with", hint=MISSING_HINT)


def _candidates(place: Place) -> Iterator[tuple[str, ...]]:
    config = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    for folder in (config / "cli-plugins", *map(Path, _SYSTEM_FOLDERS)):
        if os.access(folder / "docker-buildx", os.X_OK):
            yield (str(folder / "docker-buildx"),)
    if path := shutil.which("docker-buildx"):
        yield (path,)
    if path := shutil.which("docker"):
        yield (path, "buildx")
    inside = place.system / "usr/libexec/docker/cli-plugins/docker-buildx"
    if inside.is_file():
        yield (str(inside),)
        # Built for a newer C library than this host's: then through the loader it was built for.
        library = place.system / f"usr/lib/{platform.machine()}-linux-gnu"
        for loader in sorted(library.glob("ld-linux-*.so.*")):
            yield (str(loader), "--library-path", str(library), str(inside))
