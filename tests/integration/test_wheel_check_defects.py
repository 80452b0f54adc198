"""One wheel per defect, from the real compiler, through the verb: each is named, and ends with 1."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from cuda_wheels import CLEAN, SM90, SM120, Toolchain
from wheel_factory import make_wheel, shared_object

from forge_build.__main__ import main
from forge_build.manifest import CompileCheck, DemandedInstruction
from forge_build.wheel_check import check, summary
from forge_core.model import file_sha256
from forge_core.store import Store

ERROR_LOG = "_ZN3c104cuda19CUDAErrorLogCaptureC1Ev"
MOE = """
__global__ void moe_kernel(int *p) { *p = 9; }
__attribute__((noinline)) static int launch(int *p) { moe_kernel<<<1, 1>>>(p); return (int)cudaGetLastError(); }
"""
FFI = MOE + 'extern "C" int __tvm_ffi_moe_mm(int *p) { return launch(p); }\n'
TORCH = (
    MOE
    + """
extern "C" void register_op(const char *schema, int (*f)(int *));
int cutlass_moe_mm(int *p) { return launch(p); }
static int implementation(int *p) { return launch(p) + 1; }
static bool done = (register_op("cutlass_moe_mm(Tensor! p) -> int", &cutlass_moe_mm),
                    register_op("moe_other(Tensor! p) -> int", &implementation), true);
"""
)
FP4 = """
__global__ void fp4_mma(float *d, const unsigned *a, const unsigned *b, unsigned sa, unsigned sb) {
  float c0 = 0, c1 = 0, c2 = 0, c3 = 0;
  asm volatile("mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64.row.col.f32.e2m1.e2m1.f32.ue4m3 "
               "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, {%10}, {%11,%12}, {%13}, {%14,%15};"
               : "+f"(c0), "+f"(c1), "+f"(c2), "+f"(c3)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(sa), "h"((short)0),
                 "h"((short)0), "r"(sb), "h"((short)0), "h"((short)0));
  d[0] = c0; d[1] = c1; d[2] = c2; d[3] = c3;
}
"""


@pytest.fixture(scope="module")
def nvcc(tmp_path_factory: pytest.TempPathFactory) -> Toolchain:
    return Toolchain.installed(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="module")
def clean(nvcc: Toolchain) -> Path:
    """A kernel with which nothing is wrong."""
    return nvcc.shared("clean.so", nvcc.unit("clean", CLEAN, *SM120))


@pytest.fixture(scope="module")
def lock(nvcc: Toolchain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lock of CUDA 13, torch and an SGLang that wants demo 1.0; its wheels lie in a store of their own."""
    folder = tmp_path_factory.mktemp("lock")
    c10 = shared_object(folder, "libc10.so", "int _ZN3c106WarnedEv(void) { return 0; }", "-Wl,-soname,libc10.so")
    c10_cuda = shared_object(folder, "libc10_cuda.so", "int x(void) { return 0; }", "-Wl,-soname,libc10_cuda.so")
    wheels = [
        nvcc.runtime_wheel(folder),
        make_wheel(
            folder, {"torch/lib/libc10.so": c10, "torch/lib/libc10_cuda.so": c10_cuda}, name="torch", version="2.11.0"
        ),
        make_wheel(folder, {"sglang/__init__.py": ""}, name="sglang", version="0.5.9", requires=("demo==1.0",)),
    ]
    os.environ["FORGE_STORE"] = str(folder / "store")
    try:
        store = Store.open()
        locked = []
        for path in wheels:
            name, version = path.name.split("-")[:2]
            store.add_file(path, sha256=file_sha256(path))
            locked.append(
                {
                    "name": name.replace("_", "-"),
                    "version": version,
                    "file": path.name,
                    "sha256": file_sha256(path),
                    "size": path.stat().st_size,
                }
            )
    finally:
        del os.environ["FORGE_STORE"]
    data = {"schema": 1, "profile": "defects", "manifest": "0" * 64, "wheels": {"runtime": locked}}
    (folder / "defects.lock.yaml").write_text(yaml.safe_dump(data))
    return folder / "defects.lock.yaml"


