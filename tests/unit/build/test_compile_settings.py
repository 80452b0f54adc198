"""What surrounds the scheduler outside of the container: shares, learned sizes, the cache's settings, progress for people."""

from __future__ import annotations

import json
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest

from forge_build import compile as stage
from forge_build.compile import cache, schedule, sizes
from forge_build.compile.cache import Cache
from forge_build.compile.progress import Progress
from forge_build.compile.sizes import Size
from forge_core.console import Console
from forge_core.engine import Engine
from forge_core.errors import EnvironmentFailure, UsageError
from forge_core.store import Store

GB = 1_000_000_000


def engine(total: float = 25e9, cores: int = 2, *, remote: bool = True) -> Engine:
    client = SimpleNamespace(info=lambda: {"MemTotal": int(total), "NCPU": cores})
    return cast(Engine, SimpleNamespace(client=client, remote=remote, address="ssh://elsewhere"))


def test_a_remote_machine_is_shared_out_whole_but_for_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORGE_MEMORY_FLOOR", raising=False)
    assert schedule.share(engine(25e9, 64)) == (24 * GB, 64)
    monkeypatch.setenv("FORGE_MEMORY_FLOOR", "3000")
    assert schedule.share(engine(25e9, 64)) == (22 * GB, 64)
    assert schedule.share(engine(4e9)) == (2 * GB, 2), "half at least"


def test_fewer_compilers_than_cores_where_somebody_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, cores in (("", 64), ("1", 1), ("100", 64)):
        monkeypatch.setenv("FORGE_JOBS", text)
        assert schedule.share(engine(25e9, 64))[1] == cores
    for text in ("0", "-1", "all"):
        monkeypatch.setenv("FORGE_JOBS", text)
        with pytest.raises(UsageError, match="FORGE_JOBS"):
            schedule.share(engine(25e9, 64))


def test_here_only_what_is_free_is_shared_out() -> None:
    memory, _ = schedule.share(engine(10e15, remote=False))
    assert 0 < memory < psutil.virtual_memory().total


def test_a_floor_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_MEMORY_FLOOR", "1 GB")
    with pytest.raises(UsageError, match="FORGE_MEMORY_FLOOR '1 GB' is no number of MB"):
        schedule.floor()


def test_the_inside_part_is_whole_and_told_what_there_is() -> None:
    made = schedule.inside(10 * GB, 4, {"a": 5}, cache={"tool": "ccache"})
    assert {Path(name).name for name in made.files} >= {"__init__.py", "broker.py", "launch.py", "memory.py"}
    assert all(name == f"/forge/inside/scheduling/{path.name}" and path.is_file() for name, path in made.files.items())
    assert (made.plan["slots"], made.plan["sizes"]) == (4, {"a": 5})
    assert 9 * GB < made.plan["budget"] < 10 * GB
    json.dumps(made.plan)


def measured(peak: int, cpu: float = 10.0, name: str = "gemm/x.cu", compiler: str = "nvcc 13.0.88") -> Size:
    return Size(name=name, architecture="sm_120a", compiler=compiler, peak=peak, cpu=cpu)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("FORGE_STORE", str(tmp_path / "store"))
    return Store.open()


def test_what_was_measured_is_known_to_the_next_build(store: Store) -> None:
    sizes.learn(store, [measured(4 * GB), measured(GB, compiler="nvcc 13.1.0")])
    known = sizes.known(store)
    assert known["gemm/x.cu|sm_120a|nvcc 13.0.88"] == 4 * GB
    assert known["gemm/x.cu|sm_120a|nvcc 13.1.0"] == GB
    assert known["gemm/fp8_gemm_kernel.cu|sm_120a|nvcc 13.0.88"] == 15_500_000_000, "committed"


def test_a_peak_rises_at_once_and_falls_by_half(store: Store) -> None:
    for peak, expected in ((4, 4), (6, 6), (2, 4)):
        sizes.learn(store, [measured(peak * GB)])
        assert [size.peak for size in sizes.learned(store)] == [expected * GB]


def test_this_machine_s_word_counts_more_than_the_committed(store: Store) -> None:
    sizes.learn(store, [measured(9 * GB, name="gemm/fp8_gemm_kernel.cu")])
    assert sizes.known(store)["gemm/fp8_gemm_kernel.cu|sm_120a|nvcc 13.0.88"] == 9 * GB


def test_an_object_out_of_a_cache_teaches_nothing(store: Store) -> None:
    sizes.learn(store, [measured(20_000_000, cpu=0.02)])
    assert sizes.learned(store) == ()


def test_a_spoilt_entry_is_as_good_as_none(store: Store) -> None:
    sizes.learn(store, [measured(GB)])
    entry = store.entry("unit-sizes", "learned")
    data = json.loads(entry.read_text())
    data["units"].append({"name": "half"})
    entry.write_text(json.dumps(data))
    assert len(sizes.learned(store)) == 1
    entry.write_text("{")
    assert sizes.learned(store) == ()


def test_the_cache_s_settings() -> None:
    assert cache.chosen(engine(), {}) == Cache("ccache")
    assert cache.chosen(engine(), {"FORGE_COMPILER_CACHE": "off", "FORGE_COMPILER_CACHE_REDIS": "x"}) is None
    shared = {"FORGE_COMPILER_CACHE": "sccache", "FORGE_COMPILER_CACHE_REDIS": "cache.example:6379"}
    assert cache.chosen(engine(remote=False), shared) == Cache("sccache", ("cache.example", 6379))
    six = cache.chosen(engine(remote=False), {"FORGE_COMPILER_CACHE_REDIS": "[::1]:6379"})
    assert six == Cache("ccache", ("::1", 6379))


