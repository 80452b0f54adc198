"""The bill of materials: CycloneDX JSON of what is in the image and of what was compiled into it.

Made of the lock and of the verified files; the image check has proved that the image holds exactly these. Equal builds give equal
bytes: the time is the manifest's epoch, and the serial number is derived from the content.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

from cyclonedx.factory.license import LicenseFactory
from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, Property, XsUri
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.dependency import Dependency
from cyclonedx.model.license import License
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from forge_build.lock import Lock, LockedDeb, LockedSource
from forge_build.manifest import Manifest
from forge_core.errors import IntegrityError
from forge_core.model import ImageRef

FILE_NAME = "sbom.cdx.json"

_OWN = "io.sm120-forge"
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "sm120-forge")
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


def make(
    manifest: Manifest, lock: Lock, image: ImageRef, wheels: Iterable[File], debs: Sequence[LockedDeb], base: str
) -> str:
    """The document. `debs` are the runtime base's packages, `base` its identity (a digest, or a root file system's sha256).

    Raises IntegrityError when a wheel has no METADATA.
    """
    root = Component(
        type=ComponentType.CONTAINER,
        name=manifest.image.name,
        version=image.digest,
        description=manifest.image.title,
        bom_ref=f"image:{image.digest}",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=image.digest.removeprefix("sha256:"))],
        purl=PackageURL("oci", name=manifest.image.name, version=image.digest),
        properties=[
            Property(name=f"{_OWN}.profile", value=manifest.profile),
            Property(name=f"{_OWN}.base", value=base),
        ],
    )
    components: dict[str, Component] = {}
    edges: dict[str, set[str]] = {}
    for name, source in sorted(lock.sources.items()):
        for part in _source(name, manifest, source):
            components[str(part.bom_ref)] = part
        edges[f"source:{name}"] = {f"source:{name}/{part}" for part, item in source.dependencies.items() if item.commit}
    python = {}
    for wheel in wheels:
        metadata = _metadata(wheel)
        name = canonicalize_name(str(metadata["Name"]))
        python[name] = metadata
        components[f"python:{name}"] = _python(name, metadata, wheel)
        if wheel.source:
            edges.setdefault(f"python:{name}", set()).add(f"source:{wheel.source}")
    for name, metadata in python.items():
        wanted = _requires(metadata, manifest.target.python)
        edges.setdefault(f"python:{name}", set()).update(f"python:{other}" for other in wanted if other in python)
    for deb in debs:
        components[f"deb:{deb.name}:{deb.architecture}"] = _deb(deb, str(manifest.base.suite))
    top = [ref for ref in components if not ref.startswith("source:")]
    bom = Bom(
        components=components.values(),
        metadata=BomMetaData(component=root, timestamp=datetime.fromtimestamp(manifest.epoch, UTC)),
        dependencies=[
            _dependency(root, (components[ref] for ref in top)),
            *(_dependency(item, (components[to] for to in edges.get(ref, ()))) for ref, item in components.items()),
        ],
        serial_number=_NAMESPACE,
    )
    bom.serial_number = uuid.uuid5(_NAMESPACE, _text(bom))
    return _text(bom) + "\n"


def _text(bom: Bom) -> str:
    return JsonV1Dot6(bom).output_as_string(indent=1)


def _dependency(item: Component, on: Iterable[Component]) -> Dependency:
    return Dependency(ref=item.bom_ref, dependencies=[Dependency(ref=other.bom_ref) for other in on])


def _sha256(text: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=text)


def _metadata(wheel: File) -> Message:
    with ZipFile(wheel.path) as archive:
        for name in archive.namelist():
            if re.fullmatch(r"[^/]+\.dist-info/METADATA", name):
                return Parser().parsestr(archive.read(name).decode(errors="replace"), headersonly=True)
    raise IntegrityError(f"{wheel.file} has no METADATA")


def _python(name: str, metadata: Message, wheel: File) -> Component:
    version = str(metadata["Version"])
    properties = [Property(name=f"{_OWN}.file", value=wheel.file)]
    if wheel.source:
        properties.append(Property(name=f"{_OWN}.compiled-from", value=wheel.source))
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        bom_ref=f"python:{name}",
        scope=ComponentScope.REQUIRED,
        hashes=[_sha256(wheel.sha256)],
        licenses=_licenses(metadata),
        # compiled here it is the same software with other bytes
        purl=PackageURL("pypi", name=name, version=version, qualifiers={"file_name": wheel.file}),
        modified=wheel.source is not None,
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


def _requires(metadata: Message, python: str) -> set[str]:
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


def _deb(deb: LockedDeb, suite: str) -> Component:
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


def _source(name: str, manifest: Manifest, source: LockedSource) -> Iterable[Component]:
    """A source and what its build took by name; none of them is in the image as it is, their compiled form is."""
    trees = {f"{_OWN}.tree": source.tree, f"{_OWN}.patched-tree": source.patched_tree}
    properties = [Property(name=key, value=value) for key, value in trees.items()]
    properties += [
        Property(name=f"{_OWN}.patch", value=f"{source.series}/{p.file} sha256:{p.sha256}") for p in source.patches
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
            modified=source.tree != source.patched_tree,
            properties=properties,
        )
        return
    version = plan.git.version if plan.git else ""
    yield _repository(f"source:{name}", name, version, str(source.url), str(source.commit), properties)
    for part, item in sorted(source.dependencies.items()):
        if item.commit and item.tree and item.taken:
            took = {f"{_OWN}.tree": item.tree, f"{_OWN}.taken-tree": item.taken}
            told = [Property(name=key, value=value) for key, value in took.items()]
            told += [Property(name=f"{_OWN}.taken-path", value=path) for path in item.paths]
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
        properties=[Property(name=f"{_OWN}.commit", value=commit), *properties],
    )
