"""Packages shaped like sgl-kernel fail without each patch in the way it names, and build with the series: real nvcc, three CMakes.

Needs an engine and the locked inputs of the rehearsal, whose builder has nvcc. The CMakes are wheels of `requirements/cmake`, from
wherever the user's uv looks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import sgl_kernel_factory as shape
import uv
from wheel_factory import shared_object

from forge_build import base, compile, image, patch, steps, wheel_check
from forge_build import lock as locks
from forge_build import manifest as manifests
from forge_build.compile import sgl_kernel
from forge_build.compile.container import builder, copy_in, follow
from forge_build.fetch import fetch
from forge_build.lock import git
from forge_build.manifest import BuiltWheel, CompileCheck, Source
from forge_core.cli import project_root
from forge_core.console import Console
from forge_core.engine import Engine, install
from forge_core.errors import Refused
from forge_core.store import Store

NAME = "sgl-kernel"
OLDEST, MIDDLE, NEWEST = "3.28.4", "3.31.1", "4.1.3"
SITE = "/opt/builder/lib/python3.11/site-packages"
CUDA = f"{SITE}/nvidia/cu13"
PATCHES = [found.name for found in patch.read_series(shape.SERIES)]
WHEEL = BuiltWheel(
    source=NAME,
    recipe="sgl-kernel",
    architectures=("12.0a",),
    check=CompileCheck(
        demand=("sm_120a",),
        allow=("sm_120a",),
        needed=("libc10.so", "libtorch.so", "libtorch_cpu.so", "libcublas.so.13", "libcublasLt.so.13", "libcuda.so.1"),
    ),
)


@dataclass(frozen=True)
class Line:
    """The line up to the builder image."""

    manifest: manifests.Manifest
    environment: list[Path]
    engine: Engine
    builder: str


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Line:
    console, logs = Console(), tmp_path_factory.mktemp("logs")
    manifest = manifests.load("rehearsal")
    # its builder is all that is needed here
    whole = locks.load(manifest)
    use = {"builder": whole.wheels["builder"]}
    lock = whole.model_copy(update={"wheels": use, "debs": {"builder": whole.debs["builder"]}, "sources": {}})
    engine = install.ensure(console)
    store = Store.open()
    inputs = fetch(manifest, lock, store, offline=False, console=console)
    root = base.build("builder", manifest, inputs, log=logs / "base.log", console=console)
    tag = image.builder(
        manifest, inputs, root, use["builder"], engine, store, log=logs / "builder.log", console=console
    )
    manifest = manifest.model_copy(update={"sources": {}, "wheels": {NAME: WHEEL}})
    return Line(manifest, [inputs.path(wheel.sha256) for wheel in use["builder"]], engine, tag)


@pytest.fixture(scope="module")
def builders(line: Line, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """The builder image with a CMake of a version, by its tag."""
    folder, made = tmp_path_factory.mktemp("cmake"), dict[str, str]()
    # What CMake's modules look for beside what the rehearsal has; nothing calls into them.
    others = {
        f"{CUDA}/lib/lib{name}": shared_object(folder / "lib", f"lib{name}", "", f"-Wl,-soname,lib{name}")
        for name in ("cufft.so.12", "cusolver.so.12", "cusparse.so.12", "nvrtc.so.13")
    }

    def get(version: str) -> str:
        if version not in made:
            target = folder / version
            options = ["--target", target, "--no-deps", "--require-hashes", "--python-version", "3.11", "--quiet"]
            file = project_root() / "requirements" / "cmake" / f"{version}.txt"
            subprocess.run([uv.find_uv_bin(), "pip", "install", *options, "-r", file], check=True)
            shutil.rmtree(target / "bin")
            link = folder / f"cmake-{version}"
            link.symlink_to(f"{SITE}/cmake/data/bin/cmake")
            container = line.engine.client.containers.create(line.builder, ["true"], network_mode="none")
            try:
                files = {SITE: target, "/opt/builder/bin/cmake": link, **others}
                copy_in(container, files, epoch=line.manifest.epoch)
                tag = f"{version}-{os.getpid()}"
                container.commit(repository="sm120-forge/shapes", tag=tag)
                made[version] = f"sm120-forge/shapes:{tag}"
            finally:
                container.remove(force=True)
        return made[version]

    yield get
    for tag in made.values():
        line.engine.client.images.remove(tag, force=True)


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> shape.Repositories:
    return shape.Repositories(tmp_path_factory.mktemp("origins"))


Make = Callable[..., compile.Wheel]


@pytest.fixture
def make(
    line: Line,
    builders: Callable[[str], str],
    repositories: shape.Repositories,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Make:
    """Compile the package with some of the patches, by a CMake of a version, in a store of its own."""

    def run(cmake: str, patches: list[str], **changed: str) -> compile.Wheel:
        series = tmp_path / "series"
        shape.write({name: (shape.SERIES / name).read_text() for name in patches}, series)
        (series / "series").write_text("".join(f"{name}\n" for name in patches))
        folder = shape.write(repositories.files | changed, tmp_path / "package")
        tree = patch.apply(NAME, shape.VERSION, folder, series)
        given = repositories.trees(tmp_path / "dependencies")
        return compiled(
            cmake, tree, {name: patch.Dependency(path, patch.tree_of(path)) for name, path in given.items()}
        )

    def compiled(cmake: str, tree: patch.PatchedTree, given: dict[str, patch.Dependency]) -> compile.Wheel:
        return compile.compile_wheel(
            NAME,
            line.manifest,
            replace(tree, dependencies=given),
            builders(cmake),
            line.engine,
            Store.open(),
            log=tmp_path / "compile.log",
            console=Console(),
        )

    monkeypatch.setenv("FORGE_STORE", str(tmp_path / "store"))
    return run


def without(word: str, *, alone: bool) -> list[str]:
    """The series without the patch whose name has the word; where later ones are written on top of it, without them too."""
    (found,) = (name for name in PATCHES if word in name)
    return [name for name in PATCHES if name != found] if alone else PATCHES[: PATCHES.index(found)]


def checked(line: Line, wheel: compile.Wheel, tmp_path: Path) -> wheel_check.WheelReport:
    path = tmp_path / wheel.file
    shutil.copyfile(wheel.path, path)
    return wheel_check.check(
        path,
        WHEEL.check,
        epoch=line.manifest.epoch,
        environment=line.environment,
        platform=line.manifest.target.platform,
    )


def imported(line: Line, wheel: compile.Wheel, tmp_path: Path, code: str) -> list[str]:
    """What a program says that has the wheel, a torch that claims CUDA 13, and a driver that can do nothing."""
    driver = shared_object(tmp_path / "driver", "libcuda.so.1", "", "-Wl,-soname,libcuda.so.1")
    site = patch.unpack_wheel(wheel.path, tmp_path / "site")
    code = f'import torch\ntorch.version.cuda = "13.0"\n{code}'
    env = {"PYTHONPATH": "/forge/site", "LD_LIBRARY_PATH": f"/forge/driver:{CUDA}/lib"}
    said: list[str] = []
    with builder(line.engine, line.builder, ["python3", "/forge/code.py"], env, name=NAME, keep=False) as container:
        files: dict[str, Path | bytes] = {
            "/forge/site": site,
            "/forge/driver/libcuda.so.1": driver,
            "/forge/code.py": code.encode(),
        }
        copy_in(container, files, epoch=line.manifest.epoch)
        follow(container, tmp_path / "import.log", said.append)
    return said


PLAIN = {"csrc/memory/weak_ref_tensor.cpp": "int weak() { return 2; }\n"}
"""A package whose only unit that wants CCCL of the host compiler is MSCCL++'s."""


