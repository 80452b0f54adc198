from __future__ import annotations

import zipfile
from email.parser import HeaderParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import docker.errors
import pytest
from installer.sources import WheelFile
from packaging.utils import parse_wheel_filename

from forge_build import compile as stage
from forge_build import manifest as manifests
from forge_build.compile.container import builder
from forge_build.compile.progress import Progress
from forge_build.compile.recipe import Order
from forge_build.compile.units import units
from forge_build.compile.wheel import file_name, write_wheel
from forge_build.patch import PatchedTree
from forge_core.engine import Engine
from forge_core.errors import EnvironmentFailure, UsageError

TAG = "py3-none-manylinux_2_36_x86_64"


def fed(text: str) -> Progress:
    progress = Progress()
    for line in text.splitlines():
        progress.feed(line)
    return progress


def test_units_are_counted() -> None:
    progress = fed("forge: generated m, 2 units\n[1/3] c++ a.cpp\nwarning: [9/9] not ninja's\n[2/3] nvcc b.cu\n")
    assert (progress.done, progress.total) == (2, 3)
    assert progress.errors == []


def test_a_configuration_that_fails_says_why() -> None:
    progress = fed(
        "-- Found Python: /opt/python3\nCMake Warning at a.cmake:1 (message):\n  not found.\n\n"
        'CMake Error at CMakeLists.txt:9 (cmake_policy):\n  Policy "CMP0169" is not known to this version of CMake.\n\n\n'
        "-- Configuring incomplete, errors occurred!\n\n*** CMake configuration failed\n"
    )
    assert progress.failed is None
    assert progress.errors[:2] == [
        "CMake Error at CMakeLists.txt:9 (cmake_policy):",
        '  Policy "CMP0169" is not known to this version of CMake.',
    ]


@pytest.mark.parametrize(
    "error",
    [
        "/forge/src/a.cpp:65:15: error: expected primary-expression before 'return'",
        "/forge/src/a.cpp:3:10: fatal error: cuda/atomic: No such file or directory",
        '/forge/src/b.cu(12): error: identifier "x" is undefined',
        '/forge/src/b.cu(12): error #20: identifier "x" is undefined',
        "nvcc fatal   : Unsupported gpu architecture 'compute_999a'",
        "ptxas fatal   : Unresolved extern function 'f'",
        "ptxas /tmp/x.ptx, line 5; error   : Feature 'y' not supported on .target 'sm_80'",
        "/usr/bin/ld: cannot find -lcudart: No such file or directory",
        "a.cpp:(.text+0x5): undefined reference to `f()'",
    ],
)
def test_the_first_error_of_the_failed_unit_is_kept(error: str) -> None:
    progress = fed(
        f"[1/3] c++ ok.cpp\nok.cpp:1:1: note: an error: that was none\n"
        f"FAILED: [code=1] /forge/workspace/x/thing.cuda.o \nc++ -Werror -o thing.cuda.o\nIn file included from z\n"
        f"{error}\n   65 | int broken\n      | ^~~\ncollect2: error: ld returned 1 exit status\n"
        "ninja: build stopped: subcommand failed.\nforge: Ninja build failed.\n"
    )
    assert progress.failed == "thing.cuda.o"
    assert progress.errors[0] == error
    assert not any(line.startswith(("ninja:", "forge:")) for line in progress.errors)
    assert progress.killed is None


@pytest.mark.parametrize(
    "line",
    [
        "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
        "c++: fatal error: Killed signal terminated program cc1plus",
        "virtual memory exhausted: Cannot allocate memory",
        "Killed",
    ],
)
def test_a_killed_compiler_is_noticed(line: str) -> None:
    assert fed(f"[1/3] nvcc a.cu\nFAILED: a.o\n{line}\n").killed == line


def test_a_full_disk_is_noticed() -> None:
    assert fed("FAILED: a.o\n/tmp/x.s: fatal error: error writing: No space left on device\n").disk_full


def test_the_units_of_the_rehearsal_are_known() -> None:
    found = units("flashinfer-jit", ("fp4_quantization_120",), "wheels.x.modules")
    assert found["fp4_quantization_120"].units == 7


def test_unknown_modules_are_all_named() -> None:
    with pytest.raises(UsageError) as caught:
        units("flashinfer-jit", ("fp4_quantization_120", "fp4_magic", "fp4_wonder"), "wheels.x.modules")
    assert "wheels.x.modules" in caught.value.message
    assert "'fp4_magic', 'fp4_wonder'" in caught.value.message
    assert "fp4_quantization_120" in (caught.value.hint or "")
    with pytest.raises(UsageError, match="no module is named"):
        units("flashinfer-jit", (), "wheels.x.modules")


def write(target: Path, members: dict[str, bytes]) -> Path:
    write_wheel(
        target,
        name="flashinfer-jit-cache",
        version="0.6.5",
        tag=TAG,
        members=members,
        fields=[("Summary", "modules"), ("Requires-Dist", "flashinfer-python==0.6.5")],
        description="Compiled.",
        licenses={"LICENSE": b"Apache", "third, party/NOTICE": b"others"},
        epoch=1795910400,
    )
    return target


MEMBERS = {"pkg/b.so": b"\x7fELF" * 1000, "pkg/__init__.py": b"# x\n", "a,b.txt": b"comma"}


