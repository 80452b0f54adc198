"""The wheel check on real wheels of real shared objects; device code is tried in tests/integration."""

import hashlib
import io
import random
import zipfile
from pathlib import Path

import pytest
from rich.console import Console
from wheel_factory import make_wheel, shared_object

from forge_build import wheel_check
from forge_build.manifest import CompileCheck
from forge_build.wheel_check import WheelReport, check, raise_for, summary, table
from forge_core.errors import EnvironmentFailure, ForgeError, IntegrityError, Refused, UsageError
from forge_core.record import RecordedObject

HOST = CompileCheck(demand=(), allow=())
CUDA = CompileCheck(demand=(), allow=(), needed=("libcudart.so.13",))
PLAIN = "int answer(void) { return 42; }"


def kinds(report: WheelReport) -> list[str]:
    return [f.kind for f in report.findings]


def only(report: WheelReport, kind: str) -> str:
    """The message of the one finding there is."""
    assert kinds(report) == [kind], report.findings
    return f"{report.findings[0].where}: {report.findings[0].message}"


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_object(tmp_path_factory.mktemp("plain"), "plain.so", PLAIN)


@pytest.fixture(scope="session")
def cudart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with a version of its own, as NVIDIA's runtime has."""
    folder = tmp_path_factory.mktemp("cudart")
    script = folder / "versions"
    script.write_text("libcudart.so.13 { global: cudaMalloc; cudaFree; local: *; };")
    source = "int cudaMalloc(void) { return 0; } int cudaFree(void) { return 0; } int hidden(void) { return 0; }"
    return shared_object(
        folder, "libcudart.so.13", source, "-Wl,-soname,libcudart.so.13", f"-Wl,--version-script={script}"
    )


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory, cudart: Path) -> list[Path]:
    """Two wheels that are installed beside the one under check; one lies in a store, under its sha256."""
    folder = tmp_path_factory.mktemp("environment")
    ffi = shared_object(
        folder, "libtvm_ffi.so", "int TVMFFIErrorSetRaised(void) { return 0; }", "-Wl,-soname,libtvm_ffi.so"
    )
    first = make_wheel(folder, {"nvidia/cu13/lib/libcudart.so.13": cudart}, name="runtime")
    second = make_wheel(folder, {"tvm_ffi/lib/libtvm_ffi.so": ffi}, name="tvm_ffi")
    return [first.rename(folder / hashlib.sha256(first.read_bytes()).hexdigest()), second]


def test_a_right_wheel_passes_and_is_recorded(tmp_path: Path, plain: Path) -> None:
    wheel = make_wheel(tmp_path, {"demo/plain.so": plain, "demo/__init__.py": ""})
    report = check(wheel, HOST, epoch=1_600_000_000, platform="x86_64-manylinux_2_36")
    assert report.ok and report.findings == ()
    raise_for(report)
    assert report.sha256 == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert report.size == wheel.stat().st_size
    (found,) = report.objects
    assert (found.path, found.size, found.cubins, found.ptx) == ("demo/plain.so", plain.stat().st_size, {}, ())
    assert set(found.needed) <= {"libc.so.6"}
    assert summary(report) == "1 shared object, no cubins, no PTX, needs only the C library's family"


def test_a_wheel_without_device_code_fails_where_some_is_demanded(tmp_path: Path, plain: Path) -> None:
    spec = CompileCheck(demand=("sm_120a",), allow=("sm_120a",))
    with_object = make_wheel(tmp_path, {"demo/plain.so": plain})
    assert "sm_120a is demanded" in only(check(with_object, spec), "no-device-code")
    empty = make_wheel(tmp_path, {"demo/__init__.py": ""}, name="empty")
    assert only(check(empty, spec), "no-device-code").startswith("empty-1.0-")


def test_needed_of_another_cuda_is_named(tmp_path: Path, environment: list[Path]) -> None:
    old = shared_object(
        tmp_path, "libcudart.so.12", "int cudaMalloc(void) { return 0; }", "-Wl,-soname,libcudart.so.12"
    )
    kernel = shared_object(tmp_path, "kernel.so", "int cudaMalloc(void); int go(void) { return cudaMalloc(); }", old)
    report = check(make_wheel(tmp_path, {"demo/kernel.so": kernel}), CUDA, environment=environment)
    assert "needed-not-allowed" in kinds(report)
    finding = next(f for f in report.findings if f.kind == "needed-not-allowed")
    assert finding.where == "demo/kernel.so" and "NEEDs libcudart.so.12" in finding.message
    assert "libcudart.so.13" in finding.message


