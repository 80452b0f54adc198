"""Resolve a manifest to a lock: names to wheel files by sha256, suites to packages, sources to tree ids."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename
from uv import find_uv_bin

from forge_build import patch
from forge_build.fetch.debian import Apt
from forge_build.fetch.download import Download, download
from forge_build.fetch.indexes import Offer, file_sha256_of_offer, new_client, offers, places, variable
from forge_build.lock import Lock, LockedDeb, LockedSource, LockedWheel
from forge_build.manifest import Environment, Manifest, Source
from forge_core.console import Console, Step
from forge_core.errors import EnvironmentFailure, UsageError
from forge_core.process import CommandFailed, run
from forge_core.store import Store


def resolve(manifest: Manifest, previous: Lock | None, store: Store, *, upgrade: bool, console: Console) -> Lock:
    """Resolve every section of the manifest.

    Without `upgrade`, what `previous` locks and the manifest still allows keeps its version. Raises UsageError when
    names cannot be resolved or a patch does not apply, EnvironmentFailure when an index or mirror does not answer.
    """
    kept = None if upgrade else previous
    wheels: dict[str, tuple[LockedWheel, ...]] = {}
    sources: dict[str, LockedSource] = {}
    with new_client() as client:
        environments = dict(manifest.environments)
        if manifest.model:
            environments["model"] = Environment(without_dependencies=(manifest.model.wheel,))
        for use, environment in environments.items():
            with console.step("resolve", f"wheels of {use}") as step:
                pins = {w.name: w.version for w in kept.wheels.get(use, ())} if kept else {}
                wheels[use] = _wheels(manifest, environment, pins, store, client, step)
                step.result(f"{len(wheels[use])} wheels")
        debs = _debs(manifest, console)
        for name, source in manifest.sources.items():
            with console.step("resolve", f"source {name}") as step:
                sources[name] = _source(manifest, name, source, store, client, step)
                step.result(f"tree {sources[name].patched_tree[:12]}, {len(sources[name].patches)} patches")
    return Lock(
        schema_version=1,
        profile=manifest.profile,
        manifest=manifest.resolving_sha256(),
        wheels=wheels,
        debs=debs,
        sources=sources,
    )


def _wheels(
    manifest: Manifest,
    environment: Environment,
    pins: Mapping[str, str],
    store: Store,
    client: httpx.Client,
    step: Step,
) -> tuple[LockedWheel, ...]:
    """Versions by uv, then for each the one file that fits the target best."""
    tags = {tag: rank for rank, tag in enumerate(target_tags(manifest))}
    with tempfile.TemporaryDirectory(prefix="links-") as scratch:
        links = Path(scratch)
        _bring_named(manifest, environment, tags, links, store, client, step)
        versions = _versions(manifest, environment.requires, environment.overrides, pins, links, dependencies=True)
        versions |= _versions(manifest, environment.without_dependencies, (), pins, links, dependencies=False)
    done = 0

    def pick(item: tuple[str, str]) -> LockedWheel:
        nonlocal done
        locked = _pick(manifest, item[0], item[1], tags, client)
        done += 1
        step.progress(done, len(versions), unit="packages", note=item[0])
        return locked

    with ThreadPoolExecutor(8) as pool:
        return tuple(pool.map(pick, sorted(versions.items())))


def _versions(
    manifest: Manifest,
    requirements: tuple[str, ...],
    overrides: tuple[str, ...],
    pins: Mapping[str, str],
    links: Path,
    *,
    dependencies: bool,
) -> dict[str, str]:
    """Name -> version as uv resolves them as of the manifest's date; `links` holds the wheels of named indexes."""
    if not requirements:
        return {}
    with tempfile.TemporaryDirectory(prefix="lock-") as scratch:
        folder = Path(scratch)
        (folder / "in.txt").write_text("\n".join(requirements) + "\n", encoding="utf-8")
        output = folder / "out.txt"
        # uv prefers what an existing output file pins
        output.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()), encoding="utf-8")
        command: list[str | Path] = [
            find_uv_bin(), "pip", "compile", "in.txt", "-o", "out.txt", "--no-header", "--no-annotate", "--quiet",
            "--only-binary", ":all:", "--no-python-downloads",
            "--exclude-newer", f"{manifest.as_of.isoformat()}T23:59:59Z",
            "--python-version", manifest.target.python, "--python-platform", manifest.target.platform,
        ]  # fmt: skip
        command += ["--find-links", links]
        # An index's packages come from nowhere else: what the manifest pins of them replaces what others demand.
        named = {name for index in manifest.indexes.values() for name in index.packages}
        pinned = [r for r in requirements if canonicalize_name(Requirement(r).name) in named]
        if not dependencies:
            command.append("--no-deps")
        elif overrides or pinned:
            (folder / "overrides.txt").write_text("\n".join([*pinned, *overrides]) + "\n", encoding="utf-8")
            command += ["--override", "overrides.txt"]
        try:
            run(command, cwd=folder, timeout=600)
        except CommandFailed as error:
            raise UsageError(
                f"the requirements of {manifest.profile!r} cannot be resolved as of {manifest.as_of}",
                details=tuple(error.completed.stderr.strip().splitlines()[:15]),
                hint="a package from another index is named in `indexes`, its address in "
                + (", ".join(variable(index) for index in manifest.indexes) or "FORGE_INDEX_<NAME>"),
            ) from error
        lines = [line.strip() for line in output.read_text(encoding="utf-8").splitlines()]
    parsed = [Requirement(line) for line in lines if line and not line.startswith(("#", "-"))]
    return {canonicalize_name(r.name): str(next(iter(r.specifier)).version) for r in parsed}


