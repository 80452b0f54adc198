"""The bill of materials: CycloneDX JSON of what is in the image and of what was compiled into it.

Made of the lock and of the verified files; the image check has proved that the image holds exactly these. Equal builds give equal
bytes: the time is the manifest's epoch, and the serial number is derived from the content.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.dependency import Dependency
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.utils import canonicalize_name, parse_wheel_filename

from forge_build.base import Base
from forge_build.fetch import Inputs
from forge_build.image import BuiltFile
from forge_build.lock import Lock, LockedDeb
from forge_build.manifest import Manifest
from forge_build.sbom.parts import OWN, File, deb_part, python_part, read_metadata, required, source_parts
from forge_core.files import write_text
from forge_core.model import ImageRef, file_sha256

FILE_NAME = "sbom.cdx.json"

_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "sm120-forge")


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
            Property(name=f"{OWN}.profile", value=manifest.profile),
            Property(name=f"{OWN}.base", value=base),
        ],
    )
    components: dict[str, Component] = {}
    edges: dict[str, set[str]] = {}
    for name, source in sorted(lock.sources.items()):
        for part in source_parts(name, manifest, source):
            components[str(part.bom_ref)] = part
        edges[f"source:{name}"] = {f"source:{name}/{part}" for part, item in source.dependencies.items() if item.taken}
    python = {}
    for wheel in wheels:
        metadata = read_metadata(wheel)
        name = canonicalize_name(str(metadata["Name"]))
        python[name] = metadata
        components[f"python:{name}"] = python_part(name, metadata, wheel)
        if wheel.source:
            edges.setdefault(f"python:{name}", set()).add(f"source:{wheel.source}")
    for name, metadata in python.items():
        wanted = required(metadata, manifest.target.python)
        edges.setdefault(f"python:{name}", set()).update(f"python:{other}" for other in wanted if other in python)
    for deb in debs:
        components[f"deb:{deb.name}:{deb.architecture}"] = deb_part(deb, str(manifest.base.suite))
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


def write(
    manifest: Manifest,
    lock: Lock,
    inputs: Inputs,
    image: ImageRef,
    base: Base,
    built: Sequence[BuiltFile],
    target: Path,
) -> str:
    """Write the document of a finished build to `target`; returns its sha256 (hex)."""
    sources = {canonicalize_name(name): wheel.source for name, wheel in manifest.wheels.items()}
    files = [File(inputs.path(wheel.sha256), wheel.file, wheel.sha256) for wheel in lock.wheels["runtime"]]
    for own in built:
        name, *_ = parse_wheel_filename(own.file)
        files.append(File(own.path, own.file, own.sha256, sources[name]))
    write_text(target, make(manifest, lock, image, files, inputs.debs.get("runtime", ()), base.identity))
    return file_sha256(target)