class Judge:
    """Runs the verb on a wheel."""

    def __init__(self, lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self._lock, self._capsys = lock, capsys

    def __call__(self, wheel: Path) -> tuple[int, dict[str, Any]]:
        code = main(["wheel-check", str(wheel), "--against", str(self._lock), "--offline", "--json"])
        return code, json.loads(self._capsys.readouterr().out)

    def only(self, wheel: Path, kind: str) -> str:
        """The one kind of error there is, as one text with its places."""
        code, said = self(wheel)
        errors = [f for f in said["findings"] if f["severity"] == "error"]
        assert code == 1 and {f["kind"] for f in errors} == {kind}, said["findings"]
        assert all(f["hint"] for f in errors)
        return " | ".join(f"{f['where']}: {f['message']}" for f in errors)


@pytest.fixture
def judge(lock: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Judge:
    monkeypatch.setenv("FORGE_STORE", str(lock.parent / "store"))
    return Judge(lock, capsys)


def test_a_right_wheel_passes(judge: Judge, clean: Path, tmp_path: Path) -> None:
    code, said = judge(make_wheel(tmp_path, {"demo/clean.so": clean}))
    assert code == 0 and said["ok"] and said["findings"] == []
    assert said["objects"][0]["units"] == {"the unit of fill": ["sm_120a"]}


def test_foreign_architecture(judge: Judge, nvcc: Toolchain, tmp_path: Path) -> None:
    both = nvcc.shared("both.so", nvcc.unit("both", CLEAN, *SM120, *SM90))
    assert "demo/both.so: holds sm_90 (" in judge.only(
        make_wheel(tmp_path, {"demo/both.so": both}), "foreign-architecture"
    )


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (FFI, "op moe_mm: "),
        (TORCH, "op cutlass_moe_mm, moe_other: "),
        (MOE + "int f(int *p) { return launch(p); }", ""),
    ],
)
def test_sm_120a_missing_in_one_op(judge: Judge, nvcc: Toolchain, tmp_path: Path, source: str, named: str) -> None:
    """The object as a whole has sm_120a, and every architecture it holds is allowed elsewhere in it."""
    register = shared_object(
        tmp_path, "libregister.so", "void register_op(const char *s, void *f) {}", "-Wl,-soname,libregister.so"
    )
    units = nvcc.unit("clean", CLEAN, *SM120, *SM90), nvcc.unit("moe", source, *SM90)
    ops = nvcc.shared("ops.so", *units, *([register] if "register_op" in source else []))
    wheel = make_wheel(tmp_path, {"demo/ops.so": ops, "demo.libs/libregister.so": register})
    code, said = judge(wheel)
    assert code == 1
    found = {f["kind"]: f for f in said["findings"]}
    assert set(found) == {"foreign-architecture", "op-without-architecture"}
    message = found["op-without-architecture"]["message"]
    assert message.startswith(
        f"{named}the unit of moe_kernel has no cubin for sm_120a of 1 of its 1 kernels: moe_kernel;"
    )
    assert message.endswith("it holds sm_90") and "no kernel image" in found["op-without-architecture"]["hint"]
    if named:
        ops_of = next(o["ops"] for o in said["objects"] if o["path"] == "demo/ops.so")
        assert all(units == ["the unit of moe_kernel"] for units in ops_of.values()) and ops_of


def test_an_op_in_ptx_only(judge: Judge, nvcc: Toolchain, tmp_path: Path) -> None:
    ptx = ("-gencode", "arch=compute_120,code=compute_120")
    ops = nvcc.shared("ops.so", nvcc.unit("clean", CLEAN, *SM120), nvcc.unit("moe", FFI, *ptx))
    code, said = judge(make_wheel(tmp_path, {"demo/ops.so": ops}))
    found = {f["kind"]: f["message"] for f in said["findings"]}
    assert code == 1 and set(found) == {"op-without-architecture", "ptx-present"}
    assert "op moe_mm: " in found["op-without-architecture"]
    assert found["op-without-architecture"].endswith("it holds PTX for sm_120")


def test_ptx_only(judge: Judge, nvcc: Toolchain, tmp_path: Path) -> None:
    ptx = nvcc.shared("ptx.so", nvcc.unit("ptx", CLEAN, "-gencode", "arch=compute_120,code=compute_120"))
    code, said = judge(make_wheel(tmp_path, {"demo/ptx.so": ptx}))
    assert code == 1 and {f["kind"] for f in said["findings"]} == {"ptx-present", "architecture-missing"}
    assert any("it holds PTX only" in f["message"] for f in said["findings"])


def test_cuda_12_library(judge: Judge, nvcc: Toolchain, tmp_path: Path) -> None:
    """The library's absence is the finding, not the symbols it would have."""
    old = nvcc.renamed_runtime(tmp_path, "libcudart.so.12")
    kernel = nvcc.shared("old.so", nvcc.unit("clean", CLEAN, *SM120), runtime=old)
    message = judge.only(make_wheel(tmp_path, {"demo/old.so": kernel}), "cuda-major")
    assert message == (
        "demo/old.so: NEEDs libcudart.so.12 of CUDA 12; the lock 'defects' is CUDA 13 (nvidia-cuda-runtime 13.0.96)"
    )


