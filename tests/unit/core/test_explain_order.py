"""Which line is the cause: near misses told apart, and what a wrapper, a rank or the kernel says about it."""

from __future__ import annotations

import pytest
from logs import healthy, joined

from forge_core.explain import Evidence, LogFinding, explain

CAPTURE = "[2026-11-30 14:20:00 TP0] Capture cuda graph begin. This can take up to several minutes."
LOAD = "[2026-11-30 14:12:00 TP0] Load weight begin. avail mem=90.00 GB"
TUNE = "[2026-11-30 14:15:00 TP0] Running FlashInfer autotune with cache: /cache/x.json"
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.38 GiB."
TMA = "[TensorRT-LLM][ERROR] Assertion failed: Failed to initialize cutlass TMA WS grouped gemm"
IMA = "CUDA error: an illegal memory access was encountered"
GLOO = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"
SIGQUIT = "[2026-11-30 14:21:00] Received sigquit from a child process. It usually means the child failed."


def told(*lines: str, evidence: Evidence | None = None) -> LogFinding:
    found = explain(lines, evidence)
    assert found is not None
    return found


def traceback(exception: str, *frames: str, rank: str = "TP1", time: str = "14:20:30") -> list[str]:
    where = [
        f'  File "/opt/sglang/{frame.partition(" ")[0]}", line 7, in {frame.partition(" ")[2]}' for frame in frames
    ]
    return [
        f"[2026-11-30 {time} {rank}] Scheduler hit an exception: Traceback (most recent call last):",
        *(line for place in where for line in (place, "    return self.run()", "           ^^^^^^^^^^")),
        exception,
        "",
    ]


@pytest.mark.parametrize(
    ("lines", "kind", "word"),
    [
        # one text, three kinds of out of memory with opposite remedies
        ([LOAD, OOM], "oom_gpu_init", "do not fit"),
        ([LOAD, CAPTURE, OOM], "oom_gpu_runtime", "REDUCE"),
        ([OOM], "oom_gpu_runtime", "REDUCE"),
        (["RuntimeError: Not enough memory. Please try to increase --mem-fraction-static."], "oom_gpu_init", "RAISE"),
        (traceback(OOM, "loader.py load_weights"), "oom_gpu_init", "do not fit"),
        (
            [LOAD, *traceback(OOM, "moe.py convert_moe_weights_to_flashinfer_trtllm_block_layout")],
            "oom_weight_shuffle",
            "cutlass",
        ),
        ([LOAD, *traceback(OOM, "loader.py process_weights_after_loading")], "oom_weight_shuffle", "cutlass"),
        ([LOAD, "Shuffling MoE weights for FlashInfer MXFP4 moe kernel", OOM], "oom_weight_shuffle", "cutlass"),
        (traceback(OOM, "pool.py init_memory_pool"), "oom_gpu_runtime", "REDUCE"),
        # headers
        (["a.cu:3:10: fatal error: cuda/std/utility: No such file or directory"], "cccl_include", "cccl"),
        (["a.cu:3:10: fatal error: cublasLt.h: No such file or directory"], "jit_headers", "headers"),
        (["a.cu:3:10: fatal error: ours.h: No such file or directory"], "compile_error", "says why"),
        (['a.cu(3): catastrophic error: cannot open source file "cuda/std/utility"'], "cccl_include", "cccl"),
        # what is not there
        (
            ["FileNotFoundError: [Errno 2] No such file or directory: '/usr/local/cuda/bin/nvcc'"],
            "jit_toolchain",
            "nvcc",
        ),
        (["/bin/sh: 1: nvcc: not found"], "jit_toolchain", "nvcc"),
        (
            ["FileNotFoundError: [Errno 2] No such file or directory: '/model/model-00002-of-00003.safetensors'"],
            "weights",
            "index",
        ),
        (
            ["ImportError: libnvrtc.so.12: cannot open shared object file: No such file or directory"],
            "import_abi",
            "major",
        ),
        (["ImportError: libcuda.so.1: cannot open shared object file: No such file or directory"], "no_gpu", "runtime"),
        # architectures
        (["nvcc fatal   : Unsupported gpu architecture 'compute_120a'"], "arch_toolkit", "CUDA version"),
        (["Assertion error (/deepgemm/x.hpp:56): Unsupported architecture"], "arch_mismatch", "backend"),
        (
            ["CUDA error: no kernel image is available for execution on the device"],
            "missing_kernel_image",
            "wheel-check",
        ),
        (["CUDA error (hopper/x.h:1): no kernel image is available"], "missing_kernel_image", "attention backend"),
        # kills
        (["nvcc error : 'cicc' died due to signal 9 (Kill signal)"], "oom_host_build", "fewer"),
        (["Exit code: -9"], "killed_sigkill", "memory.events"),
        (["exit code: 143"], "terminated", "SIGTERM"),
        (["Memory cgroup out of memory: Killed process 1 (python3)"], "oom_host", "limit"),
        (["Bus error (core dumped)"], "bus_error", "shm"),
        (["Illegal instruction (core dumped)"], "illegal_instruction", "CPU"),
        # a hang is no false alarm
        (["Watchdog timeout (self.watchdog_timeout=300)"], "watchdog", "hangs"),
        (
            ["Health check failed. Server couldn't get a response from detokenizer"],
            "health_timeout",
            "false alarm",
        ),
        # a driver
        (["CUDA driver version is insufficient for CUDA runtime version"], "driver_too_old", "newer driver"),
        (["Failed to initialize NVML: Driver/library version mismatch"], "driver_state", "reload"),
        # memory of two kinds on one device
        (["out of resource: shared memory, Required: 131072, Hardware limit: 101376"], "smem_limit", "99 KiB"),
        (["OSError: [Errno 28] No space left on device"], "disk_full", "free space"),
        (["Error while creating shared memory segment /dev/shm/nccl-abc (size 9637888)"], "nccl_shm", "shm"),
    ],
)
def test_near_misses(lines: list[str], kind: str, word: str) -> None:
    found = told(*lines)
    assert found.kind == kind and word in found.remedy