@pytest.mark.parametrize(
    ("settings", "remote", "told"),
    [
        ({"FORGE_COMPILER_CACHE": "distcc"}, False, "'distcc' is none of ccache, sccache, off"),
        ({"FORGE_COMPILER_CACHE_REDIS": "redis://h:1/0"}, False, "is not HOST:PORT"),
        ({"FORGE_COMPILER_CACHE_REDIS": "h:99999"}, False, "is not HOST:PORT"),
        ({"FORGE_COMPILER_CACHE_REDIS": "h:6379"}, True, "on another machine"),
    ],
)
def test_a_setting_that_cannot_be_followed_is_refused(settings: dict[str, str], remote: bool, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        cache.chosen(engine(remote=remote), settings)


def test_a_shared_cache_is_a_deviation_and_a_local_one_leaves_no_trace() -> None:
    assert Cache("ccache").identity == {}
    assert Cache("ccache").deviations("a.whl") == ()
    assert Cache("sccache").identity == {"tool": "sccache"}, "its objects have other bytes"
    shared = Cache("ccache", ("h", 1))
    assert shared.identity == {"remote": True}
    (deviation,) = shared.deviations("a.whl")
    assert (deviation.kind, deviation.subject) == ("remote-cache", "a.whl")
    assert all(path.is_file() for tool in ("ccache", "sccache") for path in Cache(tool).files.values())  # type: ignore[arg-type]


def test_objects_of_another_builder_are_another_space() -> None:
    assert Cache("ccache").plan("builder:1")["space"] != Cache("ccache").plan("builder:2")["space"]


def test_the_way_to_the_remote_leads_there_and_nowhere_else_while_it_is_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            server.accept()[0].close()  # asked whether anybody is there
            link, _ = server.accept()
            with link:
                link.sendall(b"+" + link.recv(100))

        threading.Thread(target=answer, daemon=True).start()
        with Cache("ccache", ("127.0.0.1", server.getsockname()[1])).volumes() as mounts:
            assert mounts.pop(cache.VOLUME) == {"bind": "/forge/cache", "mode": "rw"}
            ((folder, mount),) = mounts.items()
            assert mount["bind"] == "/forge/remote"
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(f"{folder}/redis")
                link.sendall(b"PING")
                link.settimeout(5)
                assert link.recv(100) == b"+PING"
        assert not Path(folder).exists()


def test_a_remote_that_does_not_answer_is_the_environment_s_failure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(EnvironmentFailure, match=f"nothing answers at 127.0.0.1:{port}"):
        with Cache("ccache", ("127.0.0.1", port)).volumes():
            raise AssertionError("never opened")


def fed(*events: dict[str, object] | str) -> Progress:
    progress = Progress()
    for event in events:
        progress.feed(event if isinstance(event, str) else f"forge-scheduler: {json.dumps(event)}")
    return progress


def test_what_runs_is_told_to_people() -> None:
    running = [["gemm/a.cu", 13_200_000_000], ["b.cu", 600_000_000], ["c.cu", 1], ["d.cu", 2]]
    progress = fed({"event": "state", "running": running, "waiting": 12, "free": 4_100_000_000})
    assert progress.now == "a.cu 13.20 GB, b.cu 600.0 MB, c.cu 1 B and 1 more; 4.10 GB free"
    assert progress.waiting == 12
    assert fed().now == ""


def test_only_units_that_compiled_are_measured() -> None:
    row = {"event": "unit", "name": "a.cu", "kind": "cuda", "architecture": "sm_120a", "compiler": "nvcc 13"}
    row |= {"peak": 5, "cpu": 1.5, "wall": 2.0, "expected": 9}
    progress = fed(row | {"status": 0}, row | {"status": 256}, row | {"status": 0, "peak": 0})
    assert [(size.name, size.peak) for size in progress.measured] == [("a.cu", 5)]


def test_what_is_no_event_is_passed_over() -> None:
    progress = fed("forge-scheduler: {", "forge-scheduler: []", {"no": "event"}, {"event": "new kind"})
    assert progress.last == ""


def test_the_hit_rate_is_told() -> None:
    remote = {"hit": 2, "miss": 1, "error": 0, "timeout": 1}
    progress = fed({"event": "cache", "tool": "ccache", "hits": 3, "misses": 1, "remote": remote})
    assert progress.hits == "ccache had 3 of 4 (75 %), 2 from the remote, 1 errors of the remote"
    assert fed({"event": "cache", "tool": "ccache", "hits": 0, "misses": 0, "remote": {}}).hits == ""


def test_what_a_compile_took_is_told_unless_no_unit_ran(capsys: pytest.CaptureFixture[str]) -> None:
    none = {"event": "summary", "wall": 1.2, "peak": 0, "free": None, "cpu": 0.0, "units": 0, "again": 0}
    for summary, told in ((none, ""), (none | {"units": 3, "free": 2_000_000_000}, "3 units in 1.2 s")):
        stage._tell(Console().step("compile"), fed(summary))
        err = capsys.readouterr().err
        assert told in err
        assert bool(err) is bool(told)


def test_units_that_were_sent_home_are_no_failure() -> None:
    progress = fed(
        "FAILED: [code=75] b.o ",
        "nvcc -o b.o -Werror=x: error: is no message",
        "forge: not compiled, another unit failed",
        "[1/5] CC ok.o",
        "ok.cpp:1:1: error: that was none",
        "FAILED: [code=1] /w/a.o ",
        "nvcc -c a.cu",
        "a.cu(3): error: expected a ;",
        "[2/5] CC c.o",
        "c.cu(3): error: in another unit's output",
        "FAILED: [code=1] /w/d.o ",
        "d.cu(1): error: the second",
    )
    assert progress.failed == "a.o"
    assert progress.errors == ["a.cu(3): error: expected a ;"]
