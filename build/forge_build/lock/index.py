"""Wheels from package indexes: versions by uv as of the manifest's date, then for each the one file that fits best."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import BuildTag, canonicalize_name, parse_wheel_filename
from packaging.version import Version
from pypi_simple import PYPI_SIMPLE_ENDPOINT
from uv import find_uv_bin

from forge_build.fetch.download import Download, download
from forge_build.fetch.indexes import Offer, file_sha256_of_offer, offers, places, unreachable, variable
from forge_build.lock import LockedWheel
from forge_build.manifest import Environment, Manifest
from forge_core.console import Step
from forge_core.errors import EnvironmentFailure, UsageError
from forge_core.process import CommandFailed, run
from forge_core.store import Store

# What uv says when an index did not answer, as opposed to answering that there is no such version.
_UNREACHABLE = re.compile(
    r"(?i)failed to fetch|error sending request|could not connect|timed out|certificate|dns error"
)


class Resolver:
    """Resolves the environments of one manifest."""

    def __init__(self, manifest: Manifest, store: Store, client: httpx.Client) -> None:
        self._manifest = manifest
        self._store = store
        self._client = client
        self._tags = {tag: rank for rank, tag in enumerate(target_tags(manifest))}
        self._named = {package: index for index, spec in manifest.indexes.items() for package in spec.packages}

    def environment(self, wanted: Environment, pins: Mapping[str, str], step: Step) -> tuple[LockedWheel, ...]:
        """The wheels of an environment, sorted by name; `pins` (name -> version) are kept where they are allowed.

        Raises UsageError when requirements contradict each other or no wheel fits the target, EnvironmentFailure when an
        index does not answer.
        """
        with tempfile.TemporaryDirectory(prefix="links-") as scratch:
            links = Path(scratch)
            for requirement in (*wanted.requires, *wanted.without_dependencies):
                # uv finds the wheels of named indexes here and nowhere else
                if (index := self._named.get(_name(requirement))) is not None:
                    wheel = self.pinned(requirement, f"indexes.{index}", step)
                    (links / wheel.file).symlink_to(self._store.path(wheel.sha256))
            versions = self._versions(wanted.requires, wanted.overrides, pins, links, dependencies=True)
            versions |= self._versions(wanted.without_dependencies, (), pins, links, dependencies=False)
        done = 0

        def pick(item: tuple[str, str]) -> LockedWheel:
            nonlocal done
            locked = self.pick(*item)
            done += 1
            step.progress(done, len(versions), unit="packages", note=item[0])
            return locked

        with ThreadPoolExecutor(8) as pool:
            return tuple(pool.map(pick, sorted(versions.items())))

    def pinned(self, requirement: str, where: str, step: Step) -> LockedWheel:
        """The wheel of a requirement that must be pinned, brought into the store."""
        wheel = self.pick(*pinned(requirement, where))
        if not self._store.has(wheel.sha256):
            found = offers(self._client, places(self._manifest, wheel.index), wheel.name)
            offer = next(offer for offer in found if offer.file == wheel.file)
            items = [Download(wheel.file, offer.location, wheel.sha256, wheel.size)]
            download(items, self._store, self._client, step)
        return wheel

    def pick(self, name: str, version: str) -> LockedWheel:
        """The file of a version that fits the target best, as pip chooses: by tags, then by the newest build."""
        manifest, index = self._manifest, self._named.get(name)
        ranked: list[tuple[int, BuildTag, str, Offer]] = []
        seen: list[str] = []
        for offer in offers(self._client, places(manifest, index), name):
            try:
                _, offered, build, file_tags = parse_wheel_filename(offer.file)
            except ValueError:
                continue
            if offered != Version(version):
                continue
            seen.append(offer.file)
            if ranks := [self._tags[tag] for tag in file_tags if tag in self._tags]:
                ranked.append((-min(ranks), build, offer.file, offer))
        if not ranked:
            raise UsageError(
                f"{name} {version} has no wheel for Python {manifest.target.python} on {manifest.target.platform}",
                details=tuple(sorted(seen)) or (f"no wheel of {version} at all in the index {index or 'by default'}",),
                hint=f"set {variable(index)} to the address (or a folder) of that index" if index else None,
            )
        offer = max(ranked, key=lambda item: item[:3])[3]
        sha256 = file_sha256_of_offer(offer)
        if sha256 is None:
            raise EnvironmentFailure(
                f"the index {index or 'by default'} states no sha256 for {offer.file}",
                hint="an index that follows PEP 503 does; or put the wheels into a folder"
                + (f" that {variable(index)} names" if index else ""),
            )
        size = offer.size if offer.size is not None else self._size(str(offer.location), offer.file)
        return LockedWheel(name=name, version=version, file=offer.file, sha256=sha256, size=size, index=index)

    def _size(self, address: str, file: str) -> int:
        """Indexes of plain HTML pages state no sizes: the server of the file does."""
        try:
            answer = self._client.head(address, headers={"Accept-Encoding": "identity"})
        except httpx.HTTPError as error:
            raise unreachable(address, error) from error
        length = answer.headers.get("content-length", "")
        if answer.status_code != 200 or not length.isdecimal():
            raise EnvironmentFailure(
                f"neither the index nor the server ({answer.status_code}) states the size of {file}"
            )
        return int(length)

    def _versions(
        self,
        requirements: tuple[str, ...],
        overrides: tuple[str, ...],
        pins: Mapping[str, str],
        links: Path,
        *,
        dependencies: bool,
    ) -> dict[str, str]:
        """Name -> version as uv resolves them; `links` holds the wheels of named indexes."""
        if not requirements:
            return {}
        manifest = self._manifest
        with tempfile.TemporaryDirectory(prefix="lock-") as scratch:
            folder = Path(scratch)
            (folder / "in.txt").write_text("\n".join(requirements) + "\n", encoding="utf-8")
            output = folder / "out.txt"
            # uv prefers what an existing output file pins
            output.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()), encoding="utf-8")
            command: list[str | Path] = [
                find_uv_bin(), "pip", "compile", "in.txt", "-o", "out.txt", "--no-header", "--no-annotate", "--quiet",
                "--only-binary", ":all:", "--no-python-downloads", "--find-links", links,
                "--exclude-newer", f"{manifest.as_of.isoformat()}T23:59:59Z",
                "--python-version", manifest.target.python, "--python-platform", manifest.target.platform,
            ]  # fmt: skip
            for name, day in manifest.newer.items():
                command += ["--exclude-newer-package", f"{name}={day.isoformat()}T23:59:59Z"]
            default = places(manifest, None).indexes[0]
            if default != PYPI_SIMPLE_ENDPOINT:
                command += ["--default-index", default]
            # An index's packages come from nowhere else: what the manifest pins of them replaces what others demand.
            pinned_here = [r for r in requirements if _name(r) in self._named]
            if not dependencies:
                command.append("--no-deps")
            elif overrides or pinned_here:
                (folder / "overrides.txt").write_text("\n".join([*pinned_here, *overrides]) + "\n", encoding="utf-8")
                command += ["--override", "overrides.txt"]
            try:
                run(command, cwd=folder, env=_certificates(), timeout=600)
            except CommandFailed as error:
                raise self._refused(error.completed.stderr) from error
            lines = [line.strip() for line in output.read_text(encoding="utf-8").splitlines()]
        parsed = [Requirement(line) for line in lines if line and not line.startswith(("#", "-"))]
        return {canonicalize_name(r.name): str(next(iter(r.specifier)).version) for r in parsed}

    def _refused(self, said: str) -> UsageError | EnvironmentFailure:
        details = tuple(said.strip().splitlines()[:15])
        if _UNREACHABLE.search(said):
            hint = "check the network; a private CA goes into SSL_CERT_FILE (PEM), a proxy into HTTPS_PROXY"
            return EnvironmentFailure("a package index does not answer", details=details, hint=hint)
        addresses = ", ".join(variable(index) for index in self._manifest.indexes) or "FORGE_INDEX_<NAME>"
        return UsageError(
            f"the requirements of {self._manifest.profile!r} cannot be resolved as of {self._manifest.as_of}",
            details=details,
            hint=f"a package from another index is named in `indexes`, its address in {addresses}; one released later in `newer`",
        )


def pinned(requirement: str, where: str) -> tuple[str, str]:
    """Name and version of a requirement that must be pinned; raises UsageError when it is not."""
    parsed = Requirement(requirement)
    exact = [s.version for s in parsed.specifier if s.operator == "=="]
    if len(exact) != 1 or "*" in exact[0]:
        raise UsageError(f"{where}: {requirement!r} must be pinned", hint=f"write {parsed.name}==VERSION")
    return canonicalize_name(parsed.name), exact[0]


def target_tags(manifest: Manifest) -> list[Tag]:
    """Wheel tags the target accepts, best first, as pip orders them."""
    major, minor = (int(part) for part in manifest.target.python.split("."))
    newest = int(manifest.target.platform.rsplit("_", 1)[1])
    legacy = {17: "manylinux2014_x86_64", 12: "manylinux2010_x86_64", 5: "manylinux1_x86_64"}
    ordered: list[str] = []
    for glibc in range(newest, 4, -1):
        ordered.append(f"manylinux_2_{glibc}_x86_64")
        if alias := legacy.get(glibc):
            ordered.append(alias)
    ordered.append("linux_x86_64")
    tags = list(cpython_tags((major, minor), platforms=ordered))
    return tags + list(compatible_tags((major, minor), f"cp{major}{minor}", ordered))


def _name(requirement: str) -> str:
    return canonicalize_name(Requirement(requirement).name)


def _certificates() -> dict[str, str]:
    """uv reads a private CA from SSL_CERT_FILE alone; pip's and requests' names serve as well."""
    names = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "CURL_CA_BUNDLE")
    bundle = next((os.environ[name] for name in names if os.environ.get(name)), None)
    return {"SSL_CERT_FILE": bundle} if bundle else {}