@pytest.mark.parametrize(
    ("patches", "cmake", "options", "changed", "told"),
    [
        pytest.param(
            without("cmake-policies", alone=True),
            OLDEST,
            {},
            {},
            'Policy "CMP0169" is not known to this version of CMake',
            id="policies",
        ),
        pytest.param(
            without("make-optional", alone=False),
            NEWEST,
            {},
            {},
            "Compatibility with CMake < 3.5 has been removed from CMake",
            id="old-dependency",
        ),
        pytest.param(
            without("find-cccl", alone=True),
            OLDEST,
            {},
            {},
            "fatal error: cuda/std/utility: No such file or directory",
            id="cccl-3.28",
        ),
        pytest.param(
            without("find-cccl", alone=True),
            MIDDLE,
            {"SGL_KERNEL_ENABLE_MSCCLPP": "ON"},
            PLAIN,
            "fatal error: cuda/atomic: No such file or directory",
            id="cccl-3.31.1",
        ),
    ],
)
def test_without_the_patch_it_does_not_build(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    patches: list[str],
    cmake: str,
    options: dict[str, str],
    changed: dict[str, str],
    told: str,
) -> None:
    for name, value in options.items():
        monkeypatch.setitem(sgl_kernel._OPTIONS, name, value)
    with pytest.raises(Refused) as caught:
        make(cmake, patches, **changed)
    assert caught.value.log is not None
    log = " ".join(caught.value.log.read_text().split())
    assert told in log
    assert told in " ".join(" ".join(caught.value.details).split()), "the way it fails is what the user is shown"


def test_without_their_patches_fa3_is_compiled_though_it_is_off_and_all_else_for_seven_architectures(
    line: Line, make: Make, tmp_path: Path
) -> None:
    report = checked(line, make(MIDDLE, without("honour-fa3", alone=False)), tmp_path)
    cubins = {item.path.removeprefix("sgl_kernel/").split(".")[0]: set(item.cubins) for item in report.objects}
    assert cubins["flash_ops"] == {"sm_90a"}
    every = {"sm_80", "sm_89", "sm_90", "sm_90a", "sm_100a", "sm_103a", "sm_120a"}
    assert cubins["sm90/common_ops"] == cubins["sm100/common_ops"] == cubins["spatial_ops"] == every
    foreign = {Path(f.where).name.split(".")[0] for f in report.findings if f.kind == "foreign-architecture"}
    assert foreign == {"common_ops", "flash_ops", "spatial_ops"}


