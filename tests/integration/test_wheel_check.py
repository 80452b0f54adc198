"""The wheel check on device code of the real compiler, installed from the locked wheels by hash."""

import os
import re
from pathlib import Path

import pytest
import yaml
from uv import find_uv_bin
from wheel_factory import make_wheel, shared_object

from forge_build.manifest import CompileCheck
from forge_build.wheel_check import WheelReport, check, raise_for, summary
from forge_core.errors import Refused
from forge_core.process import run

LOCK = Path(__file__).parents[2] / "build" / "manifests" / "rehearsal.lock.yaml"
TOOLS = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
SPEC = CompileCheck(demand=("sm_120a",), allow=("sm_120a",), needed=("libcudart.so.13",))
KERNEL = """
__global__ void fill(int *p) { *p = 120; }
extern "C" int go(int *p) { fill<<<1, 1>>>(p); return (int)cudaGetLastError(); }
"""
SM120 = ("-gencode", "arch=compute_120a,code=sm_120a")
SM90 = ("-gencode", "arch=compute_90,code=sm_90")
PTX = ("-gencode", "arch=compute_120,code=compute_120")


@pytest.fixture(scope="session")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CUDA 13.0 tool chain: the lock's own wheels, nothing of the machine."""
    folder = tmp_path_factory.mktemp("cuda")
    locked = yaml.safe_load(LOCK.read_text())["wheels"]["builder"]
    lines = [f"{w['name']}=={w['version']} --hash=sha256:{w['sha256']}" for w in locked if w["name"] in TOOLS]
    assert len(lines) == len(TOOLS)
    (folder / "requirements.txt").write_text("\n".join(lines) + "\n")
    argv = [find_uv_bin(), "pip", "install", "--require-hashes", "--no-deps", "--target", folder / "site"]
    run([*argv, "-r", folder / "requirements.txt"], env=dict(os.environ), timeout=600)
    return folder / "site" / "nvidia" / "cu13"


def compiled(cuda: Path, folder: Path, name: str, *options: str | Path, source: str = KERNEL) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    (folder / f"{path.stem}.cu").write_text(source)
    host = ["-shared", "-Xcompiler", "-fPIC", "-cudart", "none", "-L", cuda / "lib", "-l:libcudart.so.13"]
    run([cuda / "bin" / "nvcc", *host, *options, folder / f"{path.stem}.cu", "-o", path], timeout=300)
    return path


def judged(cuda: Path, folder: Path, *objects: Path, spec: CompileCheck = SPEC) -> WheelReport:
    wheel = make_wheel(folder / "wheel", {f"demo/{o.name}": o for o in objects})
    return check(wheel, spec, environment=[cuda / "lib"], platform="x86_64-manylinux_2_36")


def found(report: WheelReport) -> dict[str, str]:
    assert not report.ok
    with pytest.raises(Refused):
        raise_for(report)
    return {f.kind: f"{f.where}: {f.message}" for f in report.findings}


def test_the_demanded_architecture_alone_passes(cuda: Path, tmp_path: Path) -> None:
    report = judged(cuda, tmp_path, compiled(cuda, tmp_path, "kernel.so", *SM120))
    assert report.ok, report.findings
    assert set(report.objects[0].cubins) == {"sm_120a"} and report.objects[0].ptx == ()
    assert report.architectures == ("sm_120a",)
    assert re.fullmatch(r"1 shared object, sm_120a x\d+, no PTX, needs libcudart.so.13", summary(report))


def test_a_host_only_object_beside_it_is_fine(cuda: Path, tmp_path: Path) -> None:
    host = shared_object(tmp_path, "host.so", "int x(void) { return 1; }")
    assert judged(cuda, tmp_path, compiled(cuda, tmp_path, "kernel.so", *SM120), host).ok


