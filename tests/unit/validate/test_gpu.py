"""GPUs without a GPU: NVML's few functions are stood in for; locks and processes are real, and so is the absent driver."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from forge_core.console import Console
from forge_core.errors import EnvironmentFailure, Refused, UsageError
from forge_validate import gpu
from forge_validate.gpu import Gpu, Inventory, Lost, Process, chosen, demand_fit, fits, held
from forge_validate.gpu.locks import _shared
from forge_validate.gpu.memory import Baseline
from forge_validate.serving import Devices

QUIET = Console(quiet=True)
PRO_6000 = "NVIDIA RTX PRO 6000 Blackwell Server Edition"


def card(index: int, **changes: Any) -> Gpu:
    values: dict[str, Any] = {
        "index": index,
        "uuid": f"GPU-{index:04d}",
        "name": PRO_6000,
        "capability": "12.0",
        "memory_total": 96 << 30,
        "memory_used": 1 << 29,
        "processes": (),
        "virtualization": "none",
    }
    return Gpu(**(values | changes))


# --- inventory --------------------------------------------------------------------------------------------------------


def test_this_machine_is_asked_for_real() -> None:
    """Without a driver the library is not found, and that is an answer; with one there are GPUs."""
    found = gpu.inventory()
    if found.absent is None:
        assert found.driver and found.gpus
    else:
        assert found == Inventory(absent=found.absent)
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError_LibraryNotFound:
            assert "libnvidia-ml.so.1" in found.absent
        except pynvml.NVMLError:
            pass
        else:
            pynvml.nvmlShutdown()


def raising(code: int) -> Callable[..., Any]:
    def ask(*_: Any) -> Any:
        raise pynvml.NVMLError(code)

    return ask


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no NVIDIA driver is installed"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "not loaded"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "different versions"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "may not use"),
        (pynvml.NVML_ERROR_UNKNOWN, "does not answer: Unknown Error"),
    ],
)
def test_why_there_is_no_gpu(code: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", raising(code))
    found = gpu.inventory()
    assert found.absent is not None and said in found.absent and found.gpus == ()


@dataclass
class Card:
    """What one GPU answers; an NVMLError is raised instead."""

    uuid: Any = "GPU-0000"
    capability: Any = (12, 0)
    used: Any = 1 << 29
    processes: Any = ()
    mode: Any = 0
    mig: Any = field(default_factory=lambda: pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED))
    parts: tuple[Any, ...] = ()


def told(value: Any) -> Any:
    if isinstance(value, pynvml.NVMLError):
        raise value
    return value


class Driver:
    """NVML's functions over a list of cards."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cards: list[Card] = []
        self.open = 0
        self.looks = 0
        self.on_look: Callable[[int], None] = lambda number: None
        functions: dict[str, Callable[..., Any]] = {
            "nvmlInit": self._init,
            "nvmlShutdown": self._shutdown,
            "nvmlSystemGetDriverVersion": lambda: "580.95.05",
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 13020,
            "nvmlDeviceGetCount": self._count,
            "nvmlDeviceGetHandleByIndex": lambda index: self.cards[index],
            "nvmlDeviceGetUUID": lambda card: card if isinstance(card, str) else told(card.uuid),
            "nvmlDeviceGetName": lambda card: PRO_6000,
            "nvmlDeviceGetCudaComputeCapability": lambda card: told(card.capability),
            "nvmlDeviceGetMemoryInfo": lambda card: SimpleNamespace(total=96 << 30, used=told(card.used)),
            "nvmlDeviceGetComputeRunningProcesses": lambda card: [
                SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in told(card.processes)
            ],
            "nvmlDeviceGetVirtualizationMode": lambda card: told(card.mode),
            "nvmlDeviceGetMigMode": lambda card: told(card.mig),
            "nvmlDeviceGetMaxMigDeviceCount": lambda card: len(card.parts),
            "nvmlDeviceGetMigDeviceHandleByIndex": lambda card, number: told(card.parts[number]),
        }
        for name, function in functions.items():
            monkeypatch.setattr(pynvml, name, function)

    def _init(self) -> None:
        self.open += 1

    def _shutdown(self) -> None:
        self.open -= 1

    def _count(self) -> int:
        assert self.open > 0
        self.looks += 1
        self.on_look(self.looks)
        return len(self.cards)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver(monkeypatch)
    yield made
    assert made.open == 0, "NVML was left open"


