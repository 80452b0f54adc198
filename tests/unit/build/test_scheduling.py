"""The scheduler that runs in the builder: pure parts, made-up control groups, and real ninja with a fake compiler."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_build.compile.progress import Progress
from forge_core.cli import project_root

sys.path.insert(0, str(project_root() / "build" / "inside"))

from scheduling import Scheduler, broker, launch, memory, processes
from scheduling.admission import Unit, pick, victim
from scheduling.sizes import Sizes, margin

MB = 1_000_000
TESTS = project_root() / "tests"


# -- which unit starts next ------------------------------------------------------------------------------------------------


def unit(number: int, size: int, *, rss: int = 0, began: float = 0.0, solo: bool = False) -> Unit:
    made = Unit(number, f"u{number}", size)
    made.rss, made.began, made.solo = rss, began, solo
    return made


def picked(waiting: list[Unit], running: list[Unit], **options: Any) -> int | None:
    found = pick(waiting, running, **({"slots": 4, "budget": 100, "headroom": 1000} | options))
    return None if found is None else found.number


def test_the_heaviest_goes_first_and_a_light_one_beside() -> None:
    light, heavy = unit(1, 10), unit(2, 80)
    assert picked([light, heavy], []) == 2
    assert picked([light], [heavy]) == 1
    assert picked([light], [heavy], slots=1) is None


def test_what_does_not_fit_waits() -> None:
    assert picked([unit(1, 30)], [unit(2, 80)]) is None
    assert picked([unit(1, 30)], [unit(2, 60, rss=80)]) is None, "what it really has counts"
    assert picked([unit(1, 30)], [unit(2, 60, rss=10)], headroom=70) is None, "50 are still promised to the running one"
    assert picked([unit(1, 30)], [unit(2, 60, rss=10)], headroom=80) == 1


def test_light_units_leave_room_for_the_waiting_heavy_one() -> None:
    heavy = unit(1, 60)
    running = [unit(2, 70), unit(3, 20)]
    assert picked([heavy, unit(4, 10)], running) == 4, "fits beside the heavy one when the largest ends"
    running = [unit(2, 30), unit(3, 30), unit(4, 10)]
    assert picked([heavy, unit(5, 10)], running) is None, "would put the heavy one off for ever"


def test_one_over_the_budget_waits_for_an_empty_machine_and_runs_alone() -> None:
    huge = unit(1, 500)
    assert picked([huge, unit(2, 10)], [unit(3, 10)]) is None
    assert picked([huge], []) == 1
    assert picked([unit(2, 10)], [huge]) is None


def test_one_that_the_kernel_killed_runs_alone() -> None:
    assert picked([unit(1, 10, solo=True)], [unit(2, 10)]) is None
    assert picked([unit(2, 10)], [unit(1, 10, solo=True)]) is None


def test_where_others_leave_too_little_the_smallest_starts_in_the_end() -> None:
    waiting = [unit(1, 50), unit(2, 20)]
    assert picked(waiting, [], headroom=5) is None
    assert picked(waiting, [], headroom=30) == 2
    assert picked(waiting, [], headroom=5, patient=False) == 2
    assert picked(waiting, [unit(3, 10)], headroom=5, patient=False) is None


def test_the_youngest_of_several_is_given_up() -> None:
    old, young = unit(1, 10, began=1), unit(2, 10, began=2)
    assert victim([old, young], -1) is young
    assert victim([old, young], 0) is None
    assert victim([old], -1) is None


def test_what_is_known_of_a_unit_or_its_like_is_expected_of_it() -> None:
    sizes = Sizes(
        {"g/a.cu|sm_120a|nvcc 13.0": 100 * MB, "g/a.cu|sm_90a|nvcc 13.0": 200 * MB, "g/a.cu|sm_120a|nvcc 12": 50 * MB}
    )
    assert sizes.expected("g/a.cu", "sm_120a", "nvcc 12", "cuda") == margin(50 * MB)
    assert sizes.expected("g/a.cu", "sm_120a", "nvcc 14", "cuda") == margin(100 * MB)
    assert sizes.expected("g/a.cu", "sm_80", "nvcc 13.0", "cuda") == margin(200 * MB)
    assert sizes.expected("g/b.cu", "sm_120a", "nvcc 13.0", "cuda") > sizes.expected("g/b.cpp", "", "c++ 12", "c++") > 0


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 150), st.integers(1, 9)), min_size=1, max_size=25),
    st.integers(1, 8),
    st.integers(1, 12),
)
def test_whatever_comes_the_budget_holds_and_everything_is_compiled(
    units: list[tuple[int, int]], slots: int, window: int
) -> None:
    coming = [(unit(number, size), length) for number, (size, length) in enumerate(units)]
    length = {made.number: length for made, length in coming}
    waiting: list[Unit] = []
    running: list[Unit] = []
    left: dict[int, int] = {}
    for now in range(10_000):
        for made in [u for u in running if left[u.number] == now]:
            running.remove(made)
        while coming and len(waiting) + len(running) < window:
            waiting.append(coming.pop(0)[0])
        if not waiting and not running:
            return
        while (made := pick(waiting, running, slots=slots, budget=100, headroom=10**9)) is not None:
            waiting.remove(made)
            running.append(made)
            left[made.number] = now + length[made.number]
        assert running, "nothing runs, yet something waits"
        assert len(running) <= slots
        assert sum(u.size for u in running) <= 100 or len(running) == 1
    raise AssertionError("never ended")


# -- how much memory is left -----------------------------------------------------------------------------------------------


def machine(root: Path, available: int = 20_000 * MB, **files: str) -> Path:
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {available // 1024} kB\n")
    for name, text in files.items():
        (root / "proc" / "self" / name).write_text(text)
    return root


def group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / f"memory.{name}").write_text(f"{value}\n")


V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "36 31 0:32 {root} /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"


def test_without_control_groups_the_machine_s_word_counts(tmp_path: Path) -> None:
    assert memory.free(machine(tmp_path)) == 20_000 * MB // 1024 * 1024


def test_the_tightest_parent_counts_in_version_2(tmp_path: Path) -> None:
    root = machine(tmp_path, mountinfo=V2, cgroup="0::/ci/job/step\n")
    top = root / "sys/fs/cgroup"
    group(
        top / "ci",
        max=8_000 * MB,
        current=7_000 * MB,
        stat=f"anon 1\ninactive_file {2_000 * MB}\nactive_file {1_000 * MB}",
    )
    group(top / "ci/job", max="max", high="max", current=0, stat="")
    group(top / "ci/job/step", max=6_000 * MB, current=1_000 * MB, stat="")
    assert [g.folder.name for g in memory.groups(root)] == ["step", "ci"]
    assert memory.free(root) == 3_500 * MB, "file pages come back: the inactive whole, the active half"
    assert memory.headroom(1_000 * MB, 200 * MB, root) == 3_300 * MB
    group(top / "ci/job", high=2_000 * MB, current=1_500 * MB)
    assert memory.free(root) == 500 * MB, "memory.high throttles before memory.max kills"


def test_the_machine_s_floor_counts_beside_the_group_s(tmp_path: Path) -> None:
    root = machine(tmp_path, 1_024 * MB, mountinfo=V2, cgroup="0::/\n")
    group(root / "sys/fs/cgroup", max=8_000 * MB, current=0, stat="")
    assert memory.headroom(1_000 * MB, 200 * MB, root) == 24 * MB


def test_a_container_of_version_1_sees_its_own_limit_and_its_parents_least(tmp_path: Path) -> None:
    mounted = V1.format(root="/docker/abc")
    root = machine(tmp_path, mountinfo=mounted, cgroup="5:cpu:/\n4:memory:/docker/abc\n0::/\n")
    stat = f"hierarchical_memory_limit {3_000 * MB}\ntotal_inactive_file {100 * MB}\ntotal_active_file 0"
    group(root / "sys/fs/cgroup/memory", limit_in_bytes=9223372036854771712, usage_in_bytes=1_100 * MB, stat=stat)
    assert memory.free(root) == 2_000 * MB


def test_no_limit_of_version_1_is_none(tmp_path: Path) -> None:
    root = machine(tmp_path, mountinfo=V1.format(root="/"), cgroup="4:memory:/a/b\n")
    for place in ("", "a", "a/b"):
        group(root / "sys/fs/cgroup/memory" / place, limit_in_bytes=9223372036854771712, usage_in_bytes=5, stat="")
    assert memory.groups(root) == []
    group(root / "sys/fs/cgroup/memory/a", limit_in_bytes=700 * MB)
    assert memory.free(root) == 700 * MB - 5


def test_a_group_outside_of_the_namespace_leaves_what_is_mounted(tmp_path: Path) -> None:
    root = machine(tmp_path, mountinfo=V2, cgroup="0::/../other\n")
    group(root / "sys/fs/cgroup", max=500 * MB, current=0, stat="")
    assert memory.free(root) == 500 * MB


def test_this_machine_can_be_read() -> None:
    assert 0 < memory.free() <= psutil.virtual_memory().total


# -- what a command line compiles ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "name", "kind", "architecture"),
    [
        ("nvcc -gencode=arch=compute_120a,code=sm_120a -I/x.cu -c /s/csrc/gemm/a.cu -o a.o", "gemm/a.cu", "cuda", "sm_120a"),
        ("nvcc -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_80,code=[compute_80,sm_80] -x cu -c b.cu -o o",
         "b.cu", "cuda", "sm_80+sm_90a"),
        ("c++ -MMD -MF out.d -o x.o -c /s/common/logger.cpp", "common/logger.cpp", "c++", ""),
        ("/usr/bin/cc -c q.c -o q.o", "q.c", "c", ""),
        ("c++ a.o b.o -shared -o /w/module.so", "module.so", "link", ""),
        ("nvcc -dc -o o -include first.cpp d/second.cu", "d/second.cu", "cuda", ""),
    ],
)  # fmt: skip
def test_a_unit_is_known_by_folder_and_file(command: str, name: str, kind: str, architecture: str) -> None:
    found = launch.unit(command.split())
    assert found is not None
    assert (found["name"], found["kind"], found["architecture"]) == (name, kind, architecture)
    assert found["compiler"] == os.path.basename(command.split()[0])  # noqa: PTH119


@pytest.mark.parametrize("command", ["nvcc --version", "c++ -dumpfullversion", "c++ -E a.cpp"])
def test_what_is_no_compile_does_not_ask(command: str) -> None:
    assert launch.unit(command.split()) is None


# -- real ninja, fake compiler ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    status: int
    progress: Progress
    said: str
    runs: list[tuple[float, str, int, str]]
    """(time, unit, MB, + or -)"""

    def begun(self) -> list[str]:
        return [name for _, name, _, sign in self.runs if sign == "+"]

    def most(self) -> int:
        """MB of the compilers that ran at once, at most."""
        now = most = 0
        for _, _, amount, sign in self.runs:
            now += amount if sign == "+" else -amount
            most = max(most, now)
        return most


Units = dict[str, dict[str, Any]]


def prepare(folder: Path, units: Units, **plan: Any) -> list[str]:
    sizes = {f"{folder.name}/{name}.cu|sm_120a|fakecc 1.0": made["mb"] * MB for name, made in units.items()}
    plan = {"slots": 2, "budget": 1_000 * MB, "floor": 1 * MB, "sizes": sizes, "patience": 1} | plan
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "units.json").write_text(json.dumps({n: made | {"log": f"{folder}/log"} for n, made in units.items()}))
    return [sys.executable, str(TESTS / "scheduled.py"), str(folder)]


def ended(folder: Path, status: int, said: str) -> Ended:
    progress = Progress()
    for line in said.splitlines():
        progress.feed(line)
    log = folder / "log"
    rows = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    runs = sorted((float(when), name.removesuffix(".cu"), int(amount), sign) for when, name, amount, sign in rows)
    return Ended(status, progress, said, runs)


def run(folder: Path, units: Units, *options: str, **plan: Any) -> Ended:
    command = prepare(folder, units, **plan)
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [*command, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        env=env,
        check=False,
    )
    return ended(folder, done.returncode, done.stdout)


def left(folder: Path) -> list[str]:
    """Processes of a test that are still there."""
    found = []
    for process in psutil.process_iter():
        try:
            command = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if str(folder) in command and process.pid != os.getpid():
            found.append(command)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert shutil.which("ninja", path=str(Path(sys.executable).parent)), "the dev group has ninja"
    return tmp_path


def test_heavy_first_light_beside_and_never_above_the_budget(folder: Path) -> None:
    units = {f"light{n}": {"mb": 30, "seconds": 0.2} for n in range(4)} | {"heavy": {"mb": 120, "seconds": 0.6}}
    done = run(folder, units, slots=3, budget=270 * MB, settle=1)  # ninja starts the launchers one by one
    assert done.status == 0, done.said
    assert "heavy" in done.begun()[:2]
    # margins of 5 % and 50 MB: the heavy one and one light one fit, never two light ones beside it
    assert 120 < done.most() <= 150
    measured = {size.name.rsplit("/", 1)[-1]: size for size in done.progress.measured}
    assert len(measured) == 5
    assert 120 * MB < measured["heavy.cu"].peak < 160 * MB
    assert measured["heavy.cu"].compiler == "fakecc 1.0"
    assert (done.progress.done, done.progress.total) == (5, 5)
    assert done.progress.summary["units"] == 5
    assert left(folder) == []


def test_one_over_the_budget_runs_alone_and_is_said_to(folder: Path) -> None:
    units = {"huge": {"mb": 90, "seconds": 0.4}, "a": {"mb": 5, "seconds": 0.1}, "b": {"mb": 5, "seconds": 0.1}}
    done = run(folder, units, budget=80 * MB)
    assert done.status == 0, done.said
    assert done.most() == 90
    assert any("huge.cu may need" in note and "it runs alone" in note for note in done.progress.notes)


def test_a_failed_unit_ends_the_build_and_its_error_is_the_first(folder: Path) -> None:
    units = {"bad": {"mb": 60, "seconds": 0.3, "status": 2}} | {f"u{n}": {"mb": 5, "seconds": 3} for n in range(4)}
    done = run(folder, units, settle=1)
    assert done.status != 0
    assert len(done.begun()) == 2, "those that waited were sent home"
    assert done.progress.failed == "bad.o"
    assert done.progress.errors == [f"{folder}/bad.cu:1:1: error: bad.cu is broken"]
    assert "forge: not compiled, another unit failed" in done.said
    assert left(folder) == []


def test_where_it_is_to_go_on_it_does(folder: Path) -> None:
    units = {"bad": {"mb": 60, "status": 2}} | {f"u{n}": {"mb": 5} for n in range(4)}
    done = run(folder, units, "-k0", keep_going=True)
    assert done.status != 0
    assert sorted(done.begun()) == ["bad", "u0", "u1", "u2", "u3"]


def test_what_the_kernel_kills_is_compiled_again_alone(folder: Path) -> None:
    units = {"a": {"mb": 20, "seconds": 0.2, "once": f"{folder}/once"}} | {
        f"u{n}": {"mb": 5, "seconds": 0.2} for n in range(3)
    }
    done = run(folder, units)
    assert done.status == 0, done.said
    assert done.begun().count("a") == 2
    assert done.progress.summary["again"] == 1
    assert any("a.cu was killed by the kernel" in note for note in done.progress.notes)
    assert done.said.count("compiling a.cu") == 1, "the attempt that was given up leaves no output"


def test_what_dies_again_alone_fails(folder: Path) -> None:
    done = run(folder, {"a": {"mb": 5, "status": 137}, "b": {"mb": 5, "seconds": 0.1}})
    assert done.status != 0
    assert done.progress.failed == "a.o"


def started(folder: Path, units: Units, **plan: Any) -> subprocess.Popen[str]:
    command = prepare(folder, units, **plan)
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def until(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + 20
    while not (found := what()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def test_a_launcher_that_is_killed_frees_its_memory_and_takes_its_compiler_along(folder: Path) -> None:
    units = {"a": {"mb": 60, "seconds": 30}, "b": {"mb": 50, "seconds": 0.1}}
    with started(folder, units, budget=130 * MB, keep_going=True) as child:
        try:
            until(lambda: any("fake_compiler" in command for command in left(folder)))
            launchers = [
                p for p in psutil.Process(child.pid).children(recursive=True)
                if "launch.py" in " ".join(p.cmdline()) and "/a.cu" in " ".join(p.cmdline()) and "-S" in p.cmdline()
            ]  # fmt: skip
            for launcher in launchers:
                launcher.kill()
            said, _ = child.communicate(timeout=20)
        finally:
            child.kill()
    done = ended(folder, child.returncode, said)
    assert done.status != 0, "ninja saw a unit fail"
    assert any("the launcher of" in note and "a.cu is gone" in note for note in done.progress.notes), said
    assert ("b", "-") in [(name, sign) for _, name, _, sign in done.runs], "its memory was free again"
    assert left(folder) == []


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupt_leaves_no_process(folder: Path, sign: signal.Signals) -> None:
    units = {f"u{n}": {"mb": 10, "seconds": 60} for n in range(4)}
    with started(folder, units) as child:
        try:
            until(lambda: sum("fake_compiler" in command for command in left(folder)) >= 2)
            child.send_signal(sign)
            until(lambda: not left(folder))
        finally:
            for process in psutil.Process(child.pid).children(recursive=True):
                process.kill()
            child.kill()


def test_memory_under_the_floor_costs_the_youngest_its_run_but_not_the_build(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """In this process: the machine's memory is the one thing that is made up."""
    monkeypatch.syspath_prepend(str(TESTS))
    import scheduled

    units = {"old": {"mb": 30, "seconds": 1.5}, "young": {"mb": 10, "seconds": 1.0}}
    prepare(folder, units)
    low = {"until": 0.0}

    def headroom(*_: object) -> int:
        log = (folder / "log").read_text() if (folder / "log").exists() else ""
        if log.count("+") == 2 and not low["until"]:
            low["until"] = time.monotonic() + 0.05
        return -1 if time.monotonic() < low["until"] else 1_000 * MB

    monkeypatch.setattr(broker.memory, "headroom", headroom)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    status = scheduled.main(folder)
    captured = capfd.readouterr()
    done = ended(folder, status, captured.out + captured.err)
    assert done.status == 0, done.said
    assert done.progress.summary["again"] == 1
    assert any("was stopped, memory ran low" in note for note in done.progress.notes)
    assert len(done.begun()) == 3
    assert done.said.count("[code=") == 0
    assert left(folder) == []


