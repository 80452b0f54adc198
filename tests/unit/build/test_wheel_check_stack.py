"""The wheel check against a lock: base, CUDA, versions, torch's symbols by release, abi3; and the verb around it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from wheel_factory import make_wheel, shared_object

from forge_build.__main__ import main
from forge_build.lock import Lock
from forge_build.manifest import CompileCheck
from forge_build.wheel_check import WheelReport, against, check, exports, fatbin, lines
from forge_build.wheel_check.bases import provided
from forge_build.wheel_check.elf import BrokenObject
from forge_build.wheel_check.hints import HINTS
from forge_build.wheel_check.names import demangled_kernel
from forge_build.wheel_check.stack import Stack, cuda_major, stack
from forge_core.console import Console
from forge_core.errors import UsageError
from forge_core.model import Finding, file_sha256
from forge_core.store import Store

ANY = CompileCheck(demand=(), allow=(), needed="provided")
ABI3 = "cp310-abi3-manylinux_2_36_x86_64"
ERROR_LOG = "_ZN3c104cuda19CUDAErrorLogCaptureC1Ev"


def beside(**changes: object) -> Stack:
    values: dict[str, object] = {
        "name": "here",
        "base": provided(["libc6", "libgcc-s1", "libstdc++6", "libgomp1"]),
        "versions": {"torch": "2.11.0", "nvidia-cuda-runtime": "13.0.96"},
        "demands": (),
    }
    return Stack(**(values | changes))  # type: ignore[arg-type]


def found(report: WheelReport) -> dict[str, str]:
    return {f.kind: f"{f.where}: {f.message}" for f in report.findings}


def needing(folder: Path, soname: str, symbol: str = "other") -> Path:
    library = shared_object(folder, soname, f"int {symbol}(void) {{ return 0; }}", f"-Wl,-soname,{soname}")
    return shared_object(folder, "kernel.so", f"int {symbol}(void); int go(void) {{ return {symbol}(); }}", library)


def test_what_the_base_has_is_no_finding(tmp_path: Path) -> None:
    kernel = shared_object(
        tmp_path, "kernel.so", "int GOMP_x; int go(void) { return 1; }", "-Wl,--no-as-needed", "-lgomp"
    )
    wheel = make_wheel(tmp_path, {"demo/kernel.so": kernel})
    assert check(wheel, ANY, stack=beside()).ok
    bare = found(check(wheel, ANY, stack=beside(base=provided(["libc6"]))))
    assert "libgomp.so.1, which neither the base" in bare["needed-not-provided"]


def test_bases_are_data_by_package() -> None:
    assert "libstdc++.so.6" not in provided(["libc6"]) and "libc.so.6" in provided(["libc6"])
    assert provided(["libc6", "libnuma1"]) >= {"libnuma.so.1", "ld-linux-x86-64.so.2"}
    assert provided(["libuuid1t64"]) == {"libuuid.so.1"}
    assert "libstdc++.so.6" in provided([]), "a base that a registry holds names no packages"


@pytest.mark.parametrize(
    ("soname", "major"),
    [("libcudart.so.12", 12), ("libcublasLt.so.13", 13), ("libcusparse.so.12", None), ("libcurand.so.10", None)],
)
def test_which_sonames_carry_cudas_major(soname: str, major: int | None) -> None:
    assert cuda_major(soname) == major


def test_a_library_of_another_cuda_hides_its_symbols(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, {"demo/kernel.so": needing(tmp_path, "libcublas.so.12", "cublasCreate")})
    assert found(check(wheel, ANY, stack=beside())) == {
        "cuda-major": "demo/kernel.so: NEEDs libcublas.so.12 of CUDA 12; the lock 'here' is CUDA 13 (nvidia-cuda-runtime 13.0.96)"
    }
    by_torch = beside(versions={"torch": "2.9.1+cu128"})
    assert by_torch.cuda == (12, "torch 2.9.1+cu128")
    assert "needed-not-provided" in found(check(wheel, ANY, stack=by_torch))


def test_the_version_its_users_demand_and_what_it_requires(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, {"demo/a.py": ""}, requires=("torch==2.14.1", "numpy>=1"))
    report = check(wheel, ANY, stack=beside(demands=(("sglang 0.5.9", Requirement("Demo==1.1")),)))
    seen = found(report)
    assert seen["version-demanded"].endswith("is version 1.0, but sglang 0.5.9 requires Demo==1.1")
    assert "requires torch==2.14.1, but the lock 'here' holds torch 2.11.0" in seen["requires-other"]
    assert not report.ok
    assert check(wheel, ANY, stack=beside(versions={"torch": "2.12.0"})).ok, "what the wheel requires is a warning"


def test_symbols_of_torch_are_named_with_the_releases_that_have_them(tmp_path: Path) -> None:
    lists = exports.listed()
    everywhere = next(s for s in lists.symbols if s.startswith("_ZN3c10") and lists.having(s) == lists.releases)
    source = "".join(
        f"int {s}(void); int go{i}(void) {{ return {s}(); }}\n" for i, s in enumerate((ERROR_LOG, everywhere))
    )
    source += "int _ZN2at9nowhere42Ev(void); int go9(void) { return _ZN2at9nowhere42Ev(); }"
    wheel = make_wheel(tmp_path, {"demo/k.so": shared_object(tmp_path, "k.so", source)})
    report = check(wheel, ANY, stack=beside())
    messages = "\n".join(f.message for f in report.findings)
    assert (
        "CUDAErrorLogCapture() [_ZN3c104cuda19CUDAErrorLogCaptureC1Ev]: torch 2.11.0 of the lock does not" in messages
    )
    assert f"torch {lists.releases[-1]} does" in messages and "every listed release does" in messages
    assert "at::nowhere42() [_ZN2at9nowhere42Ev]" in messages and "which torch does is unknown" in messages
    assert f"torch {lists.releases[-1]} exports all of the 2 undefined symbols" in messages
    assert report.findings[-1].severity == "info"


def test_the_lists_are_made_from_wheels(tmp_path: Path) -> None:
    wheels = []
    for version, names in (("2.1.0", "ab"), ("2.2.0+cu130", "bc")):
        source = "".join(f"int _ZN2at1{n}Ev(void) {{ return 0; }}" for n in names) + "int unrelated(void) { return 0; }"
        library = shared_object(tmp_path / version, "libtorch_cpu.so", source)
        wheels.append(make_wheel(tmp_path, {"torch/lib/libtorch_cpu.so": library}, name="torch", version=version))
    target = tmp_path / "lists.xz"
    made = exports.make(wheels[::-1], Console(quiet=True), target)
    assert made.releases == ("2.1.0", "2.2.0")
    assert made.having("_ZN2at1aEv") == ("2.1.0",) and made.having("_ZN2at1cEv") == ("2.2.0",)
    assert made.having("_ZN2at1bEv") == (), "what both have tells nothing, and is left out"
    again = tmp_path / "again.xz"
    exports.make(wheels, Console(quiet=True), again)
    assert again.read_bytes() == target.read_bytes()
    with pytest.raises(UsageError, match="no wheel of torch"):
        exports.make([make_wheel(tmp_path, {"a.py": ""})], Console(quiet=True), target)


def test_abi3_is_held_to_its_word(tmp_path: Path) -> None:
    source = "int {0}(int); int go(void) {{ return {0}(1); }}"
    stable = shared_object(tmp_path, "stable.abi3.so", source.format("PyLong_FromLong"))
    assert check(make_wheel(tmp_path, {"demo/stable.abi3.so": stable}, tag=ABI3), ANY).ok
    for symbol, said in (
        ("PyUnicode_AsUTF8AndNewThing", "is not in the stable ABI"),
        ("PyType_GetModuleName", "the tag promises 3.10"),
    ):
        other = shared_object(tmp_path, "other.abi3.so", source.format(symbol))
        assert said in found(check(make_wheel(tmp_path, {"demo/other.abi3.so": other}, tag=ABI3), ANY))["abi3"]
    named = make_wheel(tmp_path, {"demo/ops.cpython-310-x86_64-linux-gnu.so": stable}, tag=ABI3)
    assert "for CPython 3.10 alone" in found(check(named, ANY))["abi3"]
    # where the file name does not say abi3, nothing is promised
    assert check(make_wheel(tmp_path, {"demo/ops.cpython-311-x86_64-linux-gnu.so": stable}), ANY).ok


@pytest.mark.parametrize(
    ("mangled", "plain"),
    [
        ("_Z10moe_kernelPi", "moe_kernel"),
        ("_Z16fp4_quant_kernelILi5EEvPi", "fp4_quant_kernel<5>"),
        ("_ZN12_GLOBAL__N_14fillEPi", "(anonymous namespace)::fill"),
        ("plain_c", "plain_c"),
    ],
)
def test_kernels_are_named_without_their_parameters(mangled: str, plain: str) -> None:
    assert demangled_kernel(mangled) == plain


def test_containers_that_are_none(tmp_path: Path) -> None:
    entry = struct.pack("<HHIQ", 2, 1, 64, 0) + b"\0" * 48
    good = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entry) * 2) + entry * 2
    path = tmp_path / "k.fatbin"
    path.write_bytes(good + b"\0" * 16 + good)
    assert [kinds for _, kinds in fatbin.containers(path, None)] == [(2, 2), (2, 2)]
    for broken in (good + b"\1" * 32, good[:60], good[:16] + b"\2\0" * 64):
        path.write_bytes(broken)
        with pytest.raises(BrokenObject):
            list(fatbin.containers(path, None))


def test_findings_are_shown_cause_first_with_the_way_out() -> None:
    rows = [
        Finding(kind="foreign-architecture", where="a.so", message="holds sm_90"),
        Finding(kind="cuda-major", where="a.so", message="NEEDs libcudart.so.12"),
        Finding(kind="cuda-major", where="b.so", message="NEEDs libcudart.so.12"),
    ]
    shown = lines(WheelReport(file="w", sha256="0" * 64, size=1, objects=(), findings=tuple(rows)))
    assert shown[:4] == [
        "cuda-major (error, 2)",
        "  NEEDs libcudart.so.12",
        "    in a.so, b.so",
        f"  hint: {HINTS['cuda-major']}",
    ]
    assert shown[4] == "foreign-architecture (error, 1)"


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock whose SGLang lies in the store and whose CUDA runtime does not."""
    monkeypatch.setenv("FORGE_STORE", str(tmp_path / "store"))
    sglang = make_wheel(tmp_path, {"sglang/a.py": ""}, name="sglang", version="0.5.9", requires=("demo==1.0",))
    Store.open().add_file(sglang)
    rows = [
        {"name": "sglang", "version": "0.5.9", "file": sglang.name, "sha256": file_sha256(sglang), "size": 1},
        {"name": "nvidia-cuda-runtime", "version": "13.0.96", "file": "r.whl", "sha256": "0" * 64, "size": 1},
    ]
    path = tmp_path / "scratch.lock.yaml"
    path.write_text(
        yaml.safe_dump({"schema": 1, "profile": "scratch", "manifest": "0" * 64, "wheels": {"runtime": rows}})
    )
    return path


