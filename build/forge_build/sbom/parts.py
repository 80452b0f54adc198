"""The bill's components: Python distributions, packages of the distribution, sources and what their builds took by name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, Property, XsUri
from cyclonedx.model.component import Component, ComponentScope, ComponentType, Pedigree
from cyclonedx.model.license import License
from packageurl import PackageURL
from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from forge_build.lock import LockedDeb, LockedSource
from forge_build.manifest import Manifest
from forge_core.errors import IntegrityError

OWN = "io.sm120-forge"
"""Prefix of our own properties."""

_SHORT = 100
"""Characters: what is longer in a License field is a licence's text, not its name."""


@dataclass(frozen=True)
class File:
    """A wheel in the image."""

    path: Path
    file: str
    sha256: str
    source: str | None = None
    """Name of the source it was compiled from here; none: it was published."""


def _sha256(text: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=text)


def read_metadata(wheel: File) -> Message:
    """A wheel's METADATA; raises IntegrityError when it has none."""
    with ZipFile(wheel.path) as archive:
        for name in archive.namelist():
            if re.fullmatch(r"[^/]+\.dist-info/METADATA", name):
                return Parser().parsestr(archive.read(name).decode(errors="replace"), headersonly=True)
    raise IntegrityError(f"{wheel.file} has no METADATA")


def python_part(name: str, metadata: Message, wheel: File) -> Component:
    """A Python distribution in the image."""
    version = str(metadata["Version"])
    properties = [Property(name=f"{OWN}.file", value=wheel.file)]
    if wheel.source:
        properties.append(Property(name=f"{OWN}.compiled-from", value=wheel.source))
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        bom_ref=f"python:{name}",
        scope=ComponentScope.REQUIRED,
        hashes=[_sha256(wheel.sha256)],
        licenses=_licenses(metadata),
        purl=PackageURL("pypi", name=name, version=version, qualifiers={"file_name": wheel.file}),
        # compiled here it is the same software with other bytes
        pedigree=Pedigree(notes=f"compiled here from source:{wheel.source}") if wheel.source else None,
        properties=properties,
    )


def _licenses(metadata: Message) -> list[License]:
    """What METADATA says: an SPDX expression, else a short licence field, else its classifiers; guessed is nothing."""
    factory = LicenseFactory()
    if expression := metadata["License-Expression"]:
        return [factory.make_from_string(str(expression))]
    field = " ".join(str(metadata["License"] or "").split())
    if field and field.upper() != "UNKNOWN" and len(field) <= _SHORT:
        return [factory.make_from_string(field)]
    classifiers = [str(text) for text in metadata.get_all("Classifier", ()) if str(text).startswith("License :: ")]
    names = sorted({text.rpartition(" :: ")[2] for text in classifiers} - {"OSI Approved"})
    return [factory.make_with_name(name) for name in names]


def required(metadata: Message, python: str) -> set[str]:
    """What a distribution requires in this image, extras aside."""
    environment = {str(k): str(v) for k, v in default_environment().items()} | {
        "python_version": python,
        "python_full_version": f"{python}.0",
        "platform_machine": "x86_64",
        "platform_system": "Linux",
        "sys_platform": "linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_version": "",
        "extra": "",
    }
    found: set[str] = set()
    for text in metadata.get_all("Requires-Dist", ()):
        try:
            requirement = Requirement(str(text))
        except InvalidRequirement:
            continue  # of an old setuptools; pip ignores it too
        if requirement.marker is None or requirement.marker.evaluate(environment):
            found.add(canonicalize_name(requirement.name))
    return found


def deb_part(deb: LockedDeb, suite: str) -> Component:
    """A package of the runtime base."""
    qualifiers = {"arch": deb.architecture, "distro": suite}
    return Component(
        type=ComponentType.LIBRARY,
        name=deb.name,
        version=deb.version,
        bom_ref=f"deb:{deb.name}:{deb.architecture}",
        scope=ComponentScope.REQUIRED,
        hashes=[_sha256(deb.sha256)],
        purl=PackageURL("deb", "debian", deb.name, deb.version, qualifiers=qualifiers),
    )


def source_parts(name: str, manifest: Manifest, source: LockedSource) -> Iterable[Component]:
    """A source and what its build took by name; none of them is in the image as it is, their compiled form is."""
    trees = {f"{OWN}.tree": source.tree, f"{OWN}.patched-tree": source.patched_tree}
    properties = [Property(name=key, value=value) for key, value in trees.items()]
    properties += [
        Property(name=f"{OWN}.patch", value=f"{source.series}/{p.file} sha256:{p.sha256}") for p in source.patches
    ]
    plan = manifest.sources[name]
    if source.wheel is not None:
        yield Component(
            type=ComponentType.LIBRARY,
            name=source.wheel.name,
            version=source.wheel.version,
            bom_ref=f"source:{name}",
            scope=ComponentScope.EXCLUDED,
            hashes=[_sha256(source.wheel.sha256)],
            purl=PackageURL("pypi", name=source.wheel.name, version=source.wheel.version),
            pedigree=Pedigree(notes=f"patched by {source.series}") if source.patches else None,
            properties=properties,
        )
        return
    version = plan.git.version if plan.git else ""
    yield _repository(f"source:{name}", name, version, str(source.url), str(source.commit), properties)
    for part, item in sorted(source.dependencies.items()):
        if item.commit and item.tree and item.taken:
            took = {f"{OWN}.tree": item.tree, f"{OWN}.taken-tree": item.taken}
            told = [Property(name=key, value=value) for key, value in took.items()]
            told += [Property(name=f"{OWN}.taken-path", value=path) for path in item.paths]
            yield _repository(f"source:{name}/{part}", part, item.tag or item.commit, item.url, item.commit, told)


def _repository(ref: str, name: str, version: str, url: str, commit: str, properties: Iterable[Property]) -> Component:
    match = re.fullmatch(r"https://github\.com/([^/]+)/([^/]+?)(?:\.git)?", url)
    if match:
        purl = PackageURL("github", match[1].lower(), match[2].lower(), commit)
    else:
        purl = PackageURL("generic", name=name, version=commit, qualifiers={"vcs_url": f"git+{url}@{commit}"})
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        bom_ref=ref,
        scope=ComponentScope.EXCLUDED,
        purl=purl,
        external_references=[ExternalReference(type=ExternalReferenceType.VCS, url=XsUri(url))],
        properties=[Property(name=f"{OWN}.commit", value=commit), *properties],
    )
