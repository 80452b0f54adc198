"""Resolve a manifest to a lock: names to wheel files by sha256, suites to packages, sources to tree ids."""

from __future__ import annotations

import tempfile
from pathlib import Path

from forge_build import patch
from forge_build.fetch.indexes import new_client
from forge_build.lock import Lock, LockedSource, LockedWheel, debian
from forge_build.lock.git import Clone
from forge_build.lock.index import Resolver, pinned
from forge_build.manifest import Environment, Manifest, Source
from forge_core.console import Console, Step
from forge_core.store import Store


def resolve(manifest: Manifest, previous: Lock | None, store: Store, *, upgrade: bool, console: Console) -> Lock:
    """Resolve every section of the manifest.

    Without `upgrade`, what `previous` locks and the manifest still allows keeps its version. Raises UsageError when
    names cannot be resolved or a patch does not apply, EnvironmentFailure when an index, mirror or repository does not
    answer.
    """
    kept = None if upgrade else previous
    wheels: dict[str, tuple[LockedWheel, ...]] = {}
    sources: dict[str, LockedSource] = {}
    with new_client() as client:
        resolver = Resolver(manifest, store, client)
        environments = dict(manifest.environments)
        if manifest.model:
            environments["model"] = Environment(without_dependencies=(manifest.model.wheel,))
        for use, environment in environments.items():
            with console.step("resolve", f"wheels of {use}") as step:
                pins = {w.name: w.version for w in kept.wheels.get(use, ())} if kept else {}
                wheels[use] = resolver.environment(environment, pins, step)
                step.result(f"{len(wheels[use])} wheels")
        debs = debian.packages(manifest, kept, console)
        for name, source in manifest.sources.items():
            with console.step("resolve", f"source {name}") as step:
                sources[name] = _source(name, source, resolver, store, step)
                step.result(f"tree {sources[name].patched_tree[:12]}, {len(sources[name].patches)} patches")
    return Lock(
        schema_version=1,
        profile=manifest.profile,
        manifest=manifest.resolving_sha256(),
        wheels=wheels,
        debs=debs,
        sources=sources,
    )


def _source(name: str, source: Source, resolver: Resolver, store: Store, step: Step) -> LockedSource:
    series = patch.series_folder(name, source.series)
    with tempfile.TemporaryDirectory(prefix="source-") as scratch:
        tree = Path(scratch) / "tree"
        if source.git is not None:
            clone = Clone.fetch(source.git, Path(scratch) / "repository")
            if series is None:
                # no file of it is needed to know what it is
                return LockedSource(commit=source.git.commit, tree=clone.tree, patched_tree=clone.tree)
            patched = patch.apply(name, source.git.version, clone.check_out(tree), series)
            return _locked(source, patched, None)
        assert source.wheel is not None
        _, version = pinned(source.wheel, f"sources.{name}.wheel")
        wheel = resolver.pinned(source.wheel, f"sources.{name}.wheel", step)
        patch.unpack_wheel(store.get(wheel.sha256, wheel.file), tree)
        return _locked(source, patch.apply(name, version, tree, series), wheel)


def _locked(source: Source, patched: patch.PatchedTree, wheel: LockedWheel | None) -> LockedSource:
    return LockedSource(
        wheel=wheel,
        commit=source.git.commit if source.git else None,
        tree=patched.tree,
        series=source.series,
        patches=patched.locked(),
        patched_tree=patched.patched_tree,
    )
