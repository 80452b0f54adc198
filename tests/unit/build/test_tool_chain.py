"""The image's tool chain: its links, what the check sees of it, how that is judged; and the health check."""

from __future__ import annotations

import base64
import copy
import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from wheel_factory import shared_object

from forge_build import lock as locks
from forge_build import manifest as manifests
from forge_build.image_check import tool_chain
from forge_build.image_check.tool_chain import ToolChain
from forge_build.lock import LockedWheel
from forge_build.manifest import AllowedFile
from forge_core.cli import project_root
from forge_core.errors import UsageError


def script(name: str) -> ModuleType:
    path = project_root() / "build" / "inside" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"inside_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- CUDA_HOME ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Site-packages as the nvidia-* wheels leave them."""
    cuda = tmp_path / "site" / "nvidia" / "cu13"
    for name in ("bin/nvcc", "bin/ptxas", "include/cuda.h", "nvvm/bin/cicc", "lib/libnvperf_host.so"):
        (cuda / name).parent.mkdir(parents=True, exist_ok=True)
        (cuda / name).write_text(name)
    for name in ("libcudart.so.13", "libcufft.so.12", "libnvrtc.alt.so.13", "libnvrtc-builtins.so.13.0"):
        (cuda / "lib" / name).write_text(name)
    return tmp_path / "site"


def test_the_links_lead_into_the_wheels_and_leave_them_alone(site: Path, tmp_path: Path) -> None:
    before = sorted(site.rglob("*"))
    link = script("link_cuda")
    home, driver = tmp_path / "cuda", tmp_path / "libcuda.so.1"
    assert link.link(home, link.tool_chain(site), str(driver)) == [
        "libcudart.so",
        "libcufft.so",
        "libnvrtc-builtins.so",
    ]
    assert sorted(site.rglob("*")) == before
    for name in ("bin/nvcc", "include/cuda.h", "nvvm/bin/cicc", "lib64/libcudart.so.13", "lib/libcudart.so"):
        assert (home / name).is_file(), name
    assert (home / "lib64" / "libcudart.so").read_text() == "libcudart.so.13"
    # nvcc looks in `..` of the folder it was called in; a linked folder would lead into the wheels
    assert not (home / "bin").is_symlink()
    stub = home / "lib64" / "stubs" / "libcuda.so"
    assert not stub.exists()
    driver.write_text("mounted")
    assert stub.read_text() == "mounted"


