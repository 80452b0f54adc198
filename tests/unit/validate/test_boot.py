"""The parts of boot that need no engine: phases, and why a server died."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_core.errors import EnvironmentFailure, ForgeError, Refused, UsageError
from forge_validate.launch import launch_failure, obituary
from forge_validate.phases import Watch
from forge_validate.serving import Phase

PHASES = (
    Phase(name="start", until="server_args=", deadline=10),
    Phase(name="load", until="Load weight end", deadline=20),
    Phase(name="warm-up", until="fired up", deadline=30),
)


def test_phases_end_by_their_lines() -> None:
    watch = Watch(PHASES, stall=5, began=100)
    assert watch.see(["noise", "server_args=ServerArgs()"], 103) == ["start"]
    assert (watch.phase, watch.done) == ("load", False)
    assert watch.see(["Load weight end."], 110) == ["load"]
    assert watch.see(["The server is fired up and ready to roll!"], 112) == ["warm-up"]
    assert watch.done
    assert watch.taken == {"start": 3, "load": 7, "warm-up": 2}


def test_a_later_line_ends_the_phases_before_it() -> None:
    watch = Watch(PHASES, stall=5, began=0)
    assert watch.see(["fired up"], 4) == ["warm-up"]
    assert watch.done


def test_deadlines_are_per_phase_and_name_it() -> None:
    watch = Watch(PHASES, stall=5, began=0)
    assert watch.late(10) is None
    late = watch.late(10.1)
    assert late is not None and late.name == "start" and late.deadline == 10
    watch.see(["server_args="], 9)
    assert watch.late(28) is None
    late = watch.late(29.1)
    assert late is not None and late.name == "load"
    watch.see(["fired up"], 29)
    late = watch.late(60)
    assert late is not None and late.name == "health"


def test_a_stall_is_told_once_per_span_of_silence() -> None:
    watch = Watch(PHASES, stall=5, began=0)
    assert watch.stalled(4) is None
    assert watch.stalled(5) == 5
    assert watch.stalled(6) is None
    assert watch.stalled(10) == 10
    watch.see(["line"], 11)
    assert watch.stalled(12) is None


TRACEBACK = """\
[2026-11-30 03:00:00] server_args=ServerArgs(...)
[2026-11-30 03:00:09] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/scheduler.py", line 1, in run
    return loader()
KeyError: 'lm_head'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/x/scheduler.py", line 2, in run
    raise ValueError
safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer

[2026-11-30 03:00:10] Received sigquit from a child process. It usually means the child failed.
Traceback (most recent call last):
  File "/x/launch_server.py", line 9, in run
RuntimeError: Rank 0 scheduler is dead. Please check if there are relevant logs.
""".splitlines()


def failure(text: str, *, code: int = 1, oom: bool = False) -> ForgeError:
    return launch_failure(text.splitlines(), exit_code=code, oom_killed=oom, memory="8g", log=Path("server.log"))


@pytest.mark.parametrize(
    ("line", "kind", "cause"),
    [
        ("launch_server.py: error: unrecognized arguments: --nope", UsageError, "--nope"),
        ("sglang: error: argument --device: invalid choice: 'tpu'", UsageError, "--device"),
        ("OSError: [Errno 98] error while attempting to bind: address already in use", EnvironmentFailure, "address"),
        ("RuntimeError: Cannot find any model weights with `/model`", UsageError, "weights"),
        ("RuntimeError: No CUDA GPUs are available", EnvironmentFailure, "CUDA"),
        ("ValueError: No NvFp4 MoE backend supports the deployment configuration", Refused, "NvFp4"),
        ("PermissionError: [Errno 13] Permission denied: '/model/config.json'", UsageError, "/model"),
    ],
)
def test_whose_fault_it_is(line: str, kind: type[ForgeError], cause: str) -> None:
    text = "\n".join(["start", "Traceback (most recent call last):", '  File "x"', line, "last words"])
    error = failure(text)
    assert type(error) is kind
    assert cause in error.message
    # What argparse writes around its error is usage: a screenful that tells nothing more.
    assert error.details[-1:] == (() if "error: " in error.message else ("last words",))
    assert error.log == Path("server.log")


def test_out_of_memory_is_said() -> None:
    for error in (failure("loading", code=137, oom=True), failure("Exit code: -9", code=137)):
        assert type(error) is Refused and "out of memory" in error.message and "8g" in error.message


def test_a_kill_without_a_reason_is_not_called_out_of_memory() -> None:
    error = failure("loading", code=137)
    assert type(error) is Refused and "137" in error.message and "memory" not in error.message


def test_silence() -> None:
    assert "nothing about why" in failure("").message


def test_the_cause_is_the_end_of_the_first_traceback() -> None:
    error = failure("\n".join(TRACEBACK))
    assert type(error) is UsageError and error.hint is not None and "truncated" in error.hint
    assert error.message.endswith("SafetensorError: Error while deserializing header: MetadataIncompleteBuffer")
    assert error.details[0].startswith("line 12, phase start, confidence high")
    assert any("scheduler_dead at line 17" in detail for detail in error.details)


def test_an_undefined_symbol_is_no_matter_of_the_architecture() -> None:
    error = failure(
        "[sgl_kernel] CRITICAL: Could not load any common_ops library!\n"
        "no kernel image is available for execution on the device\n"
        "ImportError: common_ops.abi3.so: undefined symbol: _ZN5torch7Library4_defE\n"
    )
    assert type(error) is Refused and "undefined symbol" in error.message
    assert error.hint is not None and error.hint.startswith("import_abi: ")


def test_all_of_the_log_file_is_read(tmp_path: Path) -> None:
    """Not only the last lines that were kept of it."""
    log = tmp_path / "server.log"
    log.write_text("RuntimeError: No CUDA GPUs are available\n" + "noise\n" * 5000)
    error = launch_failure(["noise"] * 100, exit_code=1, oom_killed=False, memory="8g", log=log)
    assert type(error) is EnvironmentFailure and "CUDA" in error.message


def test_the_death_of_a_server_that_was_asked(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    assert obituary({"ExitCode": 7}, log) == "the server died (exit code 7)"
    log.write_text("RuntimeError: CUDA error: an illegal memory access was encountered\n")
    assert obituary({"ExitCode": 7}, log).startswith("the server died (exit code 7): RuntimeError: CUDA error")
    assert obituary({"ExitCode": 137, "OOMKilled": True}, log) == "the server died (out of memory)"