def test_undefined_symbol_names_the_torch_that_has_it(judge: Judge, nvcc: Toolchain, tmp_path: Path) -> None:
    source = CLEAN + f'extern "C" int {ERROR_LOG}(void);\nextern "C" int log_it(void) {{ return {ERROR_LOG}(); }}\n'
    kernel = nvcc.shared("newer.so", nvcc.unit("newer", source, *SM120))
    message = judge.only(make_wheel(tmp_path, {"demo/newer.so": kernel}), "undefined-symbol")
    assert "c10::cuda::CUDAErrorLogCapture::CUDAErrorLogCapture() [" in message
    assert "torch 2.11.0 of the lock does not export it; torch 2.14.1 does" in message


def test_wrong_version_in_metadata(judge: Judge, clean: Path, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, {"demo/clean.so": clean}, metadata_version="1.1")
    assert "say version '1.1', the file name '1.0'" in judge.only(wheel, "metadata")


def test_another_version_than_sglang_demands(judge: Judge, clean: Path, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, {"demo/clean.so": clean}, version="1.1")
    assert "is version 1.1, but sglang 0.5.9 requires demo==1.0" in judge.only(wheel, "version-demanded")


def test_broken_record(judge: Judge, clean: Path, tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, {"demo/clean.so": clean}, record={"demo/clean.so": "demo/clean.so,sha256=AAAA,1"})
    assert "demo/clean.so: differs from its hash" in judge.only(wheel, "record")


def test_rpath(judge: Judge, nvcc: Toolchain, tmp_path: Path) -> None:
    kernel = nvcc.shared("rpath.so", nvcc.unit("clean", CLEAN, *SM120), "-Xlinker", "-rpath=/usr/local/cuda/lib64")
    message = judge.only(make_wheel(tmp_path, {"demo/rpath.so": kernel}), "rpath")
    assert "'/usr/local/cuda/lib64' does not start at $ORIGIN" in message


def test_oversize(clean: Path, nvcc: Toolchain, tmp_path: Path) -> None:
    """Budgets are the manifest's, so this goes to the check itself."""
    wheel = make_wheel(tmp_path, {"demo/clean.so": clean})
    amount, unpacked = wheel.stat().st_size, clean.stat().st_size
    spec = CompileCheck(demand=("sm_120a",), allow=("sm_120a",), needed="provided")
    tight = spec.model_copy(update={"max_size": amount - 1, "max_object_size": unpacked - 1})
    found = {f.where: f.message for f in check(wheel, tight, environment=[nvcc.lib]).findings}
    assert set(found) == {wheel.name, "demo/clean.so"} and all(", 1 over the budget of" in m for m in found.values())
    fitting = spec.model_copy(update={"max_size": amount, "max_object_size": unpacked})
    assert check(wheel, fitting, environment=[nvcc.lib]).ok


def test_fp4_instructions_are_counted_by_object(nvcc: Toolchain, clean: Path, tmp_path: Path) -> None:
    fp4 = nvcc.shared("fp4.so", nvcc.unit("fp4", FP4, *SM120))
    wheel = make_wheel(tmp_path, {"demo/fp4.so": fp4, "demo/clean.so": clean})
    spec = CompileCheck(demand=("sm_120a",), allow=("sm_120a",), needed="provided")

    def demanding(objects: str, at_least: int = 1) -> CompileCheck:
        demand = DemandedInstruction(pattern="OMMA.*E2M1", objects=objects, at_least=at_least)
        return spec.model_copy(update={"instructions": (demand,)})

    report = check(wheel, demanding("*/fp4.so"), environment=[nvcc.lib])
    assert report.ok, report.findings
    assert report.details["demo/fp4.so"].instructions == {"OMMA.*E2M1": 1}
    assert report.details["demo/clean.so"].instructions == {}
    assert summary(report).endswith("OMMA.*E2M1 x1")
    for wrong, where, message in (
        (demanding("*"), "demo/clean.so", "0 instructions OMMA.*E2M1 for sm_120a, demanded: 1"),
        (demanding("*/fp4.so", 2), "demo/fp4.so", "1 instructions OMMA.*E2M1 for sm_120a, demanded: 2"),
        (demanding("*/gone.so"), wheel.name, "no object '*/gone.so' with code for sm_120a"),
    ):
        (finding,) = check(wheel, wrong, environment=[nvcc.lib]).findings
        assert (finding.kind, finding.where) == ("instruction-missing", where) and finding.message.startswith(message)