def test_needed_and_symbols_come_from_the_environment(tmp_path: Path, cudart: Path, environment: list[Path]) -> None:
    source = "int cudaMalloc(void); int TVMFFIErrorSetRaised(void); int go(void) { return cudaMalloc() + TVMFFIErrorSetRaised(); }"
    kernel = shared_object(tmp_path, "kernel.so", source, cudart)
    wheel = make_wheel(tmp_path, {"demo/kernel.so": kernel})
    report = check(wheel, CUDA, environment=environment)
    assert report.ok, report.findings
    assert report.objects[0].needed[0] == "libcudart.so.13"
    assert summary(report).endswith("needs libcudart.so.13")

    alone = check(wheel, CUDA)
    assert kinds(alone) == ["needed-not-provided", "undefined-symbol"]
    assert "libcudart.so.13, which neither the base nor a wheel" in alone.findings[0].message
    # cudaMalloc would come from the library whose absence is already a finding
    assert "TVMFFIErrorSetRaised" in alone.findings[1].message


def test_a_folder_serves_as_environment(tmp_path: Path, cudart: Path, environment: list[Path]) -> None:
    kernel = shared_object(
        tmp_path / "k", "kernel.so", "int cudaMalloc(void); int go(void) { return cudaMalloc(); }", cudart
    )
    wheel = make_wheel(tmp_path / "w", {"demo/kernel.so": kernel})
    assert check(wheel, CUDA, environment=[cudart.parent]).ok
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "runtime.whl").write_bytes(environment[0].read_bytes())
    assert check(wheel, CUDA, environment=[tmp_path / "wheels"]).ok


def test_an_undefined_symbol_is_named_as_people_read_it(tmp_path: Path, environment: list[Path]) -> None:
    source = "extern int _ZN2at4_ops4addmEii(int, int); int go(void) { return _ZN2at4_ops4addmEii(1, 2); }"
    kernel = shared_object(tmp_path, "kernel.so", source)
    report = check(make_wheel(tmp_path, {"demo/kernel.so": kernel}), HOST, environment=environment)
    message = only(report, "undefined-symbol")
    assert message.startswith("demo/kernel.so: at::_ops::addm(int, int) [_ZN2at4_ops4addmEii]")


def test_a_symbol_in_a_version_the_library_lacks_is_undefined(tmp_path: Path, environment: list[Path]) -> None:
    script = tmp_path / "versions"
    script.write_text("libcudart.so.14 { global: cudaMalloc; };")
    newer = shared_object(
        tmp_path,
        "libcudart.so.13",
        "int cudaMalloc(void) { return 0; }",
        "-Wl,-soname,libcudart.so.13",
        f"-Wl,--version-script={script}",
    )
    kernel = shared_object(tmp_path, "kernel.so", "int cudaMalloc(void); int go(void) { return cudaMalloc(); }", newer)
    report = check(make_wheel(tmp_path, {"demo/kernel.so": kernel}), CUDA, environment=environment)
    assert "cudaMalloc, version libcudart.so.14 of libcudart.so.13" in only(report, "undefined-symbol")


def test_what_resolves_without_any_wheel(tmp_path: Path) -> None:
    """The wheel's own objects, weak symbols and Python."""
    base = shared_object(tmp_path, "libbase.so", "int base(void) { return 1; }", "-Wl,-soname,libbase.so")
    source = """
        int base(void); int PyLong_FromLong(int); extern int maybe(void) __attribute__((weak));
        int go(void) { return base() + PyLong_FromLong(1) + (maybe ? maybe() : 0); }
    """
    kernel = shared_object(tmp_path, "kernel.so", source, base)
    assert check(make_wheel(tmp_path, {"demo/kernel.so": kernel, "demo.libs/libbase.so": base}), HOST).ok


def test_threads_dlopen_and_mathematics_come_without_a_version_too(tmp_path: Path) -> None:
    source = (
        "int pthread_create(); int dlopen(); int dlopen_more(); int sincos(); int lround(); "
        "int go(void) { return pthread_create() + dlopen() + sincos() + lround(); }"
    )
    linked = shared_object(tmp_path, "kernel.so", source, "-nodefaultlibs")
    assert check(make_wheel(tmp_path, {"demo/kernel.so": linked}), HOST).ok
    other = shared_object(tmp_path, "other.so", source + " int more(void) { return dlopen_more(); }", "-nodefaultlibs")
    assert "dlopen_more" in only(check(make_wheel(tmp_path, {"demo/other.so": other}), HOST), "undefined-symbol")