def test_a_wheel_is_whole_and_says_so(tmp_path: Path) -> None:
    name = file_name("flashinfer-jit-cache", "0.6.5", TAG)
    assert str(parse_wheel_filename(name)[0]) == "flashinfer-jit-cache"
    path = write(tmp_path / name, MEMBERS)
    with WheelFile.open(path) as source:
        source.validate_record()
        metadata = HeaderParser().parsestr(source.read_dist_info("METADATA"))
        assert (metadata["Name"], metadata["Version"]) == ("flashinfer-jit-cache", "0.6.5")
        assert metadata.get_all("License-File") == ["LICENSE", "third, party/NOTICE"]
        assert f"Tag: {TAG}" in source.read_dist_info("WHEEL").splitlines()
    with zipfile.ZipFile(path) as archive:
        assert {m.date_time for m in archive.infolist()} == {(2026, 11, 29, 0, 0, 0)}
        assert {m.external_attr >> 16 for m in archive.infolist()} == {0o100644}
        assert archive.namelist()[-1].endswith(".dist-info/RECORD")
        assert archive.read("pkg/b.so") == MEMBERS["pkg/b.so"]


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    one = write(tmp_path / "one", MEMBERS)
    two = write(tmp_path / "two", dict(reversed(MEMBERS.items())))
    three = write(tmp_path / "three", MEMBERS | {"a,b.txt": b"commA"})
    assert one.read_bytes() == two.read_bytes() != three.read_bytes()


def order(tmp_path: Path, **changes: Any) -> Order:
    manifest = manifests.load("rehearsal")
    spec = manifest.wheels["flashinfer-jit-cache"].model_copy(update=changes.pop("spec", {}))
    tree = PatchedTree("flashinfer", "0.6.5", tmp_path, "1" * 40, changes.pop("patched", "2" * 40), "fixes", ())
    return Order(changes.pop("name", "flashinfer-jit-cache"), spec, manifest, tree)


def key(tmp_path: Path, image: str = "builder:1", **changes: Any) -> str:
    recipe = stage.RECIPES["flashinfer-jit"]
    wanted = order(tmp_path, **changes)
    return stage.wheel_key(wanted, recipe, recipe.plan(wanted), image)


def test_the_key_follows_what_decides_the_bytes(tmp_path: Path) -> None:
    check = manifests.load("rehearsal").wheels["flashinfer-jit-cache"].check.model_copy(update={"ptx": "allow"})
    same = {key(tmp_path), key(tmp_path / "elsewhere"), key(tmp_path, spec={"check": check})}
    assert len(same) == 1
    others = {
        key(tmp_path, "builder:2"),
        key(tmp_path, patched="3" * 40),
        key(tmp_path, spec={"architectures": ("12.1a",)}),
        key(tmp_path, spec={"modules": ("fp4_quantization_120", "fp4_gemm_cutlass_sm120")}),
    }
    assert len(others) == 4
    assert not others & same


def test_nothing_of_the_caller_reaches_the_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(tmp_path)
    for name in ("CXXFLAGS", "NVCC_PREPEND_FLAGS", "MAX_JOBS", "FLASHINFER_JIT_DEBUG", "TORCH_CUDA_ARCH_LIST"):
        monkeypatch.setenv(name, "9.0")
    plan = stage.RECIPES["flashinfer-jit"].plan(order(tmp_path))
    assert "9.0" not in plan.environment.values()
    assert plan.environment["FLASHINFER_CUDA_ARCH_LIST"] == "12.0a"
    assert key(tmp_path) == before


def test_flashinfer_demands_the_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"wheels\.my-kernels: the recipe flashinfer-jit makes flashinfer-jit-cache"):
        stage.RECIPES["flashinfer-jit"].plan(order(tmp_path, name="my-kernels"))


def engine(client: object, *, remote: bool = True) -> Engine:
    return cast(Engine, SimpleNamespace(client=client, remote=remote, address="unix:///nowhere"))


class Client:
    """The calls of an engine's client that a builder container needs, remembered."""

    def __init__(self, error: BaseException | None = None, left: int = 0) -> None:
        self.calls: list[str] = []
        self.containers = self.api = self
        self._error = error
        self._left = left

    def list(self, **_: object) -> list[object]:
        return [SimpleNamespace(remove=lambda **_: self.calls.append("remove left"))] * self._left

    def create(self, image: str, argv: list[str], *, name: str, **options: Any) -> object:
        self.calls.append(f"create {options['network_mode']}")
        self.name = name
        if self._error:
            raise self._error
        return object()

    def remove_container(self, name: str, **_: object) -> None:
        assert name == self.name
        self.calls.append("remove")

    def kill(self, name: str) -> None:
        assert name == self.name
        self.calls.append("kill")


def test_an_interrupt_while_creating_leaves_no_container() -> None:
    client = Client(KeyboardInterrupt())
    with (
        pytest.raises(KeyboardInterrupt),
        builder(engine(client), "image", [], {}, name="x", keep=False, mark={"of": "us"}),
    ):
        raise AssertionError("never created")
    assert client.calls == ["create none", "remove"]


def test_a_kept_container_is_stopped_and_what_was_left_before_is_removed() -> None:
    client = Client(left=2)
    with builder(engine(client), "image", [], {}, name="x", keep=True, mark={"of": "us"}):
        pass
    assert client.calls == ["remove left", "remove left", "create none", "kill"]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (docker.errors.ImageNotFound("no such image"), "image builder:1 is not in the engine"),
        (docker.errors.APIError("mkdir: no space left on device"), "no space left on the engine's disk"),
        (ConnectionResetError("reset"), "the engine at unix:///nowhere went away"),
    ],
)
def test_the_engine_s_troubles_are_environment_failures(error: Exception, told: str) -> None:
    with (
        pytest.raises(EnvironmentFailure, match=told),
        builder(engine(Client(error)), "builder:1", [], {}, name="x", keep=False),
    ):
        raise AssertionError("never created")