def test_one_text_has_two_meanings_by_phase() -> None:
    assert explain([TMA]) is None
    assert explain([TUNE, TMA, "[AutoTuner]: Autotuning process ends"]) is None
    assert explain([TUNE, TMA, *healthy(500)]) is None
    found = told(CAPTURE, TMA, *traceback("RuntimeError: what nobody knows", "x.py run"), SIGQUIT)
    assert (found.kind, found.line) == ("backend_policy", 2)
    found = told(TUNE, "[AutoTuner]: Autotuning process ends", TMA, SIGQUIT)
    assert found.kind == "backend_policy"
    # in the window it is what killed it only when something did
    found = told(TUNE, TMA, IMA, SIGQUIT)
    assert found.kind == "illegal_memory"


def test_what_the_autotuner_tries_is_no_cause() -> None:
    smem = "out of resource: shared memory, Required: 131072, Hardware limit: 101376"
    assert explain([TUNE, smem, *healthy(300)[66:]]) is None
    found = told(TUNE, smem, evidence=Evidence(exit_code=1))
    assert (found.kind, found.confidence) == ("smem_limit", "low")


def test_an_undefined_symbol_outranks_advice_on_architectures() -> None:
    lines = [
        "RuntimeError: flash_attn at sgl-kernel is only supported on sm90 and above",
        "[sgl_kernel] CRITICAL: Could not load any common_ops library!",
        "GPU Info: CUDA error: no kernel image is available for execution on the device",
        "ImportError: common_ops.abi3.so: undefined symbol: _ZN5torch7Library4_defE",
    ]
    found = told(*lines)
    assert (found.kind, found.line, found.confidence) == ("import_abi", 4, "high")
    assert told(*lines[:3]).kind == "arch_mismatch"


def test_a_banner_gives_way_to_what_stands_below() -> None:
    banner = "[sgl_kernel] CRITICAL: Could not load any common_ops library!"
    assert told(banner).confidence == "low"
    found = told(banner, "libnvrtc.so.12: cannot open shared object file: No such file or directory")
    assert (found.kind, found.line, found.confidence) == ("import_abi", 2, "high")
    assert told(banner, "no kernel image is available").kind == "missing_kernel_image"


def test_a_wrapper_gives_way_to_what_stands_inside() -> None:
    ninja = "RuntimeError: Ninja build failed. Ninja output:"
    found = told(
        LOAD,
        ninja,
        "[1/2] nvcc a.cu",
        'a.cu(3): error: identifier "x" is undefined',
        "ninja: build stopped: subcommand failed.",
    )
    assert (found.kind, found.line, found.role) == ("jit_compile", 4, "cause")
    found = told(ninja, "FAILED: a.o", "a.cpp:1:10: fatal error: cuda/atomic: No such file or directory")
    assert (found.kind, found.line) == ("cccl_include", 3)
    found = told(f"Exception: Capture cuda graph failed: {OOM}")
    assert found.kind == "oom_gpu_runtime"
    found = told(f"Exception: Capture cuda graph failed: {GLOO}")
    assert (found.kind, found.role) == ("graph_capture", "wrapper")