NOT_SUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
LOST = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)


def test_what_the_driver_tells(driver: Driver) -> None:
    driver.cards = [Card(processes=((9, None), (4, 1 << 20))), Card(uuid="GPU-0001", mode=1, capability=(10, 3))]
    found = gpu.inventory()
    assert (found.absent, found.driver, found.cuda) == (None, "580.95.05", "13.2")
    first, second = found.gpus
    assert (first.index, first.uuid, first.capability) == (0, "GPU-0000", "12.0")
    assert (first.memory_used, first.memory_total) == (1 << 29, 96 << 30)
    assert first.processes == (Process(pid=4, used_bytes=1 << 20), Process(pid=9, used_bytes=None))
    assert (first.mig, first.virtualization) == (None, "none")
    assert (second.capability, second.virtualization) == ("10.3", "passthrough")
    assert found.lost == ()


def test_what_a_share_of_a_gpu_does_not_tell(driver: Driver) -> None:
    driver.cards = [Card(used=NOT_SUPPORTED, processes=NOT_SUPPORTED, mode=2)]
    (only,) = gpu.inventory().gpus
    assert (only.memory_used, only.memory_total, only.processes) == (None, None, None)
    assert only.virtualization == "vgpu"
    driver.cards[0].mode = 77
    assert gpu.inventory().gpus[0].virtualization == "unknown"


def test_mig_devices(driver: Driver) -> None:
    empty = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
    driver.cards = [Card(mig=[1, 1], parts=("MIG-a", empty, "MIG-b")), Card(uuid="GPU-0001", mig=[0, 1])]
    first, second = gpu.inventory().gpus
    assert first.mig == ("MIG-a", "MIG-b") and second.mig is None


def test_a_lost_gpu_is_listed_and_hides_no_other(driver: Driver) -> None:
    driver.cards = [Card(uuid=LOST), Card(uuid="GPU-0001")]
    found = gpu.inventory()
    assert found.lost == (Lost(index=0, why="GPU is lost"),)
    assert [g.index for g in found.gpus] == [1]


def test_a_driver_without_gpus(driver: Driver) -> None:
    assert gpu.inventory() == Inventory(absent="the NVIDIA driver 580.95.05 sees no GPU")


# --- choice -----------------------------------------------------------------------------------------------------------

FOUR = Inventory(
    driver="580", cuda="13.0", gpus=(card(0), card(1), card(2), card(3, mig=("MIG-3a", "MIG-3b"), processes=None))
)


@pytest.mark.parametrize(
    ("devices", "indices"),
    [
        (Devices(), []),
        (Devices(gpus="all"), [0, 1, 2, 3]),
        (Devices(gpus=("2", "0", "GPU-0002")), [0, 2]),
        (Devices(gpus=("MIG-3b",)), [3]),
        (Devices(gpus=("3:1", "mig3:0")), [3]),
        (Devices(cdi=("nvidia.com/gpu=all",)), [0, 1, 2, 3]),
        (Devices(cdi=("nvidia.com/gpu=1", "runtime.nvidia.com/gpu=gpu0")), [0, 1]),
        (Devices(cdi=("nvidia.com/gpu=GPU-0003",)), [3]),
    ],
)
def test_chosen(devices: Devices, indices: list[int]) -> None:
    assert [g.index for g in chosen(devices, FOUR)] == indices


@pytest.mark.parametrize("name", ["4", "GPU-9", "gpu", "3:2", "0:0", "MIG-x", "-1", "GPU-0002 "])
def test_a_gpu_that_is_not_there(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        chosen(Devices(gpus=("1", name)), FOUR)
    assert caught.value.message.endswith(name)
    assert "GPU 3 (" in str(caught.value.hint) and "GPU-0003" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["0", "amd.com/gpu=0", "nvidia.com/gpu", "nvidia.com/gpu="])
