"""Resolve a manifest to a lock: names to wheel files by sha256, suites to packages, sources to tree ids."""

from __future__ import annotations

import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from forge_build import patch
from forge_build.fetch import git as git_trees
from forge_build.fetch.indexes import new_client
from forge_build.lock import Lock, LockedSource, LockedWheel, debian, git
from forge_build.lock.index import Resolver, pinned
from forge_build.manifest import Environment, Manifest, Source
from forge_core.console import Console, Step
from forge_core.errors import UsageError
from forge_core.store import Store


def resolve(
    manifest: Manifest,
    previous: Lock | None,
    store: Store,
    *,
    upgrade: bool,
    console: Console,
    mirrors: Sequence[Path] = (),
) -> Lock:
    """Resolve every section of the manifest.

    Without `upgrade`, what `previous` locks and the manifest still allows keeps its version. `mirrors` are git directories
    that may have the commits of sources. Raises UsageError when names cannot be resolved, a patch does not apply, or a
    source's CMake files fetch something else than the manifest names; EnvironmentFailure when an index, mirror or
    repository does not answer.
    """
    kept = None if upgrade else previous
    wheels: dict[str, tuple[LockedWheel, ...]] = {}
    sources: dict[str, LockedSource] = {}
    with new_client() as client:
        resolver = Resolver(manifest, store, client)
        environments = dict(manifest.environments)
        if manifest.model:
            environments["model"] = Environment(without_dependencies=(manifest.model.wheel,))
        for name, source in manifest.sources.items():
            with console.step("resolve", f"source {name}") as step:
                if source.git is not None:
                    before = kept.sources.get(name) if kept else None
                    sources[name] = git.lock(name, source, before, store, mirrors, step)
                else:
                    sources[name] = _wheel(name, source, resolver, store, step)
                step.result(_told(sources[name]))
        for use, environment in environments.items():
            with console.step("resolve", f"wheels of {use}") as step:
                asked = [text for name in environment.requires_of for text in requirements(name, sources[name], store)]
                whole = environment.model_copy(update={"requires": (*environment.requires, *asked)})
                pins = {w.name: w.version for w in kept.wheels.get(use, ())} if kept else {}
                wheels[use] = resolver.environment(whole, pins, step)
                step.result(f"{len(wheels[use])} wheels")
        debs = debian.packages(manifest, kept, console)
    return Lock(
        schema_version=1,
        profile=manifest.profile,
        manifest=manifest.resolving_sha256(),
        wheels=wheels,
        debs=debs,
        sources=sources,
    )


def _wheel(name: str, source: Source, resolver: Resolver, store: Store, step: Step) -> LockedSource:
    assert source.wheel is not None
    series = patch.series_folder(name, source.series)
    with tempfile.TemporaryDirectory(prefix="source-") as scratch:
        tree = Path(scratch) / "tree"
        _, version = pinned(source.wheel, f"sources.{name}.wheel")
        wheel = resolver.pinned(source.wheel, f"sources.{name}.wheel", step)
        patch.unpack_wheel(store.get(wheel.sha256, wheel.file), tree)
        patched = patch.apply(name, version, tree, series)
    return LockedSource(
        wheel=wheel,
        tree=patched.tree,
        series=source.series,
        patches=patched.locked(),
        patched_tree=patched.patched_tree,
    )


def requirements(name: str, source: LockedSource, store: Store) -> list[str]:
    """What a source from git asks for at run time, read from the pyproject.toml of its tree in the store.

    Raises UsageError when it has none, or leaves the list to its backend.
    """
    with tempfile.TemporaryDirectory(prefix="source-") as scratch:
        path = git_trees.unpack(source.tree, name, store, Path(scratch) / "tree") / "pyproject.toml"
        try:
            project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        except (FileNotFoundError, tomllib.TOMLDecodeError, KeyError) as error:
            raise UsageError(f"requires_of: {name} has no pyproject.toml with a [project]: {error!r}") from error
    if "dependencies" in project.get("dynamic", ()):
        raise UsageError(f"requires_of: the pyproject.toml of {name} leaves its dependencies to the backend")
    return [str(text) for text in project.get("dependencies", ())]


def _told(source: LockedSource) -> str:
    states = [
        "dropped" if item.dropped else "unlocked" if item.unlocked else "locked"
        for item in source.dependencies.values()
    ]
    counts = [f"{states.count(state)} {state}" for state in ("locked", "dropped", "unlocked") if state in states]
    told = f"tree {source.patched_tree[:12]}, {len(source.patches)} patches"
    return f"{told}; dependencies: {', '.join(counts)}" if counts else told
