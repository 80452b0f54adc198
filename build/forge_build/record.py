"""The build record, put together from what the stages returned."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version

from forge_build.base import Base
from forge_build.compile import Wheel
from forge_build.fetch import Inputs
from forge_build.lock import Lock, LockedSource, lock_path
from forge_build.manifest import Manifest, manifests_folder
from forge_build.patch import PatchedTree
from forge_core.cli import project_root
from forge_core.engine import Engine
from forge_core.model import Deviation, ImageRef, ModelRef, file_sha256
from forge_core.process import run
from forge_core.record import (
    BuildRecord,
    RecordedBase,
    RecordedDependency,
    RecordedInput,
    RecordedSource,
    RecordedStage,
    RecordedWheel,
)


def assemble(
    plan: Manifest,
    locked: Lock,
    inputs: Inputs,
    *,
    reference: ImageRef,
    image_config: str,
    image_size: int,
    model: ModelRef | None,
    bases: Sequence[Base],
    trees: Sequence[PatchedTree],
    wheels: tuple[RecordedWheel, ...],
    made: Sequence[Wheel],
    checks: Mapping[str, str],
    sbom: str,
    tools: Mapping[str, str],
    stages: tuple[RecordedStage, ...],
) -> BuildRecord:
    """What was built, of what, by what; nothing is looked up again but the state of this checkout."""
    return BuildRecord(
        profile=plan.profile,
        kind=plan.kind,
        finished=datetime.now(UTC),
        forge_version=version("sm120-forge"),
        forge_commit=_commit(),
        manifest=file_sha256(manifests_folder() / f"{plan.profile}.yaml"),
        lock=file_sha256(lock_path(plan.profile)),
        image=reference,
        image_config=image_config,
        image_size=image_size,
        architectures=tuple(sorted({a for w in wheels for o in w.objects for a in o.cubins})),
        model=model,
        bases=tuple(RecordedBase(use=b.use, identity=b.identity, size=b.size) for b in bases),
        sources=tuple(
            RecordedSource(
                name=tree.name,
                version=tree.version,
                tree=tree.tree,
                patched_tree=tree.patched_tree,
                series=tree.series,
                patches=tuple(p.name for p in tree.patches),
                commit=locked.sources[tree.name].commit,
                dependencies=_dependencies(locked.sources[tree.name]),
            )
            for tree in trees
        ),
        wheels=wheels,
        inputs=_inputs(locked, inputs),
        image_check=dict(checks),
        sbom=sbom,
        deviations=(*inputs.deviations, *(d for wheel in made for d in wheel.deviations), *_dirty_tree()),
        tools=dict(tools),
        stages=stages,
    )


def _dependencies(source: LockedSource) -> tuple[RecordedDependency, ...]:
    return tuple(
        RecordedDependency(name=name, commit=item.commit, tree=item.tree, taken=item.taken)
        for name, item in source.dependencies.items()
        if item.commit and item.tree and item.taken
    )


def _inputs(locked: Lock, inputs: Inputs) -> tuple[RecordedInput, ...]:
    rows = [
        RecordedInput(kind="wheel", use=use, name=w.name, version=w.version, sha256=w.sha256)
        for use, wheels in locked.wheels.items()
        for w in wheels
    ]
    rows += [
        RecordedInput(kind="wheel", use=name, name=s.wheel.name, version=s.wheel.version, sha256=s.wheel.sha256)
        for name, s in locked.sources.items()
        if s.wheel
    ]
    rows += [
        RecordedInput(kind="deb", use=use, name=d.name, version=d.version, sha256=d.sha256)
        for use, debs in inputs.debs.items()
        for d in debs
    ]
    return tuple(rows)


def tools(engine: Engine, bases: Sequence[Base], wheels: Sequence[Wheel]) -> dict[str, str]:
    """Tool -> version, of this machine and of what compiled."""
    found = {
        "python": platform.python_version(),
        "engine": engine.version,
        "buildx": engine.buildx_version,
        "uv": version("uv"),
        "skopeo": run(["skopeo", "--version"]).stdout.split()[-1],
    }
    for base in bases:
        found |= base.tools
    for wheel in wheels:
        found |= wheel.tools
    return found


def _commit() -> str | None:
    done = run(["git", "-C", project_root(), "rev-parse", "--verify", "HEAD"], check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _dirty_tree() -> tuple[Deviation, ...]:
    """Changes of what decides the build that no commit has."""
    paths = ("Dockerfile.sm120", "build", "core", "patches", "pyproject.toml", "requirements")
    done = run(["git", "-C", project_root(), "status", "--porcelain", "--", *paths], check=False)
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return tuple(Deviation(kind="dirty-tree", subject=line[3:], detail=line[:2].strip()) for line in lines)
