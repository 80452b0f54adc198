from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import re
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forge_build import image
from forge_build import manifest as manifests
from forge_build.base import Base
from forge_build.fetch import Inputs
from forge_build.image import BuiltFile, contexts, grouped, recipe
from forge_build.lock import LockedWheel
from forge_build.manifest import Manifest
from forge_core.cli import project_root
from forge_core.console import Console
from forge_core.engine import Engine, buildx
from forge_core.errors import IntegrityError, UsageError
from forge_core.model import file_sha256
from forge_core.store import Store

ROOTFS = Base("runtime", "a" * 64, Path("rootfs.tar"), None)
REGISTRY = Base("runtime", f"sha256:{'b' * 64}", None, f"example.org/base@sha256:{'b' * 64}")


@pytest.fixture
def plan() -> Manifest:
    return manifests.load("rehearsal")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout of our own: Dockerfile and one stand-in, with dirt beside it."""
    (tmp_path / "Dockerfile.sm120").write_text(recipe.dockerfile().read_text())
    (tmp_path / "build" / "inside").mkdir(parents=True)
    for name, path in recipe.scripts().items():
        (tmp_path / "build" / "inside" / name).write_bytes(path.read_bytes())
    for name in ("sgl_kernel", "torchvision_ops", "cuda_runtime"):
        folder = tmp_path / "build" / "inside" / "stand_ins" / name
        (folder / "__pycache__").mkdir(parents=True)
        (folder / f"{name}.py").write_text("# a stand-in\n")
        (folder / "__pycache__" / f"{name}.pyc").write_bytes(os.urandom(8))
    monkeypatch.setenv("FORGE_ROOT", str(tmp_path))
    return tmp_path


def wheel(letter: str, name: str = "one") -> LockedWheel:
    return LockedWheel(name=name, version="1", file=f"{name}-1-py3-none-any.whl", sha256=letter * 64, size=1)


def engine(version: str = "28.5") -> Engine:
    return cast(Engine, SimpleNamespace(version=version))


def altered(plan: Manifest, **changes: Any) -> Manifest:
    return plan.model_copy(update={"image": plan.image.model_copy(update=changes)})


# -- what decides an image ---------------------------------------------------------------------------------------------


def runtime_key(plan: Manifest, **changes: Any) -> str:
    given: dict[str, Any] = {
        "base": ROOTFS,
        "locked": [wheel("1"), wheel("2", "two")],
        "built": [BuiltFile(Path("x"), "x.whl", "c" * 64)],
        "target": "runtime",
        "engine": engine(),
    }
    return image.key(plan, **given | changes)


def test_the_order_of_the_wheels_does_not_matter(plan: Manifest, root: Path) -> None:
    assert runtime_key(plan) == runtime_key(plan, locked=[wheel("2", "two"), wheel("1")])


@pytest.mark.parametrize(
    "changes",
    [
        {"base": Base("runtime", "d" * 64, Path("rootfs.tar"), None)},
        {"locked": [wheel("1")]},
        {"built": []},
        {"built": [BuiltFile(Path("x"), "x.whl", "d" * 64)]},
        {"engine": engine("29.0")},
    ],
)
def test_whatever_enters_changes_the_key(plan: Manifest, root: Path, changes: dict[str, Any]) -> None:
    assert runtime_key(plan, **changes) != runtime_key(plan)


@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        ({"environment": {"A": "1"}}, True),
        ({"title": "another"}, True),
        ({"stand_ins": ("sgl_kernel",)}, True),
        ({"cuda_home": "/usr/local/cuda"}, True),
        ({"start_period": 90}, True),
        ({"command": ("python",)}, True),
        ({"imports": ()}, False),
        ({"allowed_conflicts": ()}, False),
    ],
)
def test_what_only_the_check_reads_does_not_change_the_image(
    plan: Manifest, root: Path, changes: dict[str, Any], changed: bool
) -> None:
    assert (runtime_key(altered(plan, **changes)) != runtime_key(plan)) is changed


@pytest.mark.parametrize("changes", [{"epoch": 1795910401}, {"description": "another"}, {"profile": "other"}])
def test_what_the_config_tells_changes_the_key(plan: Manifest, root: Path, changes: dict[str, Any]) -> None:
    assert runtime_key(plan.model_copy(update=changes)) != runtime_key(plan)


def test_a_stand_ins_file_changes_the_key_and_dirt_does_not(plan: Manifest, root: Path) -> None:
    before = runtime_key(plan)
    folder = root / "build" / "inside" / "stand_ins" / "sgl_kernel"
    (folder / "__pycache__" / "sgl_kernel.pyc").write_bytes(b"other")
    assert runtime_key(plan) == before
    (folder / "sgl_kernel.py").write_text("# another\n")
    assert runtime_key(plan) != before


def test_each_target_knows_its_own_stages_alone(plan: Manifest, root: Path) -> None:
    def both() -> tuple[str, str]:
        return runtime_key(plan), runtime_key(plan, target="builder", built=())

    runtime, builder = both()
    text = (root / "Dockerfile.sm120").read_text()
    (root / "Dockerfile.sm120").write_text(text.replace("WORKDIR /forge", "WORKDIR /elsewhere"))
    assert both()[0] == runtime
    assert both()[1] != builder
    (root / "Dockerfile.sm120").write_text(text.replace("EXPOSE 30000", "EXPOSE 30001"))
    assert both()[0] != runtime
    assert both()[1] == builder
    (root / "Dockerfile.sm120").write_text(text + "# only a remark\n")
    assert both() == (runtime, builder)


def test_another_engine_makes_no_other_builder(plan: Manifest) -> None:
    """The compiled bytes come from the tool chain inside, whatever unpacked it."""
    tags = {image.builder_tag(plan, ROOTFS, [wheel("1")], engine(version)) for version in ("28.5", "29.0")}
    assert len(tags) == 1


# -- Dockerfile, ENV and labels ----------------------------------------------------------------------------------------


def test_what_buildkit_moves_is_shown_beside_its_instructions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forge_core.console._PLAIN_INTERVAL_S", 0)
    lines = {
        "#4 transferring wheels: 1.23GB 30.3s": "transferring wheels: 1.23GB",
        "#6 [runtime 2/8] RUN true": "1 of 8 instructions",
        "#9 exporting layers 105.9s done": "exporting layers",
        "#9 unpacking to example.org/x:1": "unpacking to",
        "#4 DONE 60.8s": "",
    }
    for line, shown in lines.items():
        with Console().step("image") as step:
            image._watch(step)(line)
        said = [text for text in capsys.readouterr().err.splitlines() if "==>" not in text and " done in " not in text]
        assert [shown in text for text in said] == ([True] if shown else []), said


def instructions() -> list[str]:
    text = recipe.dockerfile().read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return lines.replace("\\\n", " ").splitlines()


def test_the_dockerfile_reaches_for_nothing_outside() -> None:
    text = recipe.dockerfile().read_text(encoding="utf-8")
    assert not re.search(r"^#\s*(syntax|escape)\s*=", text, re.MULTILINE), "would fetch a frontend from a registry"
    installs = [line for line in instructions() if "pip" in line and " install " in line]
    assert len(installs) == 5
    for line in installs:
        assert {"--no-index", "--no-deps", "--require-hashes", "--no-compile"} <= set(line.split())
    assert not any(line.startswith("COPY") for line in instructions()), (
        "contexts are mounted, so no copy stays in a layer"
    )


def test_the_runtime_stage_ends_as_the_user_the_check_expects() -> None:
    users = [line.split()[1] for line in instructions() if line.startswith("USER ")]
    assert users == [recipe.USER]
    assert "0" not in recipe.USER.split(":")


def test_labels_say_what_is_true_for_every_builder(plan: Manifest) -> None:
    found = image.labels(plan)
    assert found["org.opencontainers.image.created"] == "2026-11-29T00:00:00Z"
    assert found["org.opencontainers.image.title"] == plan.image.title
    assert not {f"org.opencontainers.image.{name}" for name in ("revision", "licenses", "source")} & found.keys()
    assert found["io.sm120-forge.source.flashinfer"] == "flashinfer-python==0.6.5"
    assert str(project_root()) not in json.dumps(found)


def test_labels_name_the_repository_that_is_compiled() -> None:
    found = image.labels(manifests.load("sm120"))
    source = manifests.load("sm120").sources["sgl-kernel"].git
    assert source is not None
    assert found["org.opencontainers.image.source"] == source.url
    assert found["org.opencontainers.image.revision"] == found["io.sm120-forge.source.sgl-kernel"] == source.commit


def test_every_wheel_is_in_one_group_and_large_layers_come_first() -> None:
    names = ("torch", "nvidia-cublas", "pip", "sglang", "cuda-python", "triton", "flashinfer-cubin", "torchcodec")
    found = grouped([wheel("1", name) for name in names])
    assert list(found) == ["vendor", "torch", "wheels"]
    assert {group: [w.name for w in wheels] for group, wheels in found.items()} == {
        "vendor": ["nvidia-cublas", "pip", "cuda-python"],
        "torch": ["torch", "triton", "flashinfer-cubin"],
        "wheels": ["sglang", "torchcodec"],
    }
    mounted = re.findall(r"--mount=type=bind,from=(\w+),target=/wheels", "\n".join(instructions()))
    assert mounted == ["wheels", "vendor", "torch", "wheels"], "the builder's, then each group's"


def test_a_tool_chain_comes_with_its_variables(plan: Manifest) -> None:
    assert recipe.environment(plan) == plan.image.environment
    found = recipe.environment(altered(plan, cuda_home="/opt/cuda", environment={"A": "1"}))
    assert found == {
        "A": "1",
        "CUDA_HOME": "/opt/cuda",
        "PATH": f"/opt/cuda/bin:{recipe.PATH}",
        "TRITON_PTXAS_PATH": "/opt/cuda/bin/ptxas",
        "TRITON_PTXAS_BLACKWELL_PATH": "/opt/cuda/bin/ptxas",
    }
    assert f"ENV PATH={recipe.PATH}" in instructions()


def test_health_check_and_entry_point_are_the_manifests(plan: Manifest, tmp_path: Path) -> None:
    path = recipe.with_manifest(altered(plan, start_period=77, command=("a", 'b "c"')), ROOTFS, tmp_path)
    lines = path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    (health,) = (line for line in lines if line.startswith("HEALTHCHECK"))
    assert "--start-period=77s" in health
    assert json.loads(health.partition(" CMD ")[2]) == list(recipe.HEALTH)
    (entry,) = (line for line in lines if line.startswith("ENTRYPOINT"))
    assert json.loads(entry.removeprefix("ENTRYPOINT ")) == ["tini", "-s", "--", "a", 'b "c"']


def test_a_base_is_called_an_image_only_when_it_is_one(plan: Manifest) -> None:
    own, named = recipe.base_labels(plan, ROOTFS), recipe.base_labels(plan, REGISTRY)
    assert own == {"io.sm120-forge.base.suite": "bookworm", "io.sm120-forge.base.rootfs": f"sha256:{'a' * 64}"}
    assert named["org.opencontainers.image.base.digest"] == f"sha256:{'b' * 64}"
    assert named["org.opencontainers.image.base.name"].startswith("example.org/base@")


def test_values_come_through_a_dockerfile_unchanged(plan: Manifest, tmp_path: Path) -> None:
    value = 'a "quoted" $PATH \\ back\\n ünïcode'
    path = recipe.with_manifest(altered(plan, environment={"A": value}), ROOTFS, tmp_path)
    (line,) = (line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("ENV A="))
    quoted = line.removeprefix("ENV A=")
    # Dockerfile's own rule: inside double quotes a backslash guards a quote, a dollar and itself
    assert re.sub(r'\\(["\\$])', r"\1", quoted[1:-1]) == value
    assert not re.search(r'(?<!\\)(?:\\\\)*[$"]', quoted[1:-1])


@pytest.mark.parametrize("environment", [{"A": "two\nlines"}, {"A": "bell\x07"}, {"A B": "x"}, {"1A": "x"}, {"": "x"}])
def test_what_a_dockerfile_cannot_say_is_refused(plan: Manifest, tmp_path: Path, environment: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"image\.environment"):
        recipe.with_manifest(altered(plan, environment=environment), ROOTFS, tmp_path)


def test_a_stand_in_without_files_is_a_mistake(plan: Manifest, root: Path) -> None:
    for path in (root / "build" / "inside" / "stand_ins" / "cuda_runtime").glob("*.py"):
        path.unlink()
    with pytest.raises(UsageError, match="cuda_runtime holds nothing"):
        recipe.stand_ins(plan)


# -- what BuildKit is shown --------------------------------------------------------------------------------------------


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inputs:
    monkeypatch.setenv("FORGE_STORE", str(tmp_path / "store"))
    return Inputs(Store.open(), {}, {}, ())


def test_the_contexts_hold_what_is_named_and_nothing_else(
    plan: Manifest, root: Path, inputs: Inputs, tmp_path: Path
) -> None:
    for name in ("rootfs", "locked", "mine", "not asked for"):
        (tmp_path / name).write_text(name)
    sha256 = inputs.store.add_file(tmp_path / "locked")
    inputs.store.add_file(tmp_path / "not asked for")
    one = wheel("0").model_copy(update={"sha256": sha256})
    own = BuiltFile(tmp_path / "mine", "mine-1-py3-none-any.whl", file_sha256(tmp_path / "mine"))
    base = Base("runtime", "a" * 64, tmp_path / "rootfs", None)
    locked = {"vendor": [], "wheels": [one]}
    with contexts(inputs, base, locked, [own], recipe.stand_ins(plan), recipe.scripts()) as (main, named):
        folders = {"main": main} | {name: Path(place) for name, place in named.items()}
        found = {
            name: sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
            for name, folder in folders.items()
        }
        assert found == {
            "main": ["rootfs.tar"],
            "vendor": ["requirements.txt"],
            "wheels": ["one-1-py3-none-any.whl", "requirements.txt"],
            "built": ["mine-1-py3-none-any.whl", "requirements.txt"],
            "inside": [
                "healthy.py",
                "link_cuda.py",
                *(f"stand_ins/{name}/{name}.py" for name in ("cuda_runtime", "sgl_kernel", "torchvision_ops")),
            ],
        }
        wheels = (folders["wheels"] / "requirements.txt").read_text()
        assert wheels == f"one==1 --hash=sha256:{sha256}\n"
        made = (folders["built"] / "requirements.txt").read_text()
        assert made == f"./mine-1-py3-none-any.whl --hash=sha256:{own.sha256}\n"
    assert list((inputs.store.root / "partial").iterdir()) == []


# -- the archive -------------------------------------------------------------------------------------------------------


def write_archive(path: Path, *, manifests: int = 1, config: bytes = b"{}", stored: bytes | None = None) -> str:
    """An OCI archive as BuildKit writes them; returns the manifest's digest. `stored`: other bytes than the digest names."""

    def digest(data: bytes) -> str:
        return f"sha256:{hashlib.sha256(data).hexdigest()}"

    manifest = json.dumps(
        {"config": {"digest": digest(config), "size": len(config)}, "layers": [{"size": 30}, {"size": 12}]}
    ).encode()
    index = json.dumps({"manifests": [{"digest": digest(manifest)}] * manifests}).encode()
    blobs = {digest(manifest): manifest, digest(config): config if stored is None else stored}
    members = {"index.json": index} | {f"blobs/sha256/{d.removeprefix('sha256:')}": b for d, b in blobs.items()}
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return digest(manifest)


