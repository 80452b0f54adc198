"""The recipe `sgl-kernel` and the script that runs in the builder; what only a compile shows is in docs/sgl-kernel.md."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from installer.sources import WheelFile
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from forge_build import compile as stage
from forge_build import manifest as manifests
from forge_build.__main__ import main
from forge_build.compile.recipe import Order
from forge_build.compile.sgl_kernel import SglKernel
from forge_build.compile.wheel import file_name
from forge_build.patch import Dependency, PatchedTree, read_series, series_folder
from forge_core.cli import project_root
from forge_core.errors import IntegrityError, UsageError

SCRIPT = project_root() / "build" / "inside" / "compile_sgl_kernel.py"
TOOLS = {"torch": "2.11.0+cu130", "nvcc": "13.0.88"}


@pytest.fixture
def inside(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    # the script finds the scheduler beside itself
    monkeypatch.syspath_prepend(SCRIPT.parent)
    spec = importlib.util.spec_from_file_location("inside_compile_sgl_kernel", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def order(tmp_path: Path, **changes: Any) -> Order:
    manifest = manifests.load("sm120")
    spec = manifest.wheels["sgl-kernel"].model_copy(update=changes.pop("spec", {}))
    dependencies = {}
    for name in changes.pop("dependencies", ("repo-cutlass", "repo-flashinfer")):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "LICENSE.txt").write_text(f"licence of {name}")
        dependencies[name] = Dependency(folder, changes.get("commit", "3") * 40)
    source = tmp_path / "source"
    source.mkdir(exist_ok=True)
    (source / "LICENSE").write_text("Apache")
    version = changes.pop("version", "0.3.21")
    tree = PatchedTree("sgl-kernel", version, source, "1" * 40, "2" * 40, "sm120", (), dependencies)
    return Order(changes.pop("name", "sgl-kernel"), spec, manifest, tree, changes.pop("subset", None))


def key(tmp_path: Path, **changes: Any) -> str:
    wanted = order(tmp_path, **changes)
    recipe = stage.RECIPES["sgl-kernel"]
    return stage.wheel_key(wanted, recipe, recipe.plan(wanted), "builder:1")


def test_the_whole_is_compiled_for_the_named_architectures_alone(tmp_path: Path) -> None:
    plan = SglKernel().plan(order(tmp_path))
    options = plan.arguments["options"]
    assert options["SGL_KERNEL_CUDA_ARCHS"] == "12.0a"
    assert plan.environment == {"TORCH_CUDA_ARCH_LIST": "12.0a"}
    assert "SGL_KERNEL_SUBSET" not in options
    assert options["SGL_KERNEL_ENABLE_FA3"] == "OFF"
    assert options["SGL_KERNEL_COMPILE_THREADS"] == "1"
    assert plan.arguments["dependencies"] == {
        "repo-cutlass": "/forge/dependencies/repo-cutlass",
        "repo-flashinfer": "/forge/dependencies/repo-flashinfer",
    }
    assert (plan.version, plan.tag) == ("0.3.21", "cp310-abi3-manylinux_2_36_x86_64")
    two = SglKernel().plan(order(tmp_path, spec={"architectures": ("12.0a", "10.0a")}))
    assert two.arguments["options"]["SGL_KERNEL_CUDA_ARCHS"] == "10.0a;12.0a"


def test_a_subset_is_labelled_and_still_what_sglang_asks_for(tmp_path: Path) -> None:
    plan = SglKernel().plan(order(tmp_path, subset="fp4"))
    assert plan.version == "0.3.21+sm120.subset.fp4"
    assert plan.arguments["options"]["SGL_KERNEL_SUBSET"] == "fp4"
    assert plan.units < SglKernel().plan(order(tmp_path)).units
    assert Version(plan.version) >= Version("0.3.21")
    name = file_name("sgl-kernel", plan.version, plan.tag)
    assert parse_wheel_filename(name)[1] == Version(plan.version)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"name": "my-kernels"}, r"wheels\.my-kernels: the recipe sgl-kernel makes sgl-kernel"),
        ({"subset": "fp5"}, "no subset 'fp5'"),
        ({"spec": {"modules": ("x",)}}, "has no modules"),
        ({"dependencies": ("repo-cutlass",)}, "comes without repo-flashinfer"),
        ({"subset": "fp4", "version": "0.3.21+own"}, "no room for a label"),
    ],
)
def test_what_the_recipe_cannot_do_is_said(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        SglKernel().plan(order(tmp_path, **changes))


def test_a_subset_is_a_deviation(tmp_path: Path) -> None:
    for subset, kinds in ((None, []), ("fp4", ["subset"])):
        wanted = order(tmp_path, subset=subset)
        found = stage._deviations(wanted, SglKernel().plan(wanted), "x.whl")
        assert [deviation.kind for deviation in found] == kinds


def test_a_subset_that_no_wheel_has_is_refused_before_anything_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build", "--profile", "sm120", "--subset", "fp5"]) == 2
    assert "sm120: no wheel has a subset 'fp5'" in capsys.readouterr().err
    assert main(["build", "--profile", "rehearsal", "--subset", "fp5"]) == 2
    assert "known: fp4" in capsys.readouterr().err


def test_a_subset_narrows_what_is_compiled_and_what_is_demanded(tmp_path: Path) -> None:
    whole, tree = manifests.load("sm120"), order(tmp_path).tree
    assert stage.narrowed(whole, None) is whole
    part = stage.narrowed(whole, "fp4")
    assert part.wheels["sgl-kernel"] == whole.wheels["sgl-kernel"]
    assert part.wheels["sglang"] == whole.wheels["sglang"]
    modules = part.wheels["flashinfer-jit-cache"]
    assert (modules.serves, modules.modules) == (None, ("fp4_gemm_cutlass_sm120", "fp4_quantization_120"))
    assert [demand.objects for demand in modules.check.instructions] == ["*/fp4_gemm_cutlass_sm120.so"]
    assert modules.check.demand == ("sm_120a",)
    taken = {name: stage._order(name, part, tree, "fp4")[0].subset for name in part.wheels}
    assert taken == {"sgl-kernel": "fp4", "sglang": None, "flashinfer-jit-cache": "fp4"}


def test_the_key_follows_subset_dependencies_and_architectures(tmp_path: Path) -> None:
    keys = [
        key(tmp_path),
        key(tmp_path, subset="fp4"),
        key(tmp_path, commit="4"),
        key(tmp_path, spec={"architectures": ("12.0a", "10.0a")}),
        key(tmp_path, dependencies=("repo-cutlass", "repo-flashinfer", "repo-fmt")),
    ]
    assert len(set(keys)) == len(keys)
    assert key(tmp_path) == keys[0]


def built(folder: Path, version: str = "0.3.21", *, library: str = "sgl_kernel/sm100/common_ops.abi3.so") -> Path:
    """A wheel as scikit-build-core leaves it."""
    info = f"sgl_kernel-{version}.dist-info"
    with zipfile.ZipFile(folder / "sgl_kernel.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("sgl_kernel/__init__.py", "import torch\n")
        archive.writestr(library, b"\x7fELF" * 100)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.2\nName: sgl-kernel\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Tag: cp310-abi3-linux_x86_64\n")
        archive.writestr(f"{info}/RECORD", "")
    return folder


@pytest.mark.parametrize("subset", [None, "fp4"])
def test_the_wheel_says_what_it_is(tmp_path: Path, subset: str | None) -> None:
    wanted = order(tmp_path, subset=subset)
    plan = SglKernel().plan(wanted)
    target = tmp_path / file_name("sgl-kernel", plan.version, plan.tag)
    SglKernel().pack(wanted, built(tmp_path, plan.version), TOOLS, target)
    with WheelFile.open(target) as source:
        source.validate_record()
        metadata = HeaderParser().parsestr(source.read_dist_info("METADATA"))
        assert f"Tag: {plan.tag}" in source.read_dist_info("WHEEL").splitlines()
    assert metadata["Version"] == plan.version
    assert metadata["Requires-Dist"] == "torch==2.11.*"
    assert ("part" in metadata["Summary"]) is (subset is not None)
    assert metadata.get_all("License-File") == ["LICENSE", "repo-cutlass/LICENSE.txt", "repo-flashinfer/LICENSE.txt"]
    with zipfile.ZipFile(target) as archive:
        assert archive.read("sgl_kernel/sm100/common_ops.abi3.so") == b"\x7fELF" * 100
        assert sum(name.endswith("/METADATA") for name in archive.namelist()) == 1


def test_a_wheel_of_another_version_or_without_the_library_is_not_packed(tmp_path: Path) -> None:
    wanted = order(tmp_path)
    with pytest.raises(IntegrityError, match=r"packed no version 0\.3\.21"):
        SglKernel().pack(wanted, built(tmp_path, "0.3.20"), TOOLS, tmp_path / "out.whl")
    with pytest.raises(IntegrityError, match="packed no sgl_kernel/sm100/common_ops"):
        SglKernel().pack(wanted, built(tmp_path, library="sgl_kernel/sm90/common_ops.abi3.so"), TOOLS, tmp_path / "o")


def package(folder: Path, version: str = "0.3.21") -> Path:
    (folder / "python" / "sgl_kernel").mkdir(parents=True)
    (folder / "python" / "sgl_kernel" / "version.py").write_text(f'__version__ = "{version}"\n')
    text = f'[project]\nname = "sgl-kernel"\nversion = "{version}"\n\n[tool.x]\nminimum-version = "1"\n'
    (folder / "pyproject.toml").write_text(text)
    return folder


def test_the_version_is_written_where_build_and_package_say_it(inside: ModuleType, tmp_path: Path) -> None:
    source = package(tmp_path)
    inside.name_version(source, "0.3.21+sm120.subset.fp4")
    text = (source / "pyproject.toml").read_text()
    assert 'version = "0.3.21+sm120.subset.fp4"' in text.splitlines()
    assert 'minimum-version = "1"' in text.splitlines()
    assert (source / "python/sgl_kernel/version.py").read_text() == '__version__ = "0.3.21+sm120.subset.fp4"\n'


def test_a_source_that_does_not_state_its_version_once_is_refused(
    inside: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = package(tmp_path)
    (source / "pyproject.toml").write_text('dynamic = ["version"]\n')
    with pytest.raises(SystemExit) as caught:
        inside.name_version(source, "1")
    assert caught.value.code == 3
    assert "pyproject.toml states its version 0 times" in capsys.readouterr().out


def test_the_tool_chain_gets_what_a_linker_wants(inside: ModuleType, tmp_path: Path) -> None:
    lib = tmp_path / "lib"
    lib.mkdir()
    for name in inside.LINKED.split():
        (lib / f"lib{name}.so.13").touch()
    inside.complete(tmp_path)
    inside.complete(tmp_path)
    assert (tmp_path / "lib64" / "libcublas.so").resolve() == (lib / "libcublas.so.13").resolve()
    program = tmp_path / "a.cpp"
    program.write_text("int main() { return 0; }\n")
    linked = [
        "c++",
        str(program),
        f"-L{tmp_path}/lib64/stubs",
        "-Wl,--no-as-needed",
        "-lcuda",
        "-o",
        str(tmp_path / "a"),
    ]
    subprocess.run(linked, check=True)
    assert b"libcuda.so.1\0" in (tmp_path / "a").read_bytes()


def test_a_tool_chain_without_a_library_is_refused(
    inside: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lib").mkdir()
    with pytest.raises(SystemExit):
        inside.complete(tmp_path)
    assert "exactly one libcublas.so.* is needed" in capsys.readouterr().out


def test_cmake_is_told_of_every_dependency_and_of_no_network(
    inside: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan: dict[str, Any] = {
        "dependencies": {"repo-cutlass": str(tmp_path)},
        "options": {"SGL_KERNEL_ENABLE_FA3": "OFF"},
    }
    found = inside.definitions(plan, tmp_path)
    assert found["FETCHCONTENT_SOURCE_DIR_REPO-CUTLASS"] == str(tmp_path)
    assert found["FETCHCONTENT_FULLY_DISCONNECTED"] == "ON"
    assert found["SGL_KERNEL_ENABLE_FA3"] == "OFF"
    plan["dependencies"]["repo-fmt"] = str(tmp_path / "nowhere")
    with pytest.raises(SystemExit):
        inside.definitions(plan, tmp_path)
    assert "the dependency repo-fmt is not at" in capsys.readouterr().out


def test_without_a_tool_chain_the_script_ends_with_3(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"source": str(tmp_path), "scheduler": {}}))
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(plan), str(tmp_path / "out")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 3
    assert "exactly one CUDA tool chain from wheels is needed" in done.stdout


def test_the_series_is_whole_and_for_the_version_of_the_manifest() -> None:
    known = manifests.load("sm120").sources["sgl-kernel"]
    assert known.git is not None
    folder = series_folder("sgl-kernel", known.series)
    assert folder is not None
    patches = read_series(folder)
    assert [patch.name for patch in patches] == sorted(path.name for path in folder.glob("*.patch"))
    assert all(patch.applies_to.contains(known.git.version) for patch in patches)
