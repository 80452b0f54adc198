"""Servers and kernels that die for real, of known causes, and what the line says of each.

The server is the rehearsal's SGLang with its real model, in its real image; a minute for each that gets as far as its weights.
Needs the recorded image (`nox -s build -- --profile rehearsal`), whose model folder is copied and spoilt here.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from wheel_factory import shared_object

from forge_core.cli import project_root, work_folder
from forge_core.console import Console
from forge_core.engine import Engine, connect
from forge_core.errors import EnvironmentFailure, ForgeError, Refused, UsageError
from forge_core.explain import Evidence, explain, read_file
from forge_core.model import ModelRef
from forge_core.record import BuildRecord
from forge_validate import serving
from forge_validate.boot import boot
from forge_validate.serving import Limits
from forge_validate.target import Image
from forge_validate.target.pull import pull

NEW_TORCH = "_ZN3c104cuda19CUDAErrorLogCaptureC1Ev"
"""A symbol that only a later torch has: what a wheel built against that one asks for."""
LAUNCH = 'exec python -m sglang.launch_server "$@"'


@dataclass
class Place:
    """What a server is started with."""

    engine: Engine
    image: str
    folder: Path
    log: Path

    def dies(self, kind: type[ForgeError], *, command: str | None = None, **changes: object) -> ForgeError:
        """Boot the real server on the folder; it must die, with an error of that class."""
        plan = serving.load("rehearsal").model_copy(update=changes)
        # On a busy machine a start takes longer than anybody would wait for a server.
        slow = tuple(phase.model_copy(update={"deadline": 4 * phase.deadline}) for phase in plan.phases)
        plan = plan.model_copy(update={"phases": slow})
        if command is not None:
            plan = plan.model_copy(update={"command": ("sh", "-c", command, "sh")})
        for path in (self.folder, *self.folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        model = ModelRef.of_folder(plan.model, self.folder)
        with pytest.raises(ForgeError) as caught:
            with boot(self.engine, self.image, plan, model, self.folder, log=self.log, console=Console()):
                pytest.fail("it lives")
        assert type(caught.value) is kind, caught.value
        assert caught.value.log == self.log
        return caught.value

    @property
    def found(self) -> str:
        """The class that the verb gives the log by itself."""
        finding = read_file(self.log, Evidence(stage="boot", over=True)).finding
        assert finding is not None
        return finding.kind


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    found = connect(builds=False)
    with closing(found.client):
        yield found


@pytest.fixture(scope="module")
def image(built: BuildRecord, engine: Engine) -> str:
    target = Image(profile="rehearsal", reference=str(built.image), image=built.image, model=built.model)
    return pull(engine, target)


@pytest.fixture
def place(built: BuildRecord, engine: Engine, image: str, tmp_path: Path) -> Iterator[Place]:
    # Below the checkout: an engine in a chroot or a container sees only some folders.
    root = project_root() / "work" / f"test-deaths-{tmp_path.name}"
    try:
        shutil.copytree(work_folder("rehearsal") / "model", root / "model")
        root.chmod(0o755)
        yield Place(engine, image, root / "model", tmp_path / "server.log")
    finally:
        shutil.rmtree(root, ignore_errors=True)


def test_killed_by_the_cgroup(place: Place) -> None:
    error = place.dies(Refused, limits=Limits(memory="700m", pids=2048, shm="64m"))
    assert "out of memory, its limit is 700m" in error.message
    finding = read_file(place.log, Evidence(stage="boot", exit_code=137, oom_killed=True)).finding
    assert finding is not None and (finding.kind, finding.confidence) == ("oom_host", "high")


def test_port_taken(place: Place) -> None:
    """Inside the container, where the engine cannot see it."""
    error = place.dies(EnvironmentFailure, command=f"python -m http.server 30000 & sleep 2; {LAUNCH}")
    assert error.hint is not None and error.hint.startswith("port_in_use: ")
    assert place.found == "port_in_use"


def test_truncated_shard(place: Place) -> None:
    weights = place.folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size * 6 // 10)
    error = place.dies(UsageError)
    assert error.hint is not None and "truncated" in error.hint
    assert place.found == "weights"


def test_missing_shard(place: Place) -> None:
    shards = split(place.folder / "model.safetensors")
    shards[1].unlink()
    error = place.dies(UsageError)
    assert error.hint is not None and error.hint.startswith("weights: ")
    assert place.found == "weights"


def split(weights: Path) -> list[Path]:
    """Two shards and their index, in the place of one file."""
    data = weights.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    names = sorted(header)
    shards, index = [], {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        path = weights.parent / f"model-0000{number}-of-00002.safetensors"
        content, rows, position = b"", {}, 0
        pieces = []
        for name in part:
            begin, end = header[name]["data_offsets"]
            pieces.append(data[8 + length + begin : 8 + length + end])
            rows[name] = header[name] | {"data_offsets": [position, position + end - begin]}
            position += end - begin
            index[name] = path.name
        content = json.dumps(rows | {"__metadata__": {"format": "pt"}}).encode()
        path.write_bytes(len(content).to_bytes(8, "little") + content + b"".join(pieces))
        shards.append(path)
    weights.unlink()
    listed = {"metadata": {"total_size": len(data) - 8 - length}, "weight_map": index}
    (weights.parent / "model.safetensors.index.json").write_text(json.dumps(listed))
    return shards


def test_a_kernel_package_built_against_another_torch(place: Place) -> None:
    """A real shared object that asks for what this torch has not, in the place of sgl_kernel."""
    package = place.folder / "site" / "sgl_kernel"
    source = f"extern void {NEW_TORCH}(void *); void go(void *p) {{ {NEW_TORCH}(p); }}"
    shared_object(package, "common_ops.abi3.so", source, "-Wl,-z,now")
    (package / "__init__.py").write_text(
        "import ctypes, pathlib\nctypes.CDLL(str(pathlib.Path(__file__).parent / 'common_ops.abi3.so'))\n"
    )
    environment = serving.load("rehearsal").environment | {"PYTHONPATH": "/model/site"}
    error = place.dies(Refused, environment=environment)
    assert "undefined symbol" in error.message
    assert error.hint is not None and error.hint.startswith("import_abi: ")
    assert place.found == "import_abi"


def test_no_compiler_for_a_kernel_that_is_compiled_at_run_time(place: Place) -> None:
    """FlashInfer itself, asked in the image for a module that is not there compiled."""
    script = (
        "from flashinfer.jit.fp4_quantization import gen_fp4_quantization_sm120_module as gen\n"
        "gen().build(verbose=True)\n"
    )
    variables = {"HOME": "/tmp", "FLASHINFER_CUDA_ARCH_LIST": "12.0a", "FLASHINFER_WORKSPACE_BASE": "/tmp"}
    container = place.engine.client.containers.create(
        place.image, ["-c", script], entrypoint=["python"], environment=variables, network_mode="none"
    )
    try:
        container.start()
        status = int(container.wait()["StatusCode"])
        lines = container.logs().splitlines()
    finally:
        container.remove(force=True)
    assert status != 0
    finding = explain(lines, Evidence(stage="boot", exit_code=status))
    assert finding is not None and finding.kind == "jit_toolchain", finding