def _bring_named(
    manifest: Manifest,
    environment: Environment,
    tags: Mapping[Tag, int],
    links: Path,
    store: Store,
    client: httpx.Client,
    step: Step,
) -> None:
    """Bring the wheels that come from named indexes, so that uv finds these there and nothing else."""
    named = {package: index for index, spec in manifest.indexes.items() for package in spec.packages}
    for requirement in (*environment.requires, *environment.without_dependencies):
        if (package := canonicalize_name(Requirement(requirement).name)) not in named:
            continue
        name, version = _pinned(requirement, f"indexes.{named[package]}")
        wheel = _pick(manifest, name, version, tags, client)
        _into_store(manifest, wheel, store, client, step)
        (links / wheel.file).symlink_to(store.path(wheel.sha256))


def _pinned(requirement: str, where: str) -> tuple[str, str]:
    """Name and version of a requirement that must be pinned; raises UsageError when it is not."""
    parsed = Requirement(requirement)
    exact = [s.version for s in parsed.specifier if s.operator == "=="]
    if len(exact) != 1 or "*" in exact[0]:
        raise UsageError(f"{where}: {requirement!r} must be pinned", hint=f"write {parsed.name}==VERSION")
    return canonicalize_name(parsed.name), exact[0]


def _into_store(manifest: Manifest, wheel: LockedWheel, store: Store, client: httpx.Client, step: Step) -> None:
    if not store.has(wheel.sha256):
        offer = next(o for o in offers(client, places(manifest, wheel.index), wheel.name) if o.file == wheel.file)
        download([Download(wheel.file, offer.location, wheel.sha256, wheel.size)], store, client, step)


def target_tags(manifest: Manifest) -> list[Tag]:
    """Wheel tags the target accepts, best first, as pip orders them."""
    major, minor = (int(part) for part in manifest.target.python.split("."))
    newest = int(manifest.target.platform.rsplit("_", 1)[1])
    platforms = [f"manylinux_2_{glibc}_x86_64" for glibc in range(newest, 4, -1)]
    legacy = {17: "manylinux2014_x86_64", 12: "manylinux2010_x86_64", 5: "manylinux1_x86_64"}
    ordered: list[str] = []
    for platform in platforms:
        ordered.append(platform)
        if alias := legacy.get(int(platform.split("_")[2])):
            ordered.append(alias)
    ordered.append("linux_x86_64")
    tags = list(cpython_tags((major, minor), platforms=ordered))
    return tags + list(compatible_tags((major, minor), f"cp{major}{minor}", ordered))


def _pick(manifest: Manifest, name: str, version: str, tags: Mapping[Tag, int], client: httpx.Client) -> LockedWheel:
    index = next((i for i, spec in manifest.indexes.items() if name in spec.packages), None)
    found = offers(client, places(manifest, index), name)
    ranked: list[tuple[int, Offer]] = []
    seen: list[str] = []
    for offer in found:
        try:
            _, offered, _, file_tags = parse_wheel_filename(offer.file)
        except ValueError:
            continue
        if str(offered) != version:
            continue
        seen.append(offer.file)
        if ranks := [tags[tag] for tag in file_tags if tag in tags]:
            ranked.append((min(ranks), offer))
    if not ranked:
        raise UsageError(
            f"{name} {version} has no wheel for Python {manifest.target.python} on {manifest.target.platform}",
            details=tuple(seen) or (f"no wheel of {version} at all in the index {index or 'by default'}",),
            hint=f"set {variable(index)}" if index else None,
        )
    offer = min(ranked, key=lambda pair: (pair[0], pair[1].file))[1]
    sha256 = file_sha256_of_offer(offer)
    if sha256 is None or offer.size is None:
        head = client.head(str(offer.location))
        raise EnvironmentFailure(f"the index states no sha256 or size for {offer.file} (status {head.status_code})")
    return LockedWheel(name=name, version=version, file=offer.file, sha256=sha256, size=offer.size, index=index)


def _debs(manifest: Manifest, console: Console) -> dict[str, tuple[LockedDeb, ...]]:
    wanted = {"builder": manifest.base.builder, "runtime": manifest.base.runtime}
    if not any(wanted.values()):
        return {}
    found: dict[str, tuple[LockedDeb, ...]] = {}
    with console.step("resolve", f"packages of {manifest.base.suite}") as step:
        with tempfile.TemporaryDirectory(prefix="apt-") as scratch:
            apt = Apt.open(manifest.base, Path(scratch))
            for use, rootfs in wanted.items():
                if rootfs is not None:
                    found[use] = tuple(deb for deb, _ in apt.resolve(rootfs.packages))
        step.result(", ".join(f"{use} {len(debs)}" for use, debs in found.items()))
    return found


def _source(
    manifest: Manifest, name: str, source: Source, store: Store, client: httpx.Client, step: Step
) -> LockedSource:
    if source.wheel is None:
        raise UsageError(
            f"sources.{name}: sources from git are not resolved yet", hint="only `wheel` sources are built so far"
        )
    package, version = _pinned(source.wheel, f"sources.{name}.wheel")
    tags = {tag: rank for rank, tag in enumerate(target_tags(manifest))}
    wheel = _pick(manifest, package, version, tags, client)
    _into_store(manifest, wheel, store, client, step)
    with tempfile.TemporaryDirectory(prefix="source-") as scratch:
        tree = patch.unpack_wheel(store.get(wheel.sha256, wheel.file), Path(scratch) / "tree")
        patched = patch.apply(name, version, tree, patch.series_folder(name, source.series))
        return LockedSource(
            wheel=wheel,
            tree=patched.tree,
            series=source.series,
            patches=patched.locked(),
            patched_tree=patched.patched_tree,
        )
