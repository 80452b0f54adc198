"""The numeric test's script, in a container of the rehearsal image: its reference is right, and it finds wrong kernels.

The image has torch for the CPU and no FP4 kernel. Stand-ins for the kernels (`tests/testdata/numeric`) answer there, right
or with one fault. Nothing here has run on a GPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import pytest
from docker.models.containers import Container
from docker.types import Mount

from forge_core.console import Console
from forge_core.engine import Engine, connect
from forge_core.errors import EnvironmentFailure
from forge_core.record import BuildRecord
from forge_validate import numeric, options, policy, serving
from forge_validate.numeric import container as asking
from forge_validate.numeric import parse
from forge_validate.policy import Kernel, Numeric
from forge_validate.serving import Serving

TESTS = Path(__file__).parents[1]
STAND_INS = TESTS / "testdata" / "numeric"
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
QUANTISE, MULTIPLY, EXPERTS = "flashinfer.fp4_quantize", "flashinfer.mm_fp4.cutlass", "flashinfer.cutlass_fused_moe"

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    found = connect(builds=False)
    with closing(found.client):
        yield found


@pytest.fixture(scope="module")
def image(engine: Engine, built: BuildRecord) -> str:
    engine.client.images.pull(built.image.repository, tag=built.image.digest)
    return str(built.image)


@pytest.fixture(scope="module")
def container(engine: Engine, image: str) -> Iterator[Container]:
    """One container for all questions: the script, the stand-ins, and the pytest of this environment."""
    site = Path(pytest.__file__).parents[1]
    binds = {
        "/forge": asking.script_folder(),
        "/kernels": STAND_INS / "kernels",
        "/site": site,
        "/tests": TESTS / "inside",
    }
    made = engine.client.containers.run(
        image,
        entrypoint=["sleep", "1800"],
        detach=True,
        network_mode="none",
        read_only=True,
        cap_drop=["ALL"],
        tmpfs={"/tmp": ""},
        labels={options.LABEL: "test-numeric"},
        mounts=[Mount(target, str(source), type="bind", read_only=True) for target, source in binds.items()],
    )
    try:
        yield made
    finally:
        made.remove(force=True)


@pytest.fixture
def ask(container: Container) -> Ask:
    """Run the script on stand-ins; every case of every kernel comes back."""

    def run(*kernels: str, fault: str = "", kernel: str | None = None, deadline: float = 600) -> dict[str, Any]:
        told = {"NUMERIC_FAULT": fault, "PYTHONPATH": "/kernels", "OMP_NUM_THREADS": "1", "HOME": "/tmp"}
        if kernel is not None:
            told["NUMERIC_KERNEL"] = kernel
        words = ["python3", "-B", "-m", "numeric", "--device", "cpu", "--deadline", str(deadline), *kernels]
        code, (out, err) = container.exec_run(words, environment=told, workdir="/forge", demux=True)
        assert code == 0, err.decode()
        # One document and nothing else, whatever kernels print.
        found: dict[str, Any] = json.loads(out)
        parse(out.decode())
        return found

    return run


def outcomes(document: dict[str, Any], kernel: str) -> dict[str, str]:
    return {case["case"]: case["outcome"] for case in document["cases"] if case["kernel"] == kernel}


def wrong(document: dict[str, Any], kernel: str) -> set[str]:
    return {name for name, outcome in outcomes(document, kernel).items() if outcome == "failed"}


# pytest and its compiled dependencies are mounted from here into the image, whose Python is 3.11.
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the image's Python runs the packages of this environment")
def test_the_reference(container: Container) -> None:
    code = "import sys; sys.path[:0] = ['/forge']; sys.path.append('/site'); import pytest; sys.exit(pytest.main())"
    words = [
        "python3",
        "-B",
        "-c",
        code,
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        "--rootdir=/tests",
        "-q",
        "/tests",
    ]
    status, said = container.exec_run(words, workdir="/tmp", environment={"HOME": "/tmp", "OMP_NUM_THREADS": "1"})
    assert status == 0, said.decode()
    assert " passed" in said.decode() and "failed" not in said.decode()


def test_right_kernels_pass_every_case(ask: Ask) -> None:
    found = ask(*KERNELS)
    for kernel in KERNELS:
        assert set(outcomes(found, kernel).values()) == {"passed"}, kernel
    # Stand-ins prove nothing about an image: such a document is no pass.
    demand = Numeric(kernels=KERNELS, deadline=60, reason="all kernels, to see them all")
    results = numeric.judge(parse(json.dumps(found)), demand)
    assert len(results) == len(KERNELS) and {r.outcome for r in results} == {"unmeasured"}


def test_a_kernel_that_rounds_less_passes_too(ask: Ask) -> None:
    """Where it rounds on the way is the kernel's own matter."""
    assert set(outcomes(ask(EXPERTS, fault="less rounding"), EXPERTS).values()) == {"passed"}