def test_what_is_no_cdi_name(name: str) -> None:
    with pytest.raises(UsageError, match="no CDI name"):
        chosen(Devices(cdi=(name,)), FOUR)


def test_a_serving_without_devices_needs_no_driver() -> None:
    assert chosen(Devices(), Inventory(absent="no driver")) == ()


def test_no_driver_is_the_environments_fault() -> None:
    with pytest.raises(EnvironmentFailure, match=r"wants GPUs \(all\).*no driver") as caught:
        chosen(Devices(gpus="all"), Inventory(absent="no driver"))
    assert caught.value.hint


@pytest.mark.parametrize("names", ["all", ("0", "1"), ("gpu1",)])
def test_a_lost_gpu_that_is_wanted(names: Any) -> None:
    found = Inventory(gpus=(card(0),), lost=(Lost(index=1, why="GPU is lost"),))
    with pytest.raises(EnvironmentFailure, match="lost GPU 1"):
        chosen(Devices(gpus=names), found)
    assert chosen(Devices(gpus=("0",)), found)


# --- fit --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "yes", "no"),
    [
        ("sm_120a", ["12.0"], ["12.1", "10.0", "9.0"]),
        ("sm_120f", ["12.0", "12.1"], ["10.0", "13.0"]),
        ("sm_121f", ["12.1"], ["12.0"]),
        ("sm_120", ["12.0", "12.1"], ["10.3", "11.0"]),
        ("sm_86", ["8.6", "8.9"], ["8.0", "9.0"]),
        ("sm_90a", ["9.0"], ["10.0", "12.0"]),
        ("compute_90", ["9.0", "12.0"], ["8.9"]),
        ("compute_120", ["12.0", "13.0"], ["10.3"]),
        ("compute_120a", ["12.0"], ["12.1", "13.0"]),
        ("compute_120f", ["12.0", "12.1"], ["13.0"]),
    ],
)
def test_fits(architecture: str, yes: list[str], no: list[str]) -> None:
    assert [c for c in yes + no if fits(architecture, c)] == yes


@pytest.mark.parametrize("text", ["sm_1", "120a", "sm_120b", "sm_120aa", ""])
def test_what_is_no_architecture(text: str) -> None:
    with pytest.raises(ValueError, match="no architecture"):
        fits(text, "12.0")


def test_one_fitting_architecture_per_gpu_is_enough() -> None:
    demand_fit(("sm_90a", "sm_120a"), (card(0), card(1, capability="9.0")))
    demand_fit((), ())
    demand_fit(("sm_120a",), ())


def test_a_gpu_of_another_architecture() -> None:
    gpus = (card(0), card(1, capability="9.0", name="NVIDIA H100"), card(2, capability="12.1", name="GB10"))
    with pytest.raises(EnvironmentFailure) as caught:
        demand_fit(("sm_120a",), gpus)
    assert "sm_120a" in caught.value.message and "GPU 1 (NVIDIA H100" in caught.value.message
    assert caught.value.message.endswith("capability 9.0")
    assert len(caught.value.details) == 1 and "12.1" in caught.value.details[0]


def test_a_record_without_architectures_is_no_fit() -> None:
    with pytest.raises(Refused):
        demand_fit((), (card(0),))


# --- locks ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "locks"
    monkeypatch.setenv("FORGE_LOCKS", str(folder))
    return folder