def test_driver_symbols_need_the_driver_to_be_needed(tmp_path: Path) -> None:
    stub = shared_object(tmp_path, "libcuda.so.1", "int cuInit(int f) { return f; }", "-Wl,-soname,libcuda.so.1")
    source = "int cuInit(int); int go(void) { return cuInit(0); }"
    spec = CompileCheck(demand=(), allow=(), needed=("libcuda.so.1",))
    linked = make_wheel(tmp_path, {"demo/k.so": shared_object(tmp_path, "k.so", source, stub)})
    assert check(linked, spec).ok
    assert only(check(linked, HOST), "needed-not-allowed")
    loose = make_wheel(tmp_path, {"demo/l.so": shared_object(tmp_path, "l.so", source)}, name="loose")
    assert "cuInit" in only(check(loose, spec), "undefined-symbol")


@pytest.mark.parametrize(
    ("entry", "wrong"),
    [
        ("/usr/local/cuda/lib64", "does not start at $ORIGIN"),
        ("lib", "does not start at $ORIGIN"),
        ("$ORIGIN/../../../usr/lib", "leaves the install folder"),
        ("$ORIGIN:", "''"),
        ("$ORIGIN/../nvidia/cu13/lib", None),
        ("$ORIGIN", None),
    ],
)
@pytest.mark.parametrize("tags", ["--enable-new-dtags", "--disable-new-dtags"])
def test_search_paths(tmp_path: Path, entry: str, wrong: str | None, tags: str) -> None:
    kernel = shared_object(tmp_path, "kernel.so", PLAIN, f"-Wl,{tags}", f"-Wl,-rpath,{entry}")
    report = check(make_wheel(tmp_path, {"demo/kernel.so": kernel}), HOST)
    if wrong is None:
        assert report.ok, report.findings
    else:
        message = only(report, "rpath")
        assert wrong in message and ("RUNPATH" if "enable" in tags else "RPATH") in message


def test_memory_protection(tmp_path: Path) -> None:
    stack = shared_object(tmp_path, "stack.so", PLAIN, "-Wl,-z,execstack")
    text = shared_object(tmp_path, "text.so", 'int go = 1; __asm__(".text\\n.quad go\\n");', "-Wl,-z,notext")
    report = check(make_wheel(tmp_path, {"demo/stack.so": stack, "demo/text.so": text}), HOST)
    assert [(f.kind, f.where) for f in report.findings] == [
        ("executable-stack", "demo/stack.so"),
        ("text-relocations", "demo/text.so"),
    ]


def test_glibc_newer_than_the_tag_promises(tmp_path: Path) -> None:
    source = "void *memcpy(void *, const void *, unsigned long); void *go(void) { return (void *)memcpy; }"
    kernel = shared_object(tmp_path, "kernel.so", source)
    for tag, limit in (("manylinux_2_12_x86_64", (2, 12)), ("manylinux2010_x86_64.manylinux_2_28_x86_64", (2, 12))):
        wheel = make_wheel(tmp_path, {"demo/kernel.so": kernel}, tag=f"cp311-cp311-{tag}")
        message = only(check(wheel, HOST), "glibc-too-new")
        assert "GLIBC_2.14 (memcpy)" in message and f"glibc {limit[0]}.{limit[1]}" in message
    plain_tag = make_wheel(tmp_path, {"demo/kernel.so": kernel}, tag="cp311-cp311-linux_x86_64")
    assert check(plain_tag, HOST).ok
    assert "x86_64-manylinux_2_5" in only(check(plain_tag, HOST, platform="x86_64-manylinux_2_5"), "glibc-too-new")


def test_wrong_version_in_metadata(tmp_path: Path, plain: Path) -> None:
    wheel = make_wheel(tmp_path, {"demo/plain.so": plain}, metadata_version="1.1")
    message = only(check(wheel, HOST), "metadata")
    assert message == "demo-1.0.dist-info/METADATA: Name and Version say version '1.1', the file name '1.0'"