@pytest.mark.parametrize(
    ("kernel", "fault", "case"),
    [
        (QUANTISE, "half away", "ties, to even"),
        (QUANTISE, "rounded down", "random 3x128"),
        (QUANTISE, "scale rounded down", "random 7x576"),
        (QUANTISE, "saturation wraps", "saturation"),
        (QUANTISE, "subnormal scales flushed", "magnitudes from 2^-20 to 1"),
        (QUANTISE, "one code", "random 4096x512"),
        (QUANTISE, "layout", "random 33x192"),
        (QUANTISE, "halves swapped", "random 1x64"),
        (QUANTISE, "wrong at batch 3", "a row in a batch as alone"),
        (MULTIPLY, "scale 1.05", "random 1x256x512"),
        (MULTIPLY, "rows swapped", "random 3x256x512"),
        (MULTIPLY, "row lost", "random 128x256x512"),
        (MULTIPLY, "nan", "random 1x256x512"),
        (MULTIPLY, "layout", "block scales from 2^-9 to 448"),
        (MULTIPLY, "half of the depth", "random 150x512x4096"),
        (MULTIPLY, "wrong at batch 3", "a row in a batch as alone"),
        (EXPERTS, "scale 1.05", "each expert alone"),
        (EXPERTS, "one expert 1.05", "each expert alone"),
        (EXPERTS, "nan in one expert", "each expert alone"),
        (EXPERTS, "gate first", "3 tokens, 2 of 8 experts"),
        (EXPERTS, "router weights ignored", "7 tokens, 2 of 8 experts"),
        (EXPERTS, "rows swapped", "3 tokens, 2 of 8 experts"),
        (EXPERTS, "wrong at batch 3", "a token in a batch as alone"),
        ("sgl_kernel.scaled_fp4_experts_quant", "one scale for all experts", "16 experts, k 128"),
        ("sgl_kernel.scaled_fp4_quant", "half away", "ties, to even"),
        ("sgl_kernel.cutlass_scaled_fp4_mm", "rows swapped", "random 7x192x576"),
        ("sgl_kernel.cutlass_fp4_group_mm", "scale 1.05", "16 experts, 256x512"),
    ],
)
def test_a_fault_is_found(ask: Ask, kernel: str, fault: str, case: str) -> None:
    found = ask(kernel, fault=fault)
    assert case in wrong(found, kernel)
    # Wrong numbers are wrong, not absent; and NaN is no number that a document has.
    assert "unmeasured" not in outcomes(found, kernel).values()
    if "nan" in fault:
        values = [c for c in found["cases"] if c["case"] == case]
        assert values[0]["value"] is None and "NaN" in values[0]["reason"]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("crash", "died by signal 11"),
        ("hang", "the deadline came first"),
        ("raise", "RuntimeError: no kernel image is available"),
    ],
)
def test_a_kernel_that_gives_no_answer_is_unmeasured_and_takes_no_other_with_it(
    ask: Ask, fault: str, said: str
) -> None:
    grouped = "sgl_kernel.scaled_fp4_experts_quant"
    # The one that hangs is asked last: the deadline is for all.
    found = ask(grouped, MULTIPLY, fault=fault, kernel="mm_fp4.cutlass", deadline=30)
    assert set(outcomes(found, grouped).values()) == {"passed"}
    assert set(outcomes(found, MULTIPLY).values()) == {"unmeasured"}
    assert len(outcomes(found, MULTIPLY)) == 12
    assert all(said in case["reason"] for case in found["cases"] if case["kernel"] == MULTIPLY)


def test_a_kernel_that_the_image_lacks_is_unmeasured(ask: Ask) -> None:
    found = ask(MULTIPLY, QUANTISE, fault="absent")
    assert set(outcomes(found, MULTIPLY).values()) == {"unmeasured"}
    assert "cannot import name 'mm_fp4'" in found["cases"][0]["reason"]
    assert set(outcomes(found, QUANTISE).values()) == {"passed"}