def test_an_archive_tells_digest_and_sizes(tmp_path: Path) -> None:
    digest = write_archive(tmp_path / "a.tar")
    found = image.read_archive(tmp_path / "a.tar")
    assert (found.digest, found.size, found.layers) == (digest, 44, (30, 12))
    assert found.steps == ("", "")
    assert found.config_digest == f"sha256:{hashlib.sha256(b'{}').hexdigest()}"


def test_an_archive_tells_what_made_each_layer(tmp_path: Path) -> None:
    steps = [{"created_by": "ADD"}, {"created_by": "ENV", "empty_layer": True}, {"created_by": "RUN"}]
    write_archive(tmp_path / "a.tar", config=json.dumps({"history": steps}).encode())
    assert image.read_archive(tmp_path / "a.tar").steps == ("ADD", "RUN")
    write_archive(tmp_path / "a.tar", config=json.dumps({"history": steps[:1]}).encode())
    assert image.read_archive(tmp_path / "a.tar").steps == ("", "")


def test_an_archive_that_is_not_what_it_says_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write_archive(path, stored=b"[]")
    with pytest.raises(IntegrityError, match="has other bytes"):
        image.read_archive(path)
    write_archive(path, manifests=2)
    with pytest.raises(IntegrityError, match="no OCI archive of one image"):
        image.read_archive(path)
    path.write_bytes(b"\0" * 100)
    with pytest.raises(IntegrityError, match="no OCI archive"):
        image.read_archive(path)
    write_archive(path)
    path.write_bytes(path.read_bytes()[:700])
    with pytest.raises(IntegrityError, match="no OCI archive"):
        image.read_archive(path)


