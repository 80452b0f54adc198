from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from wheel_factory import make_wheel

from forge_build import lock as locks
from forge_build import manifest as manifests
from forge_build import sbom
from forge_build.lock import Lock, LockedDeb
from forge_build.manifest import Manifest
from forge_build.sbom import File
from forge_core.errors import IntegrityError
from forge_core.model import ImageRef, file_sha256

IMAGE = ImageRef(repository="127.0.0.1:5120/sm120-forge", digest=f"sha256:{'1' * 64}")
DEB = LockedDeb(name="tini", version="1:0.19.0-1+b3", architecture="amd64", sha256="d" * 64, size=1)


@pytest.fixture(scope="module")
def plan() -> Manifest:
    return manifests.load("sm120")


@pytest.fixture(scope="module")
def lock(plan: Manifest) -> Lock:
    return locks.load(plan)


def wheel(folder: Path, name: str, fields: str = "", source: str | None = None) -> File:
    path = make_wheel(folder, {f"{name}.py": ""}, name=name)
    made = path.with_name(f"{name}-1.0-py3-none-any.whl")
    info = f"{name}-1.0.dist-info"
    make_wheel(folder, {f"{name}.py": ""}, name=name, file=made.name)
    # with fields of its own in METADATA
    import zipfile

    with zipfile.ZipFile(path) as old, zipfile.ZipFile(made, "w") as new:
        for member in old.namelist():
            data = old.read(member)
            new.writestr(member, data + fields.encode() if member == f"{info}/METADATA" else data)
    return File(made, made.name, file_sha256(made), source)


@pytest.fixture
def document(plan: Manifest, lock: Lock, tmp_path: Path) -> dict[str, Any]:
    files = [
        wheel(tmp_path, "server", "License-Expression: Apache-2.0\nRequires-Dist: Kernel\nRequires-Dist: absent\n"),
        wheel(tmp_path, "kernel", "License: MIT License\n", "sgl-kernel"),
        wheel(
            tmp_path,
            "told",
            "Classifier: License :: OSI Approved :: BSD License\nRequires-Dist: server; extra == 'x'\n",
        ),
        wheel(tmp_path, "untold", f"License: {'x' * 200}\nRequires-Dist: kernel; sys_platform == 'win32'\n"),
    ]
    text = sbom.make(plan, lock, IMAGE, files, [DEB], "b" * 64)
    assert text == sbom.make(plan, lock, IMAGE, [*reversed(files)], [DEB], "b" * 64), "equal builds, equal bytes"
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    found: dict[str, Any] = json.loads(text)
    return found


def components(document: dict[str, Any]) -> dict[str, Any]:
    return {item["bom-ref"]: item for item in document["components"]}


def needs(document: dict[str, Any], ref: str) -> set[str]:
    (found,) = (item for item in document["dependencies"] if item["ref"] == ref)
    return set(found.get("dependsOn", ()))


def test_it_names_the_image_and_neither_time_nor_place(document: dict[str, Any], plan: Manifest) -> None:
    root = document["metadata"]["component"]
    assert (root["type"], root["name"], root["version"]) == ("container", "sm120-forge", IMAGE.digest)
    assert document["metadata"]["timestamp"] == "2026-03-07T01:41:27+00:00"
    assert "127.0.0.1" not in json.dumps(document)
    found = components(document)
    assert needs(document, root["bom-ref"]) == {ref for ref in found if not ref.startswith("source:")}


def test_licences_are_what_metadata_says_and_nothing_else(document: dict[str, Any]) -> None:
    found = components(document)
    told = {name: found[f"python:{name}"].get("licenses") for name in ("server", "kernel", "told", "untold")}
    assert told == {
        "server": [{"license": {"id": "Apache-2.0"}}],
        "kernel": [{"license": {"name": "MIT License"}}],
        "told": [{"license": {"name": "BSD License"}}],
        "untold": None,
    }


def test_requirements_become_edges_where_they_hold_in_this_image(document: dict[str, Any]) -> None:
    assert needs(document, "python:server") == {"python:kernel"}
    assert needs(document, "python:told") == needs(document, "python:untold") == set()


def test_what_was_compiled_leads_to_its_source_and_that_to_what_it_took(document: dict[str, Any], lock: Lock) -> None:
    found = components(document)
    assert needs(document, "python:kernel") == {"source:sgl-kernel"}
    source = found["source:sgl-kernel"]
    assert source["purl"] == f"pkg:github/sgl-project/sglang@{lock.sources['sgl-kernel'].commit}"
    assert source["scope"] == "excluded"
    told = {item["name"]: item["value"] for item in source["properties"]}
    assert told["io.sm120-forge.tree"] == lock.sources["sgl-kernel"].tree
    assert "source:sgl-kernel/repo-cutlass" in needs(document, "source:sgl-kernel")
    assert not any("deepgemm" in ref for ref in found), "what is dropped did not enter"
    cutlass = {(item["name"], item["value"]) for item in found["source:sgl-kernel/repo-cutlass"]["properties"]}
    dependency = lock.sources["sgl-kernel"].dependencies["repo-cutlass"]
    assert {("io.sm120-forge.taken-tree", dependency.taken), ("io.sm120-forge.taken-path", "include")} <= cutlass
    patches = [item["value"] for item in found["source:flashinfer"]["properties"] if item["name"].endswith(".patch")]
    assert len(patches) == len(lock.sources["flashinfer"].patches) > 0


def test_packages_of_the_distribution_have_their_purl(document: dict[str, Any]) -> None:
    found = components(document)["deb:tini:amd64"]
    assert found["purl"] == "pkg:deb/debian/tini@1:0.19.0-1%2Bb3?arch=amd64&distro=bookworm"
    assert found["hashes"] == [{"alg": "SHA-256", "content": "d" * 64}]


def test_the_serial_number_follows_the_content(plan: Manifest, lock: Lock, tmp_path: Path) -> None:
    file = wheel(tmp_path, "one")

    def serial(*debs: LockedDeb) -> str:
        return str(json.loads(sbom.make(plan, lock, IMAGE, [file], debs, "b"))["serialNumber"])

    assert serial(DEB) == serial(DEB) != serial()


def test_a_wheel_without_metadata_is_an_integrity_error(plan: Manifest, lock: Lock, tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("a.py", "")
    with pytest.raises(IntegrityError, match=r"a\.whl has no METADATA"):
        sbom.make(plan, lock, IMAGE, [File(tmp_path / "a.whl", "a.whl", "0" * 64)], (), "b")