# --- the container that asks -----------------------------------------------------------------------------------------


@pytest.fixture
def plan() -> Serving:
    """The rehearsal's serving: no devices, little memory."""
    return serving.load("rehearsal").model_copy(update={"profile": "test-numeric-ask"})


def leftovers(engine: Engine) -> list[Container]:
    found = engine.client.containers.list(all=True, filters={"label": f"{options.LABEL}=test-numeric-ask"})
    return list(found)


DEMAND = Numeric(kernels=(QUANTISE, EXPERTS), deadline=5, reason="two kernels are enough to see it")


def test_a_container_without_a_gpu_is_the_environments_fault(
    engine: Engine, image: str, plan: Serving, tmp_path: Path
) -> None:
    """The real script in the real image, as on a GPU host, and no GPU."""
    with Console(quiet=True).step("numeric") as step, pytest.raises(EnvironmentFailure, match="sees no GPU") as caught:
        asking.ask(engine, image, plan, DEMAND.model_copy(update={"deadline": 120}), tmp_path, step)
    assert caught.value.exit_code == 3
    document = json.loads((tmp_path / numeric.FILE_NAME).read_text())
    assert document["gpu"] is None and {case["outcome"] for case in document["cases"]} == {"unmeasured"}
    assert document["versions"]["torch"].startswith("2.")
    assert leftovers(engine) == []


SCRIPT = """
import json, os, sys, time
print("imports done", file=sys.stderr, flush=True)
case = {"case": "c", "shape": [1], "metric": "m", "bound": 1.0, "outcome": "passed", "reason": None, "seconds": 0.1}
gpu = {"name": "stand-in", "capability": "12.0", "driver": "580"}
document = {"schema": 1, "device": "cuda", "gpu": gpu, "absent": None, "versions": {}, "seed": 1, "seconds": 0.1}
document["cases"] = [case | {"kernel": kernel, "value": VALUE} for kernel in sys.argv[3:]]
"""


@pytest.mark.parametrize(
    ("rest", "outcome", "said"),
    [
        ("VALUE = 0.5", "passed", "1 cases in 0.1 s"),
        # The script's own word does not count.
        ("VALUE = 1.5", "failed", "1 of 1 cases: c: m: 1.5, bound 1"),
        ("sys.exit(3)", "unmeasured", "ended with exit code 3; its last line: imports done"),
        ("os.kill(os.getpid(), 11)", "unmeasured", "exit code 139"),
        ("print('garbage'); sys.exit(0)", "unmeasured", "no document"),
        ("time.sleep(600)", "unmeasured", "ended after 6 s"),
    ],
)
def test_what_the_container_comes_to(
    engine: Engine,
    image: str,
    plan: Serving,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rest: str,
    outcome: str,
    said: str,
) -> None:
    # Below the checkout: an engine in a chroot sees only some folders.
    folder = TESTS.parent / "work" / f"test-numeric-{tmp_path.name}"
    script = folder / "numeric" / "__main__.py"
    script.parent.mkdir(parents=True)
    first, _, after = SCRIPT.partition("document[")
    tail = f"document[{after}print(json.dumps(document))\n" if rest.startswith("VALUE") else ""
    script.write_text(f"{first}\n{rest}\n{tail}")
    monkeypatch.setattr(asking, "script_folder", lambda: folder)
    monkeypatch.setattr(asking, "_GRACE_S", 1.0)
    monkeypatch.setattr(Serving, "has_devices", True)
    rules = policy.load("rehearsal").model_copy(update={"numeric": DEMAND})
    try:
        results = numeric.run(engine, image, plan, rules, tmp_path, Console(quiet=True))
    finally:
        script.unlink()
        script.parent.rmdir()
        folder.rmdir()
    assert [r.check for r in results] == [f"numeric/{QUANTISE}", f"numeric/{EXPERTS}"]
    assert {r.outcome for r in results} == {outcome}
    assert said in results[0].explanation
    assert (tmp_path / numeric.FILE_NAME).exists() == (outcome != "unmeasured")
    assert "imports done" in (tmp_path / "logs" / "numeric.log").read_text()
    assert leftovers(engine) == []
