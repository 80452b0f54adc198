"""`python -m numeric`: ask the image's FP4 kernels, print one JSON document; exit 0 whatever they answered.

Each kernel is asked in a process of its own, forked after torch is imported and before CUDA is touched: what a broken one
leaves behind (a crash, an illegal access) is no other's. stdout of kernels goes to stderr, with a line for each case.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import experts_cases, kernels, multiply_cases, quantise_cases
from .cases import BOUNDS, SEED, Case, Unmeasured

SCHEMA = 1
PACKAGES = ("torch", "flashinfer-python", "sgl-kernel", "nvidia-cudnn-frontend", "nvidia-cudnn-cu13")
_WIDTH = 300

PLANS: Mapping[str, Callable[[], list[Case]]] = {
    "flashinfer.fp4_quantize": lambda: [*quantise_cases.cases(kernels.flashinfer_quantise)],
    "flashinfer.mm_fp4.cutlass": lambda: [
        *multiply_cases.cases(functools.partial(kernels.flashinfer_multiply, "cutlass"))
    ],
    "flashinfer.mm_fp4.cudnn": lambda: [*multiply_cases.cases(functools.partial(kernels.flashinfer_multiply, "cudnn"))],
    "flashinfer.cutlass_fused_moe": lambda: [*experts_cases.cases(kernels.flashinfer_experts)],
    "sgl_kernel.scaled_fp4_quant": lambda: [*quantise_cases.cases(kernels.sgl_quantise)],
    "sgl_kernel.cutlass_scaled_fp4_mm": lambda: [*multiply_cases.cases(kernels.sgl_multiply)],
    "sgl_kernel.scaled_fp4_experts_quant": lambda: [*quantise_cases.group_cases(kernels.sgl_quantise_groups)],
    "sgl_kernel.cutlass_fp4_group_mm": lambda: [*multiply_cases.group_cases(kernels.sgl_multiply_groups)],
}


def main() -> int:
    """Run; the one thing on stdout is the document."""
    parser = argparse.ArgumentParser("numeric", allow_abbrev=False)
    parser.add_argument("kernels", nargs="+", choices=sorted(PLANS), metavar="KERNEL")
    parser.add_argument("--deadline", type=float, required=True, help="seconds for all of them")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: for stand-ins of the kernels")
    options = parser.parse_args()
    began = time.monotonic()
    gpu, absent = _gpu(options.device, began + options.deadline)
    asked: list[dict[str, Any]] = []
    for kernel in dict.fromkeys(options.kernels):
        if absent is None:
            asked += _ask(kernel, PLANS[kernel](), options.device, began + options.deadline)
        else:
            asked += [_result(kernel, case, None, absent, 0.0) for case in PLANS[kernel]()]
    document = {
        "schema": SCHEMA,
        "device": options.device,
        "gpu": gpu,
        "absent": absent,
        "versions": _versions(),
        "seed": SEED,
        "cases": asked,
        "seconds": round(time.monotonic() - began, 3),
    }
    print(json.dumps(document, allow_nan=False))
    return 0


def _ask(kernel: str, plan: list[Case], device: str, end: float) -> list[dict[str, Any]]:
    """The results of one kernel, one for each case of the plan whatever happens."""

    def work(send: Callable[[Any], None]) -> None:
        for case in plan:
            send(_measure(kernel, case, device))

    answers, why = _apart(work, end)
    return answers + [_result(kernel, case, None, why, 0.0) for case in plan[len(answers) :]]


def _measure(kernel: str, case: Case, device: str) -> dict[str, Any]:
    began = time.monotonic()
    value: float | None = None
    reason = None
    wrong = False
    try:
        value = case.measure(device)
        if device == "cuda":
            torch.cuda.synchronize()
    except ArithmeticError as error:
        wrong, reason = True, str(error)
    except Unmeasured as error:
        reason = str(error)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    done = _result(kernel, case, value, reason, time.monotonic() - began, wrong=wrong)
    shown = reason if value is None else f"{value:.4g}, bound {done['bound']:g}"
    print(f"{kernel}: {case.name}: {done['outcome']}: {shown}"[:_WIDTH], file=sys.stderr, flush=True)
    return done


def _result(
    kernel: str, case: Case, value: float | None, reason: str | None, seconds: float, *, wrong: bool = False
) -> dict[str, Any]:
    bound = BOUNDS[case.metric]
    right = "passed" if value is not None and value <= bound else "failed"
    outcome = "unmeasured" if value is None and not wrong else right
    return {
        "kernel": kernel,
        "case": case.name,
        "shape": case.shape,
        "metric": case.metric,
        "value": value,
        "bound": bound,
        "outcome": outcome,
        "reason": reason and reason[:_WIDTH],
        "seconds": round(seconds, 3),
    }


def _gpu(device: str, end: float) -> tuple[dict[str, str] | None, str | None]:
    """The GPU, or why there is none; asked in a process of its own, since a look at CUDA forbids to fork."""
    if device == "cpu":
        return None, None

    def work(send: Callable[[Any], None]) -> None:
        try:
            found = torch.cuda.get_device_properties(0)
            send({"name": found.name, "capability": f"{found.major}.{found.minor}", "driver": _driver()})
        except Exception as error:
            send(f"{type(error).__name__}: {' '.join(str(error).split())}"[:_WIDTH])

    answers, why = _apart(work, end)
    if not answers:
        return None, why
    return (answers[0], None) if isinstance(answers[0], dict) else (None, answers[0])


def _driver() -> str:
    """Version of the kernel's module, as it tells itself."""
    try:
        with open("/sys/module/nvidia/version") as stream:  # noqa: PTH123
            return stream.read().strip()
    except OSError:
        return "unknown"


def _apart(work: Callable[[Callable[[Any], None]], None], end: float) -> tuple[list[Any], str]:
    """What a forked process sent until it ended, or was killed at `end`; and how it ended."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.dup2(2, 1)
        code = 1
        try:
            with os.fdopen(writer, "w") as stream:

                def send(value: Any) -> None:
                    stream.write(json.dumps(value, allow_nan=False) + "\n")
                    stream.flush()

                work(send)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    received, late = b"", False
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            late = True
            os.kill(child, signal.SIGKILL)
            break
        if not (chunk := os.read(reader, 1 << 16)):
            break
        received += chunk
    os.close(reader)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    whole = received[: received.rfind(b"\n") + 1]
    if late:
        why = "the deadline came first"
    else:
        why = f"the kernel's process died by signal {-code}" if code < 0 else f"the kernel's process ended with {code}"
    return [json.loads(line) for line in whole.splitlines()], why


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0], "cuda": str(torch.version.cuda)}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


if __name__ == "__main__":
    sys.exit(main())
