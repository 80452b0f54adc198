"""uv, our choice of files and the whole of `resolve`, against a real index on loopback that serves real wheels."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import zipfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml
from git_factory import Origin
from packaging.tags import Tag
from pydantic import ValidationError
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from forge_build import lock as locks
from forge_build import manifest as manifests
from forge_build import patch
from forge_build.fetch.indexes import new_client
from forge_build.lock import Lock, LockedDeb, LockedWheel, debian
from forge_build.lock import index as wheels
from forge_build.lock.diff import diff
from forge_build.lock.index import Resolver, pinned, target_tags
from forge_build.lock.resolve import resolve
from forge_build.manifest import Manifest
from forge_core.console import Console
from forge_core.errors import EnvironmentFailure, UsageError
from forge_core.store import Store

IMAGE = "registry.invalid/base@sha256:" + "a" * 64
QUIET = Console(quiet=True)


class Index:
    """A Simple API that serves wheels made here; `html` drops sizes and upload times, as plain indexes do."""

    def __init__(self, server: HTTPServer, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.uploaded: dict[str, str] = {}
        self.html = False
        folder.mkdir()
        server.expect_request(re.compile("^/")).respond_with_handler(self._answer)

    @property
    def url(self) -> str:
        return self.server.url_for("/simple/")

    def add(
        self,
        name: str,
        version: str,
        *requires: str,
        tags: str = "py3-none-any",
        day: str = "2026-01-01",
        files: dict[str, str] | None = None,
    ) -> Path:
        path = wheel(self.folder, name, version, requires, tags, files or {})
        self.uploaded[path.name] = f"{day}T12:00:00.000000Z"
        return path

    def _answer(self, request: Request) -> Response:
        if request.path.startswith("/files/"):
            path = self.folder / request.path.removeprefix("/files/")
            return Response(path.read_bytes(), 200, content_type="application/octet-stream")
        project = request.path.removeprefix("/simple/").strip("/")
        found = [p for p in sorted(self.folder.glob("*.whl")) if p.name.split("-")[0].replace("_", "-") == project]
        if not found:
            return Response("no", 404)
        shas = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in found}
        if self.html:
            links = "".join(f'<a href="/files/{n}#sha256={sha}">{n}</a>\n' for n, sha in shas.items())
            return Response(f"<!DOCTYPE html><html><body>{links}</body></html>", 200, content_type="text/html")
        rows = [
            {
                "filename": p.name,
                "url": self.server.url_for(f"/files/{p.name}"),
                "hashes": {"sha256": shas[p.name]},
                "size": p.stat().st_size,
                "upload-time": self.uploaded[p.name],
            }
            for p in found
        ]
        page = {"meta": {"api-version": "1.1"}, "name": project, "versions": [], "files": rows}
        return Response(json.dumps(page), 200, content_type="application/vnd.pypi.simple.v1+json")


def wheel(folder: Path, name: str, version: str, requires: tuple[str, ...], tags: str, files: dict[str, str]) -> Path:
    stem = name.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    members = {
        f"{stem}/__init__.py": "",
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + "".join(f"Requires-Dist: {r}\n" for r in requires),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: {tags}\n",
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode().rstrip('=')},{len(text)}\n"
        for path, text in members.items()
    )
    path = folder / f"{stem}-{version}-{tags}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, text in {**members, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(zipfile.ZipInfo(member, (2026, 1, 1, 0, 0, 0)), text)
    return path


@pytest.fixture
def index(httpserver: HTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    made = Index(httpserver, tmp_path / "files")
    for name in (
        "PIP_EXTRA_INDEX_URL",
        "PIP_FIND_LINKS",
        "UV_DEFAULT_INDEX",
        "UV_INDEX",
        "UV_FIND_LINKS",
        "UV_INDEX_URL",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", made.url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("FORGE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("FORGE_ROOT", str(tmp_path))
    (tmp_path / "build/manifests").mkdir(parents=True)
    yield made


def a_manifest(**changes: Any) -> Manifest:
    runtime = changes.pop("runtime", {"requires": ["app"]})
    data: dict[str, Any] = {
        "schema": 1,
        "profile": "trial",
        "kind": "rehearsal",
        "description": "x",
        "as_of": date(2026, 3, 1),
        "epoch": 1795910400,
        "target": {"python": "3.11", "platform": "x86_64-manylinux_2_28"},
        "base": {"builder_image": IMAGE, "runtime_image": IMAGE},
        "environments": {"runtime": runtime, "builder": {}},
        "image": {"name": "x", "title": "x"},
    }
    return Manifest.model_validate(data | changes)


def resolved(manifest: Manifest, previous: Lock | None = None, *, upgrade: bool = False) -> Lock:
    return resolve(manifest, previous, Store.open(), upgrade=upgrade, console=QUIET)


def versions(lock: Lock) -> dict[str, str]:
    return {w.name: w.version for w in lock.wheels["runtime"]}


def test_dependencies_are_locked_as_of_the_day_with_their_bytes(index: Index) -> None:
    app = index.add("app", "1.0", "some-library>=1", "nothing; python_version < '3'")
    index.add("some-library", "1.1", day="2026-03-01")
    index.add("some-library", "1.2", day="2026-03-02")
    lock = resolved(a_manifest())
    assert versions(lock) == {"app": "1.0", "some-library": "1.1"}
    locked = lock.wheels["runtime"][0]
    assert locked.file == app.name
    assert locked.sha256 == hashlib.sha256(app.read_bytes()).hexdigest()
    assert locked.size == app.stat().st_size
    assert locked.index is None
    assert lock.manifest == a_manifest().resolving_sha256()


def test_a_package_may_be_resolved_as_of_a_later_day(index: Index) -> None:
    index.add("app", "1.0", "library", "other")
    for name in ("library", "other"):
        index.add(name, "1", day="2026-02-01")
        index.add(name, "2", day="2026-03-20")
        index.add(name, "3", day="2026-04-01")
    lock = resolved(a_manifest(newer={"library": date(2026, 3, 20)}))
    assert versions(lock) == {"app": "1.0", "library": "2", "other": "1"}


def test_what_is_locked_stays_until_an_upgrade_or_until_the_manifest_forbids_it(index: Index) -> None:
    index.add("app", "1.0", "library")
    index.add("library", "1")
    first = resolved(a_manifest())
    index.add("library", "2")
    index.add("library", "3")
    assert resolved(a_manifest(as_of=date(2026, 3, 2)), first).wheels == first.wheels
    upgraded = resolved(a_manifest(as_of=date(2026, 3, 3)), first, upgrade=True)
    assert versions(upgraded)["library"] == "3"
    assert [str(c) for c in diff(first, upgraded)] == ["wheels.runtime: library: 1 -> 3"]
    forbidden = a_manifest(as_of=date(2026, 3, 4), runtime={"requires": ["app", "library>1,<3"]})
    assert versions(resolved(forbidden, first))["library"] == "2"


def test_a_conflict_comes_in_uvs_words(index: Index) -> None:
    index.add("app", "1.0", "library<2", "other")
    index.add("other", "1", "library>=2")
    index.add("library", "1")
    index.add("library", "2")
    with pytest.raises(UsageError, match="cannot be resolved as of 2026-03-01") as caught:
        resolved(a_manifest())
    said = " ".join(caught.value.details)
    assert "other" in said
    assert "library" in said


def test_overrides_replace_and_drop_what_packages_demand(index: Index) -> None:
    index.add("app", "1.0", "library==1", "kernel==7")
    index.add("library", "2")
    lock = resolved(
        a_manifest(runtime={"requires": ["app"], "overrides": ["library==2", 'kernel; sys_platform == "none"']})
    )
    assert versions(lock) == {"app": "1.0", "library": "2"}


def test_what_is_taken_without_dependencies_replaces_what_others_bring(index: Index) -> None:
    index.add("app", "1.0", "library")
    index.add("library", "1", "absent")
    index.add("library", "2", "absent")
    index.add("absent", "1")
    lock = resolved(a_manifest(runtime={"requires": ["app"], "without_dependencies": ["library==1"]}))
    assert versions(lock) == {"absent": "1", "app": "1.0", "library": "1"}
    alone = resolved(a_manifest(runtime={"without_dependencies": ["library==1"]}))
    assert versions(alone) == {"library": "1"}


def test_of_the_files_of_a_version_the_one_that_fits_best_is_locked(index: Index) -> None:
    for tags in (
        "py3-none-any",
        "cp311-cp311-manylinux_2_17_x86_64",
        "cp311-cp311-manylinux_2_28_x86_64",
        "cp311-cp311-manylinux_2_34_x86_64",
        "cp311-cp311-manylinux_2_28_aarch64",
        "cp312-cp312-manylinux_2_28_x86_64",
        "cp310-abi3-manylinux_2_28_x86_64",
        "cp311-cp311-win_amd64",
    ):
        index.add("app", "1.0", tags=tags)
    for python, platform, best in (
        ("3.11", "x86_64-manylinux_2_28", "cp311-cp311-manylinux_2_28_x86_64"),
        ("3.11", "x86_64-manylinux_2_17", "cp311-cp311-manylinux_2_17_x86_64"),
        ("3.13", "x86_64-manylinux_2_28", "cp310-abi3-manylinux_2_28_x86_64"),
        ("3.9", "x86_64-manylinux_2_28", "py3-none-any"),
    ):
        manifest = a_manifest(target={"python": python, "platform": platform})
        with new_client() as client:
            assert Resolver(manifest, Store.open(), client).pick("app", "1.0").file == f"app-1.0-{best}.whl"


def test_of_two_builds_of_a_wheel_the_newer_one_is_locked(index: Index) -> None:
    for build in ("", "2-", "10-"):
        index.add("app", "1.0", tags=f"{build}py3-none-any")
    with new_client() as client:
        assert Resolver(a_manifest(), Store.open(), client).pick("app", "1.0").file == "app-1.0-10-py3-none-any.whl"


def test_tags_are_ordered_as_packaging_orders_them_for_this_machine() -> None:
    tags = target_tags(a_manifest())
    assert tags[0] == Tag("cp311", "cp311", "manylinux_2_28_x86_64")
    assert tags.index(Tag("cp311", "cp311", "manylinux_2_17_x86_64")) < tags.index(
        Tag("cp311", "cp311", "manylinux2014_x86_64")
    )
    assert Tag("py3", "none", "any") in tags
    assert Tag("cp311", "cp311", "manylinux_2_29_x86_64") not in tags
    assert len(tags) == len(set(tags))


def test_a_package_without_a_fitting_wheel_says_what_there_is(index: Index) -> None:
    index.add("app", "1.0", tags="cp312-cp312-manylinux_2_28_x86_64")
    with pytest.raises(UsageError) as caught:
        resolved(a_manifest())
    assert "app" in " ".join((caught.value.message, *caught.value.details))
    # named indexes and sources are chosen by us alone
    with pytest.raises(UsageError, match=r"app 1\.0 has no wheel for Python 3\.11 on x86_64-manylinux_2_28") as own:
        resolved(a_manifest(runtime={}, sources={"s": {"wheel": "app==1.0"}}))
    assert own.value.details == ("app-1.0-cp312-cp312-manylinux_2_28_x86_64.whl",)


def test_a_package_of_a_named_index_comes_from_there_alone(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.add("app", "1.0", "torch==2.0", "library")
    index.add("library", "1", "torch>=2")
    index.add("torch", "2.0", "cuda-things")
    index.add("cuda-things", "1")
    folder = tmp_path / "cpu"
    folder.mkdir()
    made = wheel(folder, "torch", "2.0+cpu", (), "cp311-cp311-linux_x86_64", {})
    named = a_manifest(indexes={"cpu-only": {"packages": ["torch"]}}, runtime={"requires": ["app", "torch==2.0+cpu"]})
    with pytest.raises(UsageError) as caught:
        resolved(named)
    assert "FORGE_INDEX_CPU_ONLY" in (caught.value.hint or "")
    monkeypatch.setenv("FORGE_INDEX_CPU_ONLY", str(folder))
    lock = resolved(named)
    assert versions(lock) == {"app": "1.0", "library": "1", "torch": "2.0+cpu"}
    torch = lock.wheels["runtime"][2]
    assert (torch.index, torch.sha256) == ("cpu-only", hashlib.sha256(made.read_bytes()).hexdigest())
    assert "url" not in yaml.safe_dump(lock.model_dump(mode="json"))


def test_a_named_index_of_plain_pages_may_leave_sizes_out(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    made = index.add("torch", "2.0")
    index.html = True
    monkeypatch.setenv("FORGE_INDEX_CPU", index.url)
    named = a_manifest(indexes={"cpu": {"packages": ["torch"]}}, runtime={"without_dependencies": ["torch==2.0"]})
    (torch,) = resolved(named).wheels["runtime"]
    assert torch.size == made.stat().st_size


def test_what_comes_from_a_named_index_is_pinned(index: Index) -> None:
    named = a_manifest(indexes={"cpu": {"packages": ["torch"]}}, runtime={"requires": ["torch>=2"]})
    with pytest.raises(UsageError, match=r"'torch>=2' must be pinned"):
        resolved(named)
    assert pinned("Some_Thing[extra]==1.0", "x") == ("some-thing", "1.0")
    for text in ("a==1.*", "a", "a>=1", "a==1,==2"):
        with pytest.raises(UsageError):
            pinned(text, "x")


def test_an_index_that_does_not_answer_is_an_environment_failure(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    # uv's own tries again take seconds
    monkeypatch.setattr(wheels, "_certificates", lambda: {"UV_HTTP_RETRIES": "0"})
    with pytest.raises(EnvironmentFailure, match="a package index does not answer") as caught:
        resolved(a_manifest())
    assert any("127.0.0.1" in line for line in caught.value.details)


PATCH = """Description: two
Author: x <x@y.invalid>
Forwarded: not-needed
Last-Update: 2026-01-01
Applies-To: >=1,<2
Retire-When: never
---
--- a/thing/a.txt
+++ b/thing/a.txt
@@ -1 +1 @@
-one
+two
"""


def test_sources_from_wheels_and_from_git_are_named_by_their_trees(index: Index, tmp_path: Path) -> None:
    index.add("thing", "1.0", files={"thing/a.txt": "one\n"})
    origin = tmp_path / "origin"
    (origin / "thing").mkdir(parents=True)
    (origin / "thing/a.txt").write_text("one\n")
    git = ["git", "-C", str(origin), "-c", "user.name=x", "-c", "user.email=x@y"]
    for argv in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *argv], check=True)
    commit, tree = subprocess.run(
        [*git, "rev-parse", "HEAD", "HEAD^{tree}"], check=True, capture_output=True, text=True
    ).stdout.split()
    for source in ("wheeled", "cloned"):
        series = tmp_path / "patches" / source / "s"
        series.mkdir(parents=True)
        (series / "series").write_text("0001-two.patch\n")
        (series / "0001-two.patch").write_text(PATCH)
    from_git = {"url": origin.as_uri(), "commit": commit, "version": "1.0"}
    lock = resolved(
        a_manifest(
            runtime={},
            sources={
                "wheeled": {"wheel": "thing==1.0", "series": "s"},
                "cloned": {"git": from_git, "series": "s"},
                "plain": {"git": from_git},
            },
        )
    )
    cloned, wheeled, plain = lock.sources["cloned"], lock.sources["wheeled"], lock.sources["plain"]
    assert (cloned.commit, cloned.tree, cloned.wheel) == (commit, tree, None)
    assert cloned.patched_tree not in (cloned.tree, wheeled.patched_tree)
    (origin / "thing/a.txt").write_text("two\n")
    subprocess.run([*git, "commit", "-qam", "y"], check=True)
    after = subprocess.run(
        [*git, "rev-parse", "HEAD^{tree}"], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert cloned.patched_tree == after
    assert [p.file for p in cloned.patches] == ["0001-two.patch"]
    assert (plain.tree, plain.patched_tree, plain.patches) == (tree, tree, ())
    assert wheeled.wheel is not None
    assert Store.open().has(wheeled.wheel.sha256)
    unpacked = patch.unpack_wheel(Store.open().get(wheeled.wheel.sha256), tmp_path / "unpacked")
    assert patch.tree_of(unpacked) == wheeled.tree


def test_what_a_source_asks_for_is_resolved_from_its_own_tree(index: Index, tmp_path: Path) -> None:
    index.add("app", "1.0")
    index.add("dep", "2.0")
    index.add("dep", "1.0")
    index.add("heavy", "1.0")
    origin = Origin(tmp_path / "origin")
    asks = '[project]\nname = "own"\nversion = "1"\ndependencies = ["dep==1.0", "heavy==9"]\n'
    source = origin.source(origin.commit({"python/pyproject.toml": asks}), "python")
    runtime = {"requires": ["app"], "requires_of": ["own"], "overrides": ["heavy==1.0"]}
    lock = resolved(a_manifest(runtime=runtime, sources={"own": {"git": source}}))
    assert versions(lock) == {"app": "1.0", "dep": "1.0", "heavy": "1.0"}

    for text, said in (
        ('[project]\nname = "own"\ndynamic = ["version", "dependencies"]\n', "leaves its dependencies to the backend"),
        ("[build-system]\n", r"own has no pyproject.toml with a \[project\]"),
    ):
        source = origin.source(origin.commit({"python/pyproject.toml": text}), "python")
        with pytest.raises(UsageError, match=said):
            resolved(a_manifest(runtime=runtime, sources={"own": {"git": source}}))
    with pytest.raises(ValidationError, match="names no source from git"):
        a_manifest(runtime=runtime, sources={"own": {"wheel": "own==1"}})


def test_a_source_that_is_not_in_its_patches_range_is_refused(index: Index, tmp_path: Path) -> None:
    index.add("thing", "2.0", files={"thing/a.txt": "one\n"})
    series = tmp_path / "patches/wheeled/s"
    series.mkdir(parents=True)
    (series / "series").write_text("0001-two.patch\n")
    (series / "0001-two.patch").write_text(PATCH)
    with pytest.raises(UsageError, match=r"0001-two\.patch on wheeled 2\.0: retire now"):
        resolved(a_manifest(runtime={}, sources={"wheeled": {"wheel": "thing==2.0", "series": "s"}}))


def deb(name: str, version: str) -> LockedDeb:
    sha256 = hashlib.sha256(f"{name} {version}".encode()).hexdigest()
    return LockedDeb(name=name, version=version, architecture="amd64", sha256=sha256, size=1)


def test_base_packages_stay_together_until_an_upgrade_or_until_others_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [deb("aa", "2"), deb("bb", "1")]

    class Suite:
        @classmethod
        def open(cls, *_: object) -> Suite:
            return cls()

        def resolve(self, packages: tuple[str, ...]) -> list[tuple[LockedDeb, str]]:
            return [(d, "") for d in now]

    monkeypatch.setattr(debian, "Apt", Suite)
    base = {"suite": "bookworm", "builder_image": IMAGE, "runtime": {"packages": ["aa"]}}
    manifest = a_manifest(base=base)
    before = Lock(
        schema_version=1,
        profile="trial",
        manifest="0" * 64,
        wheels={},
        debs={"runtime": (deb("aa", "1"), deb("bb", "1"))},
    )
    assert debian.packages(manifest, before, QUIET) == before.debs
    assert debian.packages(manifest, None, QUIET) == {"runtime": tuple(now)}
    now.append(deb("cc", "1"))
    assert debian.packages(manifest, before, QUIET) == {"runtime": tuple(now)}
    assert debian.packages(a_manifest(), before, QUIET) == {}


def locked(name: str, version: str, sha256: str = "0" * 64) -> LockedWheel:
    return LockedWheel(name=name, version=version, file=f"{name}.whl", sha256=sha256, size=1)


def a_lock(**sections: Any) -> Lock:
    return Lock.model_validate({"schema": 1, "profile": "trial", "manifest": "0" * 64, "wheels": {}, **sections})


def test_changes_are_named_for_people() -> None:
    before = a_lock(
        wheels={"runtime": (locked("stays", "1"), locked("goes", "1"), locked("moves", "1"), locked("same", "1"))},
        debs={"runtime": (deb("libc6", "1"),)},
        sources={"s": {"commit": "a" * 40, "tree": "b" * 40, "patched_tree": "c" * 40}},
    )
    after = a_lock(
        wheels={
            "runtime": (locked("stays", "1"), locked("moves", "2"), locked("same", "1", "1" * 64), locked("comes", "1"))
        },
        debs={"runtime": (deb("libc6", "2"),)},
        sources={"s": {"commit": "a" * 40, "tree": "b" * 40, "patched_tree": "d" * 40}},
    )
    assert [str(change) for change in diff(before, after)] == [
        "debs.runtime: libc6: 1 -> 2",
        "sources: s patched: cccccccccccc -> dddddddddddd",
        "wheels.runtime: comes: (new) -> 1",
        "wheels.runtime: goes: 1 -> (gone)",
        "wheels.runtime: moves: 1 -> 2",
        "wheels.runtime: same: 1 (000000000000) -> 1 (111111111111)",
    ]
    assert diff(after, after) == []
    assert len(diff(None, after)) == 7


def test_a_lock_is_written_and_read_again_and_held_to_its_manifest(index: Index) -> None:
    manifest = a_manifest(runtime={})
    with pytest.raises(UsageError, match="'trial' has no lock"):
        locks.load(manifest)
    assert locks.read("trial") is None
    lock = a_lock(manifest=manifest.resolving_sha256(), debs={"runtime": (deb("libc6", "1"),)})
    path = locks.save(lock)
    assert locks.load(manifest) == locks.read("trial") == lock
    assert path.read_text().startswith("# Made by `nox -s lock -- --profile trial`")
    first = path.read_bytes()
    locks.save(lock)
    assert path.read_bytes() == first
    with pytest.raises(UsageError, match="resolved from another state of the manifest 'trial'") as caught:
        locks.load(a_manifest(runtime={}, as_of=date(2026, 1, 1)))
    assert "nox -s lock" in (caught.value.hint or "")


@pytest.mark.parametrize("text", ["", "schema: 1\n", "schema: 1\nschema: 1\n", "{", "schema: 2\nprofile: trial\n"])
def test_a_lock_that_is_none_is_a_usage_error(index: Index, tmp_path: Path, text: str) -> None:
    (tmp_path / "build/manifests/trial.lock.yaml").write_text(text)
    with pytest.raises(UsageError):
        locks.load(a_manifest(runtime={}))
    with pytest.raises(UsageError):
        locks.read("trial")


def test_a_committed_lock_names_no_address_but_those_of_git_repositories() -> None:
    for path in manifests.manifests_folder().glob("*.lock.yaml"):
        lock = locks.read(path.name.removesuffix(".lock.yaml"))
        assert lock is not None
        for source in lock.sources.values():
            assert all(item.url.startswith("https://github.com/") for item in source.dependencies.values())
        without = {
            name: source.model_copy(update={"url": None, "dependencies": {}}) for name, source in lock.sources.items()
        }
        assert "://" not in lock.model_copy(update={"sources": without}).model_dump_json()


def test_the_lock_of_sm120_is_production_ready() -> None:
    lock = locks.load(manifests.load("sm120"))
    kernel = lock.sources["sgl-kernel"]
    assert kernel.commit == "6ffc74efd7d23627c0245efb61af7f62cde4a970"
    assert not [name for name, item in kernel.dependencies.items() if item.unlocked]
    assert {"repo-cutlass", "repo-flashinfer"} <= {name for name, item in kernel.dependencies.items() if item.taken}
    versions = {w.name: w.version for w in lock.wheels["runtime"]}
    assert (versions["torch"], versions["flashinfer-python"]) == ("2.11.0", "0.6.5")
    # both are built here, from one commit
    assert not {"sgl-kernel", "sglang"} & versions.keys()
    assert lock.sources["sglang"].commit == kernel.commit
    # only the tree of SGLang asks for these
    assert {"sgl-fa4", "smg-grpc-proto"} <= versions.keys()
    assert not [w.file for use in lock.wheels.values() for w in use if "cu12" in w.file]