def test_file_name_against_the_rest(tmp_path: Path, plain: Path) -> None:
    members: dict[str, bytes | str | Path] = {"demo/plain.so": plain}
    renamed = make_wheel(tmp_path, members, file="other-2.0-cp312-cp312-linux_x86_64.whl")
    messages = " | ".join(f.message for f in check(renamed, HOST).findings)
    for part in (
        "name 'demo'",
        "version '1.0'",
        "tags are cp311-cp311-manylinux_2_36_x86_64",
        "cp312-cp312-linux_x86_64",
    ):
        assert part in messages
    numbered = make_wheel(tmp_path, members, file="demo-1.0-1cu130-cp311-cp311-manylinux_2_36_x86_64.whl")
    assert "the file name's is '1cu130'" in only(check(numbered, HOST), "metadata")
    assert "file-name" in kinds(check(make_wheel(tmp_path, members, file="demo.whl"), HOST))


def test_pure_tag_with_an_object(tmp_path: Path, plain: Path) -> None:
    tagged = make_wheel(tmp_path, {"demo/plain.so": plain}, tag="py3-none-any")
    assert "platform tag is `any`" in only(check(tagged, HOST), "pure-with-object")
    flagged = make_wheel(tmp_path, {"demo/plain.so": plain}, purelib=True)
    assert "Root-Is-Purelib" in only(check(flagged, HOST), "pure-with-object")


@pytest.mark.parametrize(
    ("record", "extra", "message"),
    [
        ({"demo/a.py": "demo/a.py,sha256=AAAA,1"}, {}, "demo/a.py: differs from its hash"),
        ({"demo/a.py": "demo/a.py,md5=AAAA,1"}, {}, "demo/a.py: has a md5"),
        ({"demo/a.py": "demo/a.py,,"}, {}, "demo/a.py: has no hash"),
        ({"demo/a.py": "demo/a.py,sha256=AAAA,many"}, {}, "demo/a.py"),
        ({"demo/a.py": None}, {}, "demo/a.py: is not listed"),
        ({"x": "demo/gone.py,sha256=AAAA,1"}, {}, "demo/gone.py: is in RECORD but not"),
        ({"x": "a,b"}, {}, "malformed"),
        ({}, {"demo/late.py": b"import os"}, "demo/late.py: is not listed"),
    ],
)
def test_broken_record(tmp_path: Path, record: dict[str, str | None], extra: dict[str, bytes], message: str) -> None:
    report = check(make_wheel(tmp_path, {"demo/a.py": "1"}, record=record, extra=extra), HOST)
    assert set(kinds(report)) == {"record"}
    assert message in " | ".join(f"{f.where}: {f.message}" for f in report.findings)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_members_an_installer_would_misplace(tmp_path: Path) -> None:
    extra = {"../evil.py": b"", "/etc/cron.d/x": b"", "demo/a.py": b"2"}
    report = check(make_wheel(tmp_path, {"demo/a.py": "1"}, extra=extra), HOST)
    found = {(f.kind, f.where) for f in report.findings}
    assert {("unsafe-path", "../evil.py"), ("unsafe-path", "/etc/cron.d/x"), ("duplicate-member", "demo/a.py")} <= found
    assert not (tmp_path.parent / "evil.py").exists()


def test_a_symbolic_link_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, {"demo/a.py": "1"})
    with zipfile.ZipFile(wheel, "a") as archive:
        link = zipfile.ZipInfo("demo/link", (2020, 1, 1, 0, 0, 0))
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    assert "unsafe-path" in kinds(check(wheel, HOST))


def test_time_stamps_after_the_epoch(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, {"demo/a.py": "1"}, date=(2026, 3, 8, 0, 0, 2))
    assert "dated after 2026-03-08 00:00:00 UTC" in only(check(wheel, HOST, epoch=1_772_928_000), "newer-than-epoch")
    assert check(wheel, HOST, epoch=1_772_928_002).ok


def test_objects_that_are_none(tmp_path: Path, plain: Path) -> None:
    foreign = bytearray(plain.read_bytes())
    foreign[18] = 183
    truncated = plain.read_bytes()[:700]
    members: dict[str, bytes | str | Path] = {
        "demo/arm.so": bytes(foreign),
        "demo/script.so": "INPUT(libfoo.so.1)\n",
        "demo/short.so": truncated,
    }
    report = check(make_wheel(tmp_path, members), HOST)
    assert {(f.kind, f.where) for f in report.findings} == {
        ("machine", "demo/arm.so"),
        ("broken-object", "demo/script.so"),
        ("broken-object", "demo/short.so"),
    }
    assert [o.path for o in report.objects] == sorted(members)