HOLD = """
import sys, time
from forge_core.console import Console
from forge_validate.gpu import Gpu, held
gpus = [Gpu(index=int(i), uuid=f"GPU-{int(i):04d}", name="x", capability="12.0") for i in sys.argv[1:]]
with held(gpus, Console(quiet=True)):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(locks: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds GPUs 1 and 2."""
    command = [sys.executable, "-c", HOLD, "2", "1"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        yield child
    finally:
        child.kill()
        child.communicate()


def take(*indices: int) -> None:
    with held([card(index) for index in indices], QUIET):
        pass


def test_another_process_holds_a_gpu(holder: subprocess.Popen[str]) -> None:
    began = time.monotonic()
    with pytest.raises(EnvironmentFailure) as caught:
        take(0, 2)
    assert time.monotonic() - began < 2
    assert f"process {holder.pid} of " in caught.value.message and "GPU 2 (" in caught.value.message
    assert caught.value.hint
    take(0, 3)  # what was taken before the refusal is free again, and others never were taken


def test_a_killed_holder_frees_its_gpus(holder: subprocess.Popen[str], locks: Path) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait(10)
    assert f"process {holder.pid}" in (locks / "GPU-0001.lock").read_text()  # its name stays, its lock does not
    with held([card(1), card(2)], QUIET):
        assert f"process {os.getpid()} " in (locks / "GPU-0001.lock").read_text()
    assert (locks / "GPU-0001.lock").read_text() == ""


def test_the_lock_is_given_back_after_an_error(locks: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        with held([card(0)], QUIET):
            with pytest.raises(EnvironmentFailure, match=f"process {os.getpid()} "):
                take(0)
            raise KeyboardInterrupt
    take(0)


def test_without_gpus_nothing_is_locked(locks: Path) -> None:
    with held([], QUIET):
        assert not locks.exists()


def test_verbose_says_where_the_locks_are(locks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with held([card(0)], Console(verbose=True)):
        assert str(locks) in capsys.readouterr().err


def test_other_users_can_lock_too(locks: Path) -> None:
    """Whatever the umask: the folder and the files are open to all."""
    before = os.umask(0o077)
    try:
        take(0)
    finally:
        os.umask(before)
    assert locks.stat().st_mode & 0o7777 == 0o1777
    assert (locks / "GPU-0000.lock").stat().st_mode & 0o777 == 0o666


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_meets_the_lock_of_root(monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest's own folders are closed to other users
    with tempfile.TemporaryDirectory() as root:
        Path(root).chmod(0o755)
        monkeypatch.setenv("FORGE_LOCKS", f"{root}/locks")
        take(0, 1)
        with held([card(0)], QUIET):
            child = os.fork()
            if child == 0:  # pragma: no cover
                os._exit(_as_nobody())
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def _as_nobody() -> int:
    try:
        os.setgid(65534)
        os.setuid(65534)
        take(1)
        try:
            take(0)
        except EnvironmentFailure as error:
            return 0 if "in use by another validation: process" in error.message else 98
    except BaseException:
        return 99
    return 97


def test_a_folder_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for place in (file, file / "below"):
        monkeypatch.setenv("FORGE_LOCKS", str(place))
        with pytest.raises(EnvironmentFailure, match="cannot be locked") as caught:
            take(0)
        assert "FORGE_LOCKS" in str(caught.value.hint)


def test_a_lock_file_that_is_a_link_is_not_followed(locks: Path, tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("keep")
    locks.mkdir()
    (locks / "GPU-0000.lock").symlink_to(precious)
    with pytest.raises(EnvironmentFailure, match="cannot be locked"):
        take(0)
    assert precious.read_text() == "keep"


def test_the_place_depends_on_the_host_not_on_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/nowhere")
    assert _shared() in (Path("/run/lock"), Path("/tmp"))


# --- memory -----------------------------------------------------------------------------------------------------------


def waiting(before: Baseline, **changes: Any) -> tuple[float, list[str]]:
    said: list[str] = []
    values: dict[str, Any] = {"slack_bytes": 1 << 20, "deadline_s": 0.05, "on_wait": said.append}
    return gpu.await_baseline(before, **(values | changes)), said


def test_memory_that_comes_back(driver: Driver) -> None:
    driver.cards = [Card(), Card(uuid="GPU-0001")]
    before = gpu.baseline(gpu.inventory().gpus)

    def free(look: int) -> None:
        driver.cards[1].used = (1 << 29) + ((5 << 30) if look < first + 3 else 1 << 20)

    first, driver.on_look = driver.looks + 1, free
    waited, said = waiting(before, deadline_s=30)
    assert 0.5 < waited < 10
    assert said == ["GPU 1 holds 5.37 GB more than before"] * 3


def test_memory_that_is_back_at_once_is_not_waited_for(driver: Driver) -> None:
    driver.cards = [Card()]
    before = gpu.baseline(gpu.inventory().gpus)
    driver.cards[0].used += 1 << 20
    waited, said = waiting(before, deadline_s=30)
    assert waited < 0.5 and said == []


def test_memory_that_does_not_come_back(driver: Driver) -> None:
    driver.cards = [Card(processes=((1, 5),)), Card(uuid="GPU-0001")]
    before = gpu.baseline(gpu.inventory().gpus)
    assert before.told == (f"GPU 0 ({PRO_6000}, GPU-0000) is also used by process 1 ({name_of(1)}) with 5 B",)
    driver.cards[0].processes = ((1, 5), (os.getpid(), None))
    driver.cards[0].used += (1 << 20) + 1
    with pytest.raises(EnvironmentFailure) as caught:
        waiting(before)
    assert caught.value.message.startswith("GPU 0 holds 1.0 MB more than before")
    assert f"{1 << 29} bytes before, {(1 << 29) + (1 << 20) + 1} now, {1 << 20} more allowed" in caught.value.details[0]
    assert caught.value.details[1] == f"process 1 ({name_of(1)}) with 5 B, there before"
    assert caught.value.details[2] == f"process {os.getpid()} ({name_of(os.getpid())}), new"


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def test_memory_that_nobody_holds(driver: Driver) -> None:
    driver.cards = [Card()]
    before = gpu.baseline(gpu.inventory().gpus)
    driver.cards[0].used += 1 << 30
    with pytest.raises(EnvironmentFailure) as caught:
        waiting(before)
    assert "no process computes there" in caught.value.details[-1]


def test_a_gpu_that_tells_only_its_processes(driver: Driver) -> None:
    driver.cards = [Card(used=NOT_SUPPORTED, processes=((1, None),))]
    before = gpu.baseline(gpu.inventory().gpus)
    assert waiting(before)[1] == []
    driver.cards[0].processes = ((1, None), (4194304, None))
    with pytest.raises(EnvironmentFailure, match="GPU 0 has 1 more processes than before") as caught:
        waiting(before)
    assert "process 4194304 (unknown name), new" in caught.value.details


def test_what_all_gpus_hold_together(driver: Driver) -> None:
    driver.cards = [Card(used=5), Card(uuid="GPU-0001", used=7)]
    both = gpu.inventory().gpus
    assert (gpu.used(both), gpu.used(both[:1]), gpu.used(())) == (12, 5, None)
    driver.cards[1].used = NOT_SUPPORTED
    assert gpu.used(both) is None
    driver.cards.pop()
    assert gpu.used(both) is None


def test_a_gpu_that_tells_nothing_is_no_baseline(driver: Driver) -> None:
    driver.cards = [Card(used=NOT_SUPPORTED, processes=NOT_SUPPORTED)]
    with pytest.raises(EnvironmentFailure, match="neither"):
        gpu.baseline(gpu.inventory().gpus)


def test_a_gpu_that_is_lost_meanwhile(driver: Driver) -> None:
    driver.cards = [Card()]
    before = gpu.baseline(gpu.inventory().gpus)
    driver.cards = [Card(uuid=LOST)]
    with pytest.raises(EnvironmentFailure, match="is gone: 0: GPU is lost"):
        waiting(before)


def test_a_driver_that_is_gone_meanwhile(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    driver.cards = [Card()]
    before = gpu.baseline(gpu.inventory().gpus)
    monkeypatch.setattr(pynvml, "nvmlInit", raising(pynvml.NVML_ERROR_DRIVER_NOT_LOADED))
    with pytest.raises(EnvironmentFailure, match="no longer answers: Driver Not Loaded"):
        waiting(before)


def test_without_gpus_nothing_is_waited_for() -> None:
    assert gpu.await_baseline(gpu.baseline(()), slack_bytes=0, deadline_s=0, on_wait=lambda text: None) == 0.0