def test_another_cuda_or_two_tool_chains_are_refused(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = script("link_cuda")
    (tmp_path / "cuda").mkdir()
    with pytest.raises(SystemExit):
        link.link(tmp_path / "cuda", site / "nvidia" / "cu13")
    assert "brings another CUDA" in capsys.readouterr().err
    (site / "nvidia" / "cu12" / "bin").mkdir(parents=True)
    (site / "nvidia" / "cu12" / "bin" / "nvcc").write_text("")
    with pytest.raises(SystemExit):
        link.tool_chain(site)
    assert "there are 2" in capsys.readouterr().err


# -- what is seen inside -----------------------------------------------------------------------------------------------


@pytest.fixture
def inside() -> ModuleType:
    return script("tool_chain")


def test_needs_are_those_of_every_shared_object(inside: ModuleType, tmp_path: Path) -> None:
    one = shared_object(tmp_path / "a", "libone.so.13", "int one(void) { return 1; }", "-Wl,-soname,libcudart.so.12")
    two = shared_object(tmp_path / "b", "two.so", "int one(void); int two(void) { return one(); }", one)
    (tmp_path / "link.so").symlink_to(two)
    (tmp_path / "text.so").write_text("no object")
    year = shared_object(
        tmp_path / "c", "libcupti.so.2025.1.1", "int c(void) { return 1; }", "-Wl,-soname,libcupti.so.12"
    )
    found, sonames = inside.needs(tmp_path)
    assert "libcudart.so.12" in found[str(two)]
    assert str(tmp_path / "link.so") not in found
    assert sonames == {str(one): "libcudart.so.12", str(year): "libcupti.so.12"}
    assert inside.majors(found | {str(two.with_name("libcublas.so.13")): []}, sonames) == {
        "12": sorted([str(one), str(two), str(year)]),
        "13": [str(two.with_name("libcublas.so.13"))],
    }


def test_libraries_numbered_otherwise_are_no_sign_of_a_major(inside: ModuleType) -> None:
    assert inside.majors({"/s/a.so": ["libcusolver.so.12", "libcufft.so.12", "libcusparse.so.12"]}, {}) == {}
    assert inside.majors({"/s/libcudart-1b2c.so.12.4": []}, {}) == {"12": ["/s/libcudart-1b2c.so.12.4"]}


def test_the_stub_has_every_function_that_is_wanted_and_says_no_device(tmp_path: Path) -> None:
    """In a process of its own: a loaded library stays."""
    driver = "int cuInit(int f) { return 0; } int cuCtxGetDevice(void) { return 0; }"
    real = shared_object(tmp_path / "real", "libcuda.so.1", driver, "-Wl,-soname,libcuda.so.1")
    source = (
        "int cuInit(int f); int cuCtxGetDevice(void); int ask(void) { return cuInit(0) * 1000 + cuCtxGetDevice(); }"
    )
    user = shared_object(tmp_path / "site", "user.so", source, real)
    program = f"""
import ctypes, importlib.util, json, os, pathlib
spec = importlib.util.spec_from_file_location("c", {str(project_root() / "build" / "inside" / "tool_chain.py")!r})
c = importlib.util.module_from_spec(spec); spec.loader.exec_module(c)
count = c.stub_driver(c.needs(pathlib.Path({str(tmp_path / "site")!r}))[0], pathlib.Path({str(tmp_path / "stub")!r}))
print(json.dumps([count, ctypes.CDLL({str(user)!r}).ask(), os.environ["LD_LIBRARY_PATH"]]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [4, 100_100, str(tmp_path / "stub")]


def test_programs_on_the_path_count_once_each(
    inside: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "one" / "nvcc").write_text("")
    (tmp_path / "one" / "nvcc").chmod(0o755)
    (tmp_path / "two" / "nvcc").symlink_to(tmp_path / "one" / "nvcc")
    monkeypatch.setenv("PATH", f"{tmp_path / 'one'}:{tmp_path / 'two'}")
    assert inside.on_path("nvcc") == [str(tmp_path / "one" / "nvcc")]
    (tmp_path / "two" / "nvcc").unlink()
    (tmp_path / "two" / "nvcc").write_text("")
    assert len(inside.on_path("nvcc")) == 1, "what cannot be run is no program"
    (tmp_path / "two" / "nvcc").chmod(0o755)
    assert inside.on_path("nvcc") == [str(tmp_path / "one" / "nvcc"), str(tmp_path / "two" / "nvcc")]


def test_what_a_cuda_home_lacks_is_named(inside: ModuleType, site: Path, tmp_path: Path) -> None:
    link = script("link_cuda")
    link.link(tmp_path / "cuda", site / "nvidia" / "cu13", str(tmp_path / "none"))
    found = inside.absent(tmp_path / "cuda")
    assert "include/cccl/cuda/std/utility" in found
    assert "bin/nvcc" not in found
    (site / "nvidia" / "cu13" / "bin" / "ptxas").unlink()
    assert {"bin/ptxas", f"bin/ptxas -> {site / 'nvidia' / 'cu13' / 'bin' / 'ptxas'}"} <= set(
        inside.absent(tmp_path / "cuda")
    )


# -- judging -----------------------------------------------------------------------------------------------------------

NVCC = "/site/nvidia/cu13/bin/nvcc"
EXPECTED = ToolChain("/usr/local/cuda", "13.0.88", "sm_120a", 10001)
SEEN: dict[str, Any] = {
    "stub": 35,
    "on_path": [NVCC],
    "anywhere": [NVCC],
    "home": "/usr/local/cuda",
    "nvcc": "13.0.88",
    "ninja": "1.13.0",
    "gcc": "12.2.0",
    "g++": "12.2.0",
    "absent": [],
    "majors": {"13": ["/site/a.so"]},
    "compiled": {"ok": True, "detail": {"cubins": {"sm_120a": 1}, "ptx": [], "tool": []}},
    "host": {"ok": True, "detail": "compiled"},
    "triton": {
        "ok": True,
        "detail": {"cubins": {"sm_120a": 1}, "ptx": [], "tool": ["/usr/local/cuda/bin/ptxas", "13.0.88"]},
    },
    "folders": {"TRITON_CACHE_DIR": ["/cache/triton", 10001, True]},
}
Change = Callable[[dict[str, Any]], object]


def test_a_tool_chain_as_intended_passes() -> None:
    rows = tool_chain.judge(SEEN, EXPECTED)
    assert len(rows) == 8
    assert all(text and not findings for _, text, findings in rows)


@pytest.mark.parametrize(
    ("check", "where", "change"),
    [
        ("nvcc", "PATH", lambda s: s["on_path"].append("/usr/bin/nvcc")),
        ("nvcc", "PATH", lambda s: (s["on_path"].clear(), s["anywhere"].clear())),
        ("nvcc", "/usr/lib/cuda/bin/nvcc", lambda s: s["anywhere"].append("/usr/lib/cuda/bin/nvcc")),
        ("nvcc", "version", lambda s: s.update(nvcc="12.9.86")),
        ("nvcc", "version", lambda s: s.update(nvcc="")),
        ("tools", "ninja", lambda s: s.update(ninja="")),
        ("tools", "g++", lambda s: s.update({"g++": ""})),
        ("CUDA_HOME", "CUDA_HOME", lambda s: s["absent"].append("lib64/libcudart.so")),
        ("CUDA_HOME", "CUDA_HOME", lambda s: s.update(home=None)),
        ("device code", "compiled", lambda s: s.update(compiled={"ok": False, "detail": "cannot find -lcudart"})),
        ("device code", "compiled", lambda s: s["compiled"]["detail"].update(cubins={"sm_90": 1})),
        ("device code", "compiled", lambda s: s["compiled"]["detail"].update(cubins={})),
        ("device code", "compiled", lambda s: s["compiled"]["detail"].update(ptx=["sm_120"])),
        ("host code", "host", lambda s: s.update(host={"ok": False, "detail": "cuda/std/utility: No such file"})),
        ("triton", "triton", lambda s: s.update(triton={"ok": False, "detail": "no ptxas"})),
        ("triton", "triton", lambda s: s["triton"]["detail"].update(tool=["/site/triton/ptxas", "12.9.86"])),
        ("triton", "triton", lambda s: s["triton"]["detail"].update(cubins={"sm_120": 1})),
        ("CUDA major", "CUDA 12", lambda s: s["majors"].update({"12": ["/site/b.so"] * 5})),
        ("CUDA major", "CUDA 13", lambda s: s["majors"].clear()),
        ("run-time kernels", "TRITON_CACHE_DIR", lambda s: s["folders"].update(TRITON_CACHE_DIR=["/", 0, True])),
        ("run-time kernels", "TRITON_CACHE_DIR", lambda s: s["folders"].update(TRITON_CACHE_DIR=["/c", 10001, False])),
    ],
)
def test_each_fault_of_it_is_named(check: str, where: str, change: Change) -> None:
    seen = copy.deepcopy(SEEN)
    change(seen)
    rows = {name: findings for name, _, findings in tool_chain.judge(seen, EXPECTED)}
    assert [finding.where for finding in rows.pop(check)] == [where]
    assert not any(rows.values()), "one fault, one check"


def test_files_of_another_cuda_may_be_meant() -> None:
    seen = copy.deepcopy(SEEN)
    seen["majors"]["12"] = ["/o/lib/python3.11/site-packages/triton/cupti/a.so", "/o/lib/python3.11/site-packages/b.so"]
    allowed = [AllowedFile(path="triton/cupti/*", reason="the profiler alone loads it")]
    rows = {name: (text, findings) for name, text, findings in tool_chain.judge(seen, EXPECTED, allowed)}
    assert [finding.message for finding in rows["CUDA major"][1]] == [
        "the image is for CUDA 13, but there is /o/lib/python3.11/site-packages/b.so"
    ]
    seen["majors"]["12"].pop()
    rows = {name: (text, findings) for name, text, findings in tool_chain.judge(seen, EXPECTED, allowed)}
    assert rows["CUDA major"] == ("13 alone, but for 1 files that the manifest allows", [])


def test_device_code_is_listed_here_and_not_believed(tmp_path: Path) -> None:
    plain = shared_object(tmp_path, "plain.so", "int f(void) { return 1; }").read_bytes()
    seen = {
        "compiled": {"ok": True, "detail": base64.b64encode(plain).decode()},
        "triton": {"ok": True, "detail": ["/ptxas", "13.0.88", base64.b64encode(b"nonsense").decode()]},
    }
    found = tool_chain.device_code_of(seen)
    assert found["compiled"] == {"ok": True, "detail": {"cubins": {}, "ptx": [], "tool": []}}
    assert found["triton"]["ok"] is False or found["triton"]["detail"]["cubins"] == {}
    failed = {name: {"ok": False, "detail": "no"} for name in ("compiled", "triton")}
    assert tool_chain.device_code_of(failed) == {}


def test_the_profile_asks_for_what_its_lock_has() -> None:
    plan = manifests.load("sm120")
    found = tool_chain.expect(plan, locks.load(plan).wheels["runtime"])
    assert found == ToolChain("/usr/local/cuda", "13.0.88", "sm_120a", 10001)
    assert tool_chain.expect(manifests.load("rehearsal"), ()) is None
    other = LockedWheel(name="one", version="1", file="one-1-py3-none-any.whl", sha256="0" * 64, size=1)
    with pytest.raises(UsageError, match="no nvidia-cuda-nvcc"):
        tool_chain.expect(plan, (other,))


# -- the health check --------------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[tuple[int, list[int]]]:
    statuses = [200]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(statuses[0] if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    listening = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    yield listening.server_port, statuses
    listening.shutdown()
    listening.server_close()
    thread.join()


def test_the_health_check_asks_the_port_that_the_server_was_given(
    server: tuple[int, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    port, statuses = server
    healthy = script("healthy")
    line = tmp_path / "cmdline"
    line.write_bytes(f"tini\0-s\0--\0sglang\0serve\0--port\0{1}\0--port\0{port}\0".encode())
    assert healthy.main(line) == 0
    statuses[0] = 503
    assert healthy.main(line) == 1
    line.write_bytes(f"sglang\0--port={port}\0".encode())
    assert healthy.main(line) == 1
    statuses[0] = 200
    assert healthy.main(line) == 0
    line.write_bytes(b"sglang\0--port\0nonsense\0")
    assert healthy.main(line) == 1
    assert healthy.port(["sglang"]) == "30000"