def test_a_missing_or_broken_file_never_ends_in_a_traceback(tmp_path: Path, plain: Path) -> None:
    with pytest.raises(UsageError, match="is no file"):
        check(tmp_path / "none-1.0-py3-none-any.whl", HOST)
    wheel = make_wheel(tmp_path, {"demo/plain.so": plain})
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Refused, match="cannot be read as a wheel"):
        check(wheel, HOST)
    with pytest.raises(IntegrityError):
        check(make_wheel(tmp_path / "b", {"demo/plain.so": plain}), HOST, environment=[wheel])
    with pytest.raises(EnvironmentFailure, match="does not exist"):
        check(make_wheel(tmp_path / "b", {"demo/plain.so": plain}), HOST, environment=[tmp_path / "gone"])
    flipped = bytearray(whole)
    flipped[200] ^= 0xFF
    wheel.write_bytes(flipped)
    with pytest.raises(IntegrityError, match="damaged"):
        check(wheel, HOST)


def test_random_damage_is_found_or_refused(tmp_path: Path, plain: Path) -> None:
    """One byte flipped anywhere in the zip: a finding or one of our errors, never a pass of other bytes unseen."""
    wheel = make_wheel(tmp_path, {"demo/plain.so": plain})
    before = check(wheel, HOST)
    whole = wheel.read_bytes()
    dice = random.Random(120)
    for _ in range(60):
        data = bytearray(whole)
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        wheel.write_bytes(data)
        try:
            report = check(wheel, HOST)
        except ForgeError:
            continue
        assert not report.ok or report.objects == before.objects


def test_random_damage_inside_an_object(tmp_path: Path, plain: Path) -> None:
    """Bytes that RECORD vouches for, but that no ELF reader should trust."""
    dice = random.Random(13)
    whole = plain.read_bytes()
    for _ in range(40):
        data = bytearray(whole)
        for _ in range(8):
            data[dice.randrange(4, 1500 if dice.random() < 0.7 else len(data))] = dice.randrange(256)
        try:
            check(make_wheel(tmp_path, {"demo/plain.so": bytes(data)}), HOST)
        except ForgeError as error:
            pytest.fail(f"raised {error}")


def test_cuobjdump_must_be_installed(tmp_path: Path, plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(wheel_check.cubin.PACKAGES, "cuobjdump", "no-such-package-of-ours")
    wheel_check.cubin.tool.cache_clear()
    try:
        with pytest.raises(EnvironmentFailure, match="no-such-package-of-ours"):
            check(make_wheel(tmp_path, {"demo/plain.so": plain}), HOST)
    finally:
        wheel_check.cubin.tool.cache_clear()


def test_refusal_lists_findings_and_does_not_drown(tmp_path: Path) -> None:
    source = "\n".join(f"int f{i}(void); int g{i}(void) {{ return f{i}(); }}" for i in range(30))
    kernel = shared_object(tmp_path, "kernel.so", source, "-Wl,-rpath,/opt")
    report = check(make_wheel(tmp_path, {"demo/kernel.so": kernel}), HOST)
    with pytest.raises(Refused, match=r"refuses demo-1.0-.*: 31 findings") as caught:
        raise_for(report)
    assert caught.value.exit_code == 1
    assert "undefined-symbol: and 10 more" in caught.value.details
    assert any(d.startswith("rpath: demo/kernel.so: RUNPATH entry '/opt'") for d in caught.value.details)


def test_summary_and_table_show_device_code() -> None:
    item = RecordedObject(
        path="demo/fp4.so",
        size=1234567,
        cubins={"sm_120a": 7},
        ptx=("sm_120",),
        needed=("libcudart.so.13", "libc.so.6"),
    )
    report = WheelReport(file="demo.whl", sha256="0" * 64, size=1, objects=(item,), findings=())
    assert summary(report) == "1 shared object, sm_120a x7, PTX sm_120, needs libcudart.so.13"
    stream = io.StringIO()
    Console(file=stream, width=120).print(table(report))
    assert "demo/fp4.so" in stream.getvalue() and "sm_120a x7" in stream.getvalue()