def test_the_verb_and_its_exit_codes(tmp_path: Path, locked: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def verb(wheel: Path, *more: str) -> int:
        return main(["wheel-check", str(wheel), "--against", str(locked), "--offline", *more])

    plain = shared_object(tmp_path, "plain.so", "int answer(void) { return 42; }")
    host_only = make_wheel(tmp_path, {"demo/plain.so": plain})
    assert verb(host_only, "--json") == 1
    said = json.loads(capsys.readouterr().out)
    assert [f["kind"] for f in said["findings"]] == ["no-device-code"] and said["findings"][0]["hint"]
    assert verb(host_only) == 1
    shown = capsys.readouterr()
    assert "no-device-code (error, 1)" in shown.out and "1 finding against the lock 'scratch'" in shown.err
    assert verb(tmp_path / "gone-1.0-py3-none-any.whl") == 2
    needs = make_wheel(tmp_path, {"demo/k.so": needing(tmp_path, "libcudart.so.13", "cudaX")}, name="needs")
    assert verb(needs) == 3 and "1 locked wheels that needs-1.0" in capsys.readouterr().err
    assert main(["wheel-check", str(host_only), "--against", "no-such-profile"]) == 2
    whole = host_only.read_bytes()
    host_only.write_bytes(whole[:200] + bytes([whole[200] ^ 0xFF]) + whole[201:])
    assert verb(host_only) == 5


def test_a_lock_as_a_stack(locked: Path) -> None:
    lock = against.read_lock(str(locked))
    assert isinstance(lock, Lock)
    store = Store.open()
    seen = stack(lock, lambda wheel: store.path(wheel.sha256) if store.has(wheel.sha256) else None)
    assert seen.cuda == (13, "nvidia-cuda-runtime 13.0.96")
    assert [(who, str(what)) for who, what in seen.demands] == [("sglang 0.5.9", "demo==1.0")]


def test_a_wheel_made_here_has_demands_too(locked: Path, tmp_path: Path) -> None:
    lock = against.read_lock(str(locked))
    own = make_wheel(tmp_path, {"serving/__init__.py": b""}, name="serving", requires=("demo==2.0",))
    seen = stack(lock, lambda wheel: None, made={"serving": ("1.0", own)})
    assert seen.versions["serving"] == "1.0"
    assert [(who, str(what)) for who, what in seen.demands] == [("serving 1.0", "demo==2.0")]
