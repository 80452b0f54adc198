"""Prove that an engine builds the same bytes twice, instead of trusting its version."""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path

from forge_core.engine import buildx
from forge_core.engine.client import Engine
from forge_core.errors import EnvironmentFailure, ForgeError
from forge_core.files import write_text
from forge_core.store import Store

FILE_NAME = "engine-probe.json"
_KEPT = 20
"""Engines remembered."""
_EPOCH = 1_700_000_000

CLASSIC_HINT = (
    'add {"features": {"containerd-snapshotter": true}} to /etc/docker/daemon.json and restart the engine (images'
    " pulled before are hidden until it is taken out again), or name a builder of the docker-container driver in"
    " FORGE_BUILDER (`docker buildx create --driver docker-container --name NAME`)"
)
OLD_HINT = (
    "BuildKit 0.13 or newer is needed: Docker Engine 25 with buildx 0.13, as Debian 13 has them; or stop this engine"
    " and `nox -s engine` starts one of its own"
)


def probe(engine: Engine) -> bool:
    """Build one layer twice as an OCI archive with clamped times; the two digests must be one.

    The outcome is remembered in the store's folder by engine and version, so that a warm build does not pay the second
    it takes; returns whether it was. Raises EnvironmentFailure with what to change.
    """
    path = Store.open().root / FILE_NAME
    key = "|".join(
        (engine.id, engine.version, engine.store, engine.buildx_version, os.environ.get("FORGE_BUILDER", ""))
    )
    known = _load(path)
    if key in known:
        return True
    with tempfile.TemporaryDirectory(prefix="forge-probe-") as scratch:
        try:
            first, second = (_build(engine, Path(scratch), turn) for turn in (1, 2))
        except ForgeError as error:
            raise _explained(engine, error, Path(scratch) / "probe.log") from error
    if first != second:
        raise EnvironmentFailure(
            f"the engine {engine.version} at {engine.address} gives two digests for one layer: {first} and {second}",
            hint=OLD_HINT,
        )
    write_text(path, json.dumps([*known[1 - _KEPT :], key], indent=1) + "\n")
    return False


def _build(engine: Engine, scratch: Path, turn: int) -> str:
    """One build whose only file has another time of change than in the other turn."""
    context = scratch / f"context{turn}"
    context.mkdir()
    (context / "Dockerfile").write_text("FROM scratch\nCOPY file /file\n", encoding="utf-8")
    (context / "file").write_text("one layer\n", encoding="utf-8")
    os.utime(context / "file", (_EPOCH + turn * 3600, _EPOCH + turn * 3600))
    return buildx.build(
        engine,
        dockerfile=context / "Dockerfile",
        context=context,
        output=f"type=oci,dest={scratch / f'{turn}.tar'},rewrite-timestamp=true",
        epoch=_EPOCH,
        log=scratch / "probe.log",
        no_cache=True,
        timeout=180,
    ).digest


def _explained(engine: Engine, error: ForgeError, log: Path) -> EnvironmentFailure:
    said = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    text = f"{error.message}\n{said}"
    who = (
        f"the engine {engine.version} at {engine.address} (buildx {engine.buildx_version}, {engine.store} image store)"
    )
    tail = tuple(line for line in said.splitlines() if "ERROR" in line)[-3:] or error.details
    if re.search(r"OCI exporter is not supported|exporter \"?oci\"? could not be found", text, re.IGNORECASE):
        return EnvironmentFailure(f"{who} cannot write an OCI archive", hint=CLASSIC_HINT, details=tail)
    if "rewrite-timestamp" in text and re.search(r"unknown|unsupported|invalid", text.split("$ ")[-1]):
        return EnvironmentFailure(f"{who} does not know rewrite-timestamp", hint=OLD_HINT, details=tail)
    if re.search(r"unknown flag|does not (?:support|implement)|not supported", text):
        return EnvironmentFailure(f"{who} is too old", hint=OLD_HINT, details=tail)
    return EnvironmentFailure(f"{who} cannot build: {error.message}", hint=error.hint, details=tail)


def _load(path: Path) -> list[str]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [k for k in known if isinstance(k, str)] if isinstance(known, list) else []