def test_the_earliest_cause_wins_whatever_its_rank() -> None:
    lines = [
        CAPTURE,
        *traceback(f"torch.AcceleratorError: {IMA}", "moe.py forward", rank="TP3"),
        *traceback(OOM, "graph.py capture", rank="TP0", time="14:20:31"),
        SIGQUIT,
    ]
    found = told(*lines)
    assert (found.kind, found.rank, found.phase) == ("illegal_memory", "TP3", "capture")
    assert [(one.kind, one.rank) for one in found.others if one.kind != "scheduler_exception"] == [
        ("oom_gpu_runtime", "TP0"),
        ("child_failed", None),
    ]
    assert any("moe.py forward" in word for word in found.evidence)


def test_consequences_at_other_ranks_are_none() -> None:
    lines = [
        CAPTURE,
        f"[2026-11-30 14:20:10 TP0] Exception: Capture cuda graph failed: {GLOO}",
        "[rank1]:[E1130 14:20:20 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout",
        *traceback(f"RuntimeError: {IMA}", "x.py run", rank="TP2"),
        SIGQUIT,
        "Rank 0 scheduler is dead. Please check if there are relevant logs.",
    ]
    found = told(*lines)
    assert (found.kind, found.rank) == ("illegal_memory", "TP2")
    assert {one.kind for one in found.others} >= {"graph_capture", "nccl_watchdog", "child_failed", "scheduler_dead"}


def test_tracebacks_of_two_ranks_that_are_woven_into_each_other() -> None:
    woven = [
        "[rank0]: Traceback (most recent call last):",
        "[rank1]: Traceback (most recent call last):",
        '[rank0]:   File "a.py", line 1, in load_weights',
        '[rank1]:   File "b.py", line 1, in capture',
        '[rank1]:     raise RuntimeError("CUDA out of memory")',
        "[rank0]: KeyError: 'lm_head'",
        f"[rank1]: {OOM}",
    ]
    found = told(*woven)
    assert (found.kind, found.rank, found.line) == ("oom_gpu_runtime", "rank1", 7)


def test_of_a_chain_the_last_is_the_cause() -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in first',
        "KeyError: 'lm_head'",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "Traceback (most recent call last):",
        '  File "a.py", line 2, in second',
        "what.Nobody: knows this",
    ]
    found = told(*lines)
    assert (found.kind, found.message, found.line) == ("unclassified", "what.Nobody: knows this", 9)
    assert found.last[-1] == "what.Nobody: knows this"


def test_an_exception_that_is_survived_is_none() -> None:
    """A server that goes on after it has handled it."""
    handled = ["Traceback (most recent call last):", '  File "a.py", line 1, in x', "what.Nobody: knows this"]
    lines = healthy(300)
    assert explain([*lines[:150], *handled, *lines[150:]]) is None
    assert explain([*lines, *handled, *lines[-10:]]) is None
    assert told(*lines[:150], *handled, *lines[150:], SIGQUIT).kind == "unclassified"
    assert told(*lines, *handled).kind == "unclassified"


def test_a_frame_makes_an_unknown_exception_known() -> None:
    found = told(*traceback("RuntimeError: invalid argument", "custom_all_reduce.py register_graph_buffers"), SIGQUIT)
    assert (found.kind, found.remedy) == ("custom_allreduce", "--disable-custom-all-reduce")


def test_the_kernel_is_believed_before_the_log() -> None:
    evidence = Evidence(stage="boot", exit_code=137, oom_killed=True, memory="8g")
    found = told(LOAD, GLOO, SIGQUIT, "RuntimeError: Worker died", evidence=evidence)
    assert (found.kind, found.confidence) == ("oom_host", "high")
    assert "8g" in found.message and any("exit status 137" in word for word in found.evidence)
    found = told("loading", evidence=Evidence(stage="build", exit_code=137, oom_kill=3))
    assert found.kind == "oom_host_build" and any("oom_kill 3" in word for word in found.evidence)
    # another cause in the log makes it less certain
    assert told(IMA, evidence=evidence).confidence == "medium"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (132, "illegal_instruction"),
        (134, "aborted"),
        (135, "bus_error"),
        (137, "killed_sigkill"),
        (139, "segfault"),
        (143, "terminated"),
        (1, "unclassified"),
    ],
)
def test_an_exit_status_speaks_when_the_log_does_not(code: int, kind: str) -> None:
    found = told(*healthy(40), evidence=Evidence(stage="boot", exit_code=code))
    assert (found.kind, found.line, found.confidence) == (kind, None, "low")
    assert found.last