def test_a_launcher_without_its_scheduler_says_so(folder: Path) -> None:
    env = os.environ | {"FORGE_SCHEDULER": str(folder / "nobody")}
    command = [
        sys.executable,
        "-I",
        "-S",
        str(project_root() / "build/inside/scheduling/launch.py"),
        "cc",
        "-c",
        "a.c",
        "-o",
        "a.o",
    ]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no scheduler answers" in done.stderr


def test_cmake_compiles_and_links_through_the_launcher(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.26)\nproject(p LANGUAGES C)\nadd_library(m SHARED sub/a.c sub/b.c)\n"
    )
    (folder / "sub").mkdir()
    for name in "ab":
        (folder / "sub" / f"{name}.c").write_text(f"int {name}(void) {{ return 1; }}\n")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with Scheduler({"slots": 2, "floor": 1 * MB}, {"cc": "12"}) as scheduler:
        env = os.environ | {"PATH": path} | scheduler.environment
        command = ["cmake", "-G", "Ninja", "-S", str(folder), "-B", str(folder / "out"), *scheduler.cmake_options]
        for argv in (command, ["ninja", "-C", str(folder / "out"), f"-j{scheduler.window}"]):
            subprocess.run(argv, env=env, check=True, timeout=60)
    captured = capfd.readouterr()
    done = ended(folder, 0, captured.out + captured.err)
    units = {(size.name, size.compiler) for size in done.progress.measured}
    assert units >= {("sub/a.c", "cc 12"), ("sub/b.c", "cc 12"), ("libm.so", "cc 12")}


def test_only_marked_processes_are_seen() -> None:
    mark = {processes.VARIABLE: "ours.7"}
    sleep = [sys.executable, "-c", "import time; time.sleep(30)"]
    with (
        subprocess.Popen(sleep, env=os.environ | mark) as ours,
        subprocess.Popen(sleep, env=os.environ | {"OTHER": "FORGE_UNIT=ours.8"}) as other,
    ):
        try:
            until(lambda: ours.pid in processes.uses("ours").get(7, processes.Use()).pids)
            assert set(processes.uses("ours")) == {7}
            processes.kill("ours", 7)
            assert ours.wait(5) == -signal.SIGKILL
            assert other.poll() is None
        finally:
            ours.kill()
            other.kill()