@pytest.mark.parametrize("lie", ["", "containerimage.digest", "containerimage.config.digest"])
def test_the_archive_must_be_the_image_that_was_reported(
    plan: Manifest, root: Path, inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    asked: dict[str, Any] = {}

    def build(engine: Engine, *, output: str, **given: Any) -> buildx.BuildResult:
        asked.update(given, output=output, dockerfile_text=given["dockerfile"].read_text())
        digest = write_archive(tmp_path / "image.tar")
        metadata = {
            "containerimage.digest": digest,
            "containerimage.config.digest": f"sha256:{hashlib.sha256(b'{}').hexdigest()}",
        }
        return buildx.BuildResult(metadata | ({lie: f"sha256:{'0' * 64}"} if lie else {}))

    monkeypatch.setattr(buildx, "build", build)

    def make() -> image.Image:
        return image.build(
            plan,
            inputs,
            REGISTRY,
            [],
            [],
            engine(),
            tmp_path / "image.tar",
            log=tmp_path / "log",
            console=Console(),
            no_cache=True,
        )

    if lie:
        with pytest.raises(IntegrityError, match="BuildKit reports"):
            make()
        return
    assert make().size == 44
    assert asked["target"] == "final"
    assert asked["no_cache"] is True
    assert asked["epoch"] == plan.epoch
    assert "rewrite-timestamp=true" in asked["output"]
    (fields,) = csv.reader([asked["output"]])
    assert f"annotation.org.opencontainers.image.title={plan.image.title}" in fields
    assert asked["args"] == {
        "BASE": REGISTRY.image,
        "CUDA_HOME": "",
        "STAND_INS": "cuda_runtime sgl_kernel torchvision_ops",
    }
    assert 'ENV HF_HUB_OFFLINE="1"' in asked["dockerfile_text"]