def test_a_consequence_alone_says_so() -> None:
    found = told("Rank 0 scheduler is dead. Please check if there are relevant logs.")
    assert (found.role, found.confidence, found.hint) == ("consequence", "low", None)
    assert "earlier" in found.evidence[0]


def test_nothing_known_is_unclassified_with_the_last_lines() -> None:
    lines = [f"line {number}" for number in range(100)]
    found = told(*lines, evidence=Evidence(over=True))
    assert (found.kind, found.known, found.last) == ("unclassified", False, tuple(lines[-40:]))
    found = told(*lines, "E: what nobody has seen")
    assert (found.kind, found.message) == ("unclassified", "E: what nobody has seen")


def ranks(phase: str, time: str, *numbers: int) -> list[str]:
    texts = {"load": "Load weight begin. avail mem=90 GB", "memory": "Load weight end. type=X"}
    return [f"[2026-11-30 {time} TP{number}] {texts[phase]}" for number in numbers]


def test_a_stall_is_no_marker_for_too_long() -> None:
    start = [*ranks("load", "14:00:00", 0, 1, 2, 3)]
    assert explain([*start, "[2026-11-30 14:50:00 TP0] still here"]) is None
    found = told(*start, "[2026-11-30 15:30:00 TP0] still here")
    assert (found.kind, found.role, found.phase) == ("stall", "stall", "load")
    assert explain([*start, "[2026-11-30 14:50:00 TP0] still here"], Evidence(silent=60)) is None
    assert told(*start, "[2026-11-30 14:50:00 TP0] still here", evidence=Evidence(silent=1200)).kind == "stall"
    # a server that is ready may be silent for days
    assert (
        explain([*start, "The server is fired up and ready to roll!", "[2026-12-30 15:30:00 TP0] still here"]) is None
    )


def test_a_rank_that_is_behind_all_others_is_named() -> None:
    lines = [*ranks("load", "14:00:00", 0, 1, 2, 3), *ranks("memory", "14:05:00", 0, 1, 3)]
    assert explain([*lines, "[2026-11-30 14:30:00 TP0] still here"]) is None
    found = told(*lines, "[2026-11-30 15:30:00 TP0] still here")
    assert (found.kind, found.rank, found.line) == ("rank_straggler", "TP2", 3)


def test_a_cause_goes_before_a_stall() -> None:
    found = told(*ranks("load", "14:00:00", 0, 1), f"[2026-11-30 15:30:00 TP0] {IMA}")
    assert found.kind == "illegal_memory"


def test_secrets_of_a_cause_line_are_masked() -> None:
    found = told("sglang: error: argument --api-key: invalid, --api-key s3cr3tV4lue was given")
    assert "s3cr3tV4lue" not in found.model_dump_json()


def test_docker_s_json_lines_and_a_real_log_in_between() -> None:
    lines = [
        '{"log":"Traceback (most recent call last):\\n","stream":"stderr","time":"2026-11-30T14:00:00Z"}',
        '{"log":"  File \\"a.py\\", line 1, in x\\n","stream":"stderr","time":"2026-11-30T14:00:00Z"}',
        '{"log":"RuntimeError: No CUDA GPUs are available\\n","stream":"stderr","time":"2026-11-30T14:00:00Z"}',
    ]
    found = told(*lines)
    assert (found.kind, found.message) == ("no_gpu", "RuntimeError: No CUDA GPUs are available")
    assert explain(joined(healthy(200)).splitlines(keepends=True)) is None


def test_what_a_server_got_ready_after_is_not_why_it_died_later() -> None:
    lines = healthy(300)
    lines.insert(30, "OSError: [Errno 28] No space left on device")
    found = told(*lines)
    assert (found.kind, found.confidence) == ("disk_full", "medium")
    assert any("got ready after it" in word for word in found.evidence)
    found = told(*lines, f"torch.AcceleratorError: {IMA}", SIGQUIT)
    assert found.kind == "illegal_memory"
    assert [one.kind for one in found.others] == ["disk_full", "child_failed"]