def test_a_foreign_architecture_beside_the_demanded_one(cuda: Path, tmp_path: Path) -> None:
    errors = found(judged(cuda, tmp_path, compiled(cuda, tmp_path, "kernel.so", *SM120, *SM90)))
    assert list(errors) == ["foreign-architecture"]
    assert re.search(r"demo/kernel.so: holds sm_90 \(kernel\.\d+\.sm_90\.cubin", errors["foreign-architecture"])


def test_the_demanded_architecture_is_missing(cuda: Path, tmp_path: Path) -> None:
    errors = found(judged(cuda, tmp_path, compiled(cuda, tmp_path, "kernel.so", *SM90)))
    assert set(errors) == {"foreign-architecture", "architecture-missing"}
    assert "no cubin for sm_120a; it holds sm_90 (kernel." in errors["architecture-missing"]


def test_sm_120_is_not_sm_120a(cuda: Path, tmp_path: Path) -> None:
    plain = compiled(cuda, tmp_path, "kernel.so", "-gencode", "arch=compute_120,code=sm_120")
    errors = found(judged(cuda, tmp_path, plain))
    assert set(errors) == {"foreign-architecture", "architecture-missing"}


def test_ptx_only(cuda: Path, tmp_path: Path) -> None:
    kernel = compiled(cuda, tmp_path, "kernel.so", *PTX)
    errors = found(judged(cuda, tmp_path, kernel))
    assert set(errors) == {"ptx-present", "architecture-missing"}
    assert "PTX for sm_120 (kernel.1.sm_120.ptx)" in errors["ptx-present"]
    assert "PTX only" in errors["architecture-missing"]
    allowed = judged(cuda, tmp_path / "allowed", kernel, spec=SPEC.model_copy(update={"ptx": "allow"}))
    assert set(found(allowed)) == {"architecture-missing"}


def test_each_object_is_held_to_the_demand_by_itself(cuda: Path, tmp_path: Path) -> None:
    good = compiled(cuda, tmp_path, "good.so", *SM120)
    bad = compiled(cuda, tmp_path, "bad.so", *SM90)
    errors = found(judged(cuda, tmp_path, good, bad))
    assert errors["architecture-missing"].startswith("demo/bad.so")


def test_device_code_outside_shared_objects(cuda: Path, tmp_path: Path) -> None:
    good = compiled(cuda, tmp_path, "good.so", *SM120)
    (tmp_path / "k.cu").write_text("__global__ void k(int *p) { *p = 1; }")
    for kind in ("cubin", "fatbin"):
        run(
            [cuda / "bin" / "nvcc", f"-{kind}", "-arch=sm_90", tmp_path / "k.cu", "-o", tmp_path / f"k.{kind}"],
            timeout=300,
        )
        errors = found(judged(cuda, tmp_path / kind, good, tmp_path / f"k.{kind}"))
        assert errors["foreign-architecture"].startswith(f"demo/k.{kind}: holds sm_90")


def test_damaged_device_code_does_not_pass_for_none(cuda: Path, tmp_path: Path) -> None:
    kernel = compiled(cuda, tmp_path, "kernel.so", *SM120)
    data = bytearray(kernel.read_bytes())
    at = data.find(b"\x50\xed\x55\xba")
    assert at > 0
    # Every fatbin header, so that none is left to be listed.
    while at > 0:
        data[at] ^= 0xFF
        at = data.find(b"\x50\xed\x55\xba", at + 4)
    kernel.write_bytes(data)
    errors = found(judged(cuda, tmp_path, kernel))
    assert set(errors) == {"broken-object", "no-device-code"}


def test_a_runtime_symbol_the_locked_runtime_lacks(cuda: Path, tmp_path: Path) -> None:
    source = KERNEL + 'extern "C" int cudaOfAnotherAge(void);\nextern "C" int more(void) { return cudaOfAnotherAge(); }'
    errors = found(judged(cuda, tmp_path, compiled(cuda, tmp_path, "kernel.so", *SM120, source=source)))
    assert list(errors) == ["undefined-symbol"] and "cudaOfAnotherAge" in errors["undefined-symbol"]