def test_with_their_patches_fa3_is_off_and_one_architecture_is_compiled(line: Line, make: Make, tmp_path: Path) -> None:
    report = checked(line, make(MIDDLE, without("hopper-copy", alone=False)), tmp_path)
    cubins = {item.path.removeprefix("sgl_kernel/").split(".")[0]: set(item.cubins) for item in report.objects}
    assert "flash_ops" not in cubins
    assert cubins["sm90/common_ops"] == cubins["sm100/common_ops"] == cubins["spatial_ops"] == {"sm_120a"}


# NotImplementedError is what the patch raises where FA3 is lacking: the test asserts its words.
FLASH = """
import sgl_kernel.flash_attn as flash
print("IMPORTED", flash.is_fa3_supported())
try:
    flash.flash_attn_varlen_func(torch.zeros(1), None, None)
except NotImplementedError as error:
    print("SAYS", error)
"""


def test_without_its_patch_flash_attn_does_not_import(line: Line, make: Make, tmp_path: Path) -> None:
    wheel = make(MIDDLE, without("what-fa3-lacks", alone=True))
    said = imported(line, wheel, tmp_path, FLASH)
    assert said[-1] == "ImportError: Can not import FA3 in sgl_kernel. Please check your installation."


@pytest.mark.parametrize(
    ("cmake", "mscclpp"), [(OLDEST, "OFF"), (MIDDLE, "ON"), (NEWEST, "OFF")], ids=lambda value: str(value).lower()
)
def test_with_the_series_it_builds_from_git_to_a_checked_wheel_that_imports(
    line: Line,
    builders: Callable[[str], str],
    repositories: shape.Repositories,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cmake: str,
    mscclpp: str,
) -> None:
    monkeypatch.setenv("FORGE_STORE", str(tmp_path / "store"))
    monkeypatch.setitem(sgl_kernel._OPTIONS, "SGL_KERNEL_ENABLE_MSCCLPP", mscclpp)
    manifest = line.manifest.model_copy(update={"sources": {NAME: source(repositories)}})
    console, store = Console(), Store.open()
    with console.step("resolve") as step:
        locked = git.lock(NAME, manifest.sources[NAME], None, store, (), step)
    lock = locks.Lock(schema=1, profile="shape", manifest="0" * 64, wheels={}, sources={NAME: locked})
    inputs = fetch(manifest, lock, store, offline=False, console=console)
    tree = steps.patch_sources(manifest, lock, inputs, tmp_path / "scratch", console)[NAME]
    assert sorted(tree.dependencies) == sorted(shape.OWN)
    if mscclpp == "ON":
        path = repositories.trees(tmp_path / "more")["repo-mscclpp"]
        given = {**tree.dependencies, "repo-mscclpp": patch.Dependency(path, patch.tree_of(path))}
        tree = replace(tree, dependencies=given)
    log = tmp_path / "compile.log"
    wheel = compile.compile_wheel(NAME, manifest, tree, builders(cmake), line.engine, store, log=log, console=console)
    assert wheel.tools["cmake"] == cmake
    assert wheel.tools["nvcc"] == "13.0.88"

    report = checked(line, wheel, tmp_path)
    wheel_check.raise_for(report)
    libraries = {Path(item.path).name.split(".")[0]: set(item.cubins) for item in report.objects}
    assert libraries == {"common_ops": {"sm_120a"}, "spatial_ops": {"sm_120a"}}
    operators = "import sgl_kernel\nprint('OPERATORS', *sgl_kernel.common_ops.operators)\n"
    said = imported(line, wheel, tmp_path, operators + FLASH)
    registered = next(row for row in said if row.startswith("OPERATORS")).split()
    assert "cutlass_scaled_fp4_mm" in registered
    assert ("mscclpp_allreduce" in registered) is (mscclpp == "ON")
    assert "varlen_fwd_sparse" not in registered
    assert "IMPORTED False" in said
    assert any(row.startswith("SAYS sgl_kernel.flash_attn: this sgl_kernel is built without FA3") for row in said), said


def source(repositories: shape.Repositories) -> Source:
    """The package as a manifest names it: two repositories are needed, the series drops the others."""
    declared = repositories.declared()
    dependencies: dict[str, dict[str, Any]] = {
        name: {"url": repositories.origins[name].url, **({"commit": tag} if len(tag) == 40 else {"tag": tag})}
        for name, tag in declared.items()
    }
    for name in declared.keys() - set(shape.OWN):
        dependencies[name] |= {"needed": False, "reason": "the series drops it"}
    return Source(
        git=repositories.source.source(repositories.commit, NAME, dependencies=dependencies).model_copy(
            update={"version": shape.VERSION}
        ),
        series=shape.SERIES.name,
    )
