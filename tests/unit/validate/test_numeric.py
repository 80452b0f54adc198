"""The numeric test without a container: judging is pure, and the script is what the package says it is."""

from __future__ import annotations

import ast
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from forge_core.cli import project_root
from forge_core.console import Console
from forge_core.errors import EnvironmentFailure
from forge_core.model import ModelRef
from forge_validate import numeric, options, policy, serving, suite, trial
from forge_validate.checks import CheckResult
from forge_validate.judge import Bench
from forge_validate.numeric import Document, Measured, judge, parse, unmeasured
from forge_validate.numeric.container import script_folder
from forge_validate.policy import Kernel, Numeric, Policy
from forge_validate.serving import Serving
from forge_validate.verdict import decide

QUANTISE: Kernel = "flashinfer.fp4_quantize"
EXPERTS: Kernel = "flashinfer.cutlass_fused_moe"
DEMAND = Numeric(kernels=(QUANTISE, EXPERTS), deadline=1, reason="two kernels are enough to see it")
GPU = {"name": "NVIDIA RTX PRO 6000", "capability": "12.0", "driver": "580.95.05"}


def case(kernel: str = QUANTISE, value: float | None = 0.5, **changes: Any) -> Measured:
    base = {"kernel": kernel, "case": "c", "shape": (1, 64), "metric": "error", "value": value, "bound": 1.0}
    return Measured(**(base | {"outcome": "passed", "reason": None, "seconds": 0.25} | changes))


def document(*cases: Measured, **changes: Any) -> Document:
    base: dict[str, Any] = {"schema": 1, "device": "cuda", "gpu": GPU, "absent": None, "versions": {}, "seed": 1}
    return Document.model_validate(base | {"cases": cases, "seconds": 1.0} | changes)


def outcomes(*cases: Measured, **changes: Any) -> list[str]:
    return [result.outcome for result in judge(document(*cases, **changes), DEMAND)]


def test_a_kernel_passes_by_all_of_its_cases() -> None:
    first, second = judge(document(case(), case(value=0.75, case="worst"), case(EXPERTS, value=0)), DEMAND)
    assert (first.check, first.outcome, first.value) == (f"numeric/{QUANTISE}", "passed", 0.75)
    assert first.explanation == "2 cases in 0.5 s; the worst: worst: error: 0.75, bound 1"
    assert (second.outcome, second.value) == ("passed", 0)


@pytest.mark.parametrize(
    ("bad", "outcome"),
    [
        (case(value=1.01), "failed"),  # whatever the script says
        (case(value=1.0), "passed"),
        (case(value=0.5, outcome="failed"), "passed"),
        (case(value=None, outcome="failed", reason="the output has NaN or infinity"), "failed"),
        (case(value=None, outcome="unmeasured", reason="ImportError"), "unmeasured"),
        (case(value=None, outcome="passed"), "unmeasured"),
        (case(value=1.0, bound=0.0), "failed"),
    ],
)
def test_one_case_decides(bad: Measured, outcome: str) -> None:
    assert outcomes(case(), bad, case(EXPERTS)) == [outcome, "passed"]


def test_the_worst_case_is_told_and_a_wrong_one_before_an_absent_one() -> None:
    absent = case(value=None, outcome="unmeasured", reason="it crashed", case="absent")
    nan = case(value=None, outcome="failed", reason="the output has NaN", case="nan")
    far = case(value=900.0, case="far")
    (first, _) = judge(document(absent, far, case(value=3.0), case(EXPERTS)), DEMAND)
    assert (first.outcome, first.value) == ("failed", 900.0)
    assert first.explanation == "2 of 3 cases: far: error: 900, bound 1"
    (first, _) = judge(document(absent, far, nan, case(EXPERTS)), DEMAND)
    assert first.explanation == "2 of 3 cases: nan: the output has NaN"
    (first, _) = judge(document(case(), absent), DEMAND)
    assert (first.outcome, first.explanation) == ("unmeasured", "1 of 2 cases: absent: it crashed")


def test_a_kernel_without_a_case_is_unmeasured() -> None:
    assert outcomes(case()) == ["passed", "unmeasured"]
    assert outcomes() == ["unmeasured", "unmeasured"]


def test_what_did_not_run_on_a_gpu_is_no_pass() -> None:
    both = (case(), case(EXPERTS))
    assert outcomes(*both) == ["passed", "passed"]
    assert outcomes(*both, device="cpu", gpu=None) == ["unmeasured"] * 2
    assert outcomes(*both, device="cpu") == ["unmeasured"] * 2
    assert outcomes(*both, gpu=None, absent="no driver") == ["unmeasured"] * 2


@pytest.mark.parametrize("text", ["", "{}", "garbage", '{"schema": 2}', "[]", document(case()).model_dump_json() + "x"])
def test_what_is_no_document(text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


def test_a_document_is_read_as_the_script_writes_it() -> None:
    assert parse(document(case()).model_dump_json(by_alias=True)) == document(case())


@pytest.mark.parametrize("outcome", ["failed", "unmeasured"])
def test_the_verdict_blames_the_kernel_before_all_else(rules: Policy, outcome: Any) -> None:
    results = [
        CheckResult(check="server-info/flags", outcome="failed", explanation="flags differ"),
        CheckResult(check=f"numeric/{EXPERTS}", outcome=outcome, explanation="9 of 9 cases"),
    ]
    found = decide(results, rules)
    assert (found.outcome, found.kind) == ("failed", "kernels")
    assert f"numeric/{EXPERTS}" in found.cause and found.next_step.endswith("read numeric.json")


# --- wiring ----------------------------------------------------------------------------------------------------------


def test_a_policy_without_a_demand_asks_nothing(rules: Policy, tmp_path: Path) -> None:
    assert rules.numeric is None
    nothing: Any = None
    assert numeric.run(nothing, "image", serving.load("rehearsal"), rules, tmp_path, Console(quiet=True)) == ()


def test_a_demand_on_a_serving_without_devices_is_not_met(rules: Policy, tmp_path: Path) -> None:
    nothing: Any = None
    demanding = rules.model_copy(update={"numeric": DEMAND})
    found = numeric.run(nothing, "image", serving.load("rehearsal"), demanding, tmp_path, Console(quiet=True))
    assert [r.outcome for r in found] == ["unmeasured"] * 2
    assert decide(found, demanding).outcome == "failed"


class Booted(Exception):
    pass


def try_with(
    results: tuple[CheckResult, ...], rules: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> trial.Tried:
    def boot(*_: Any, **__: Any) -> Any:
        raise Booted

    monkeypatch.setattr(trial, "boot", boot)
    monkeypatch.setattr(numeric, "run", lambda *_: results)
    plan = serving.load("rehearsal")
    questions, answers = suite.load(rules.suite, plan.model)
    nothing: Any = None
    subject = trial.Subject("image", plan, ModelRef(name="m", files=()), tmp_path)
    return trial.run(nothing, subject, Bench(questions, answers, rules, plan.model), tmp_path, Console(quiet=True))


def test_no_server_is_booted_on_wrong_kernels(rules: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for found in (unmeasured(DEMAND, "it crashed"), judge(document(case(value=2), case(EXPERTS)), DEMAND)):
        tried = try_with(found, rules, tmp_path, monkeypatch)
        assert tried.results[:2] == found and tried.exchanges == ()
        assert {r.outcome for r in tried.results[2:]} == {"unmeasured"} and len(tried.results) > 10
        assert decide(tried.results, rules).kind == "kernels"


def test_right_kernels_and_optional_ones_let_it_boot(
    rules: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Booted):
        try_with(judge(document(case(), case(EXPERTS)), DEMAND), rules, tmp_path, monkeypatch)
    some = policy.Optional(check="numeric/*", reason="any reason will do for a test")
    lenient = rules.model_copy(update={"optional": (some,)})
    with pytest.raises(Booted):
        try_with(unmeasured(DEMAND, "it crashed"), lenient, tmp_path, monkeypatch)


def test_the_container_has_the_devices_and_caches_and_nothing_else_of_the_server(tmp_path: Path) -> None:
    plan, digest = serving.load("sm120"), "sha256:" + "a" * 64
    made = options.create_beside(plan, "name", ["python3", "-m", "numeric"], "/forge", tmp_path, digest=digest)
    server = options.create(plan, "name", "word", tmp_path, api_key="sk-1", digest=digest)
    for same in (
        "device_requests",
        "cap_drop",
        "security_opt",
        "read_only",
        "tmpfs",
        "mem_limit",
        "pids_limit",
        "environment",
    ):
        assert made[same] == server[same], same
    assert made["entrypoint"] == ["python3", "-m", "numeric"] and made["command"] == []
    assert made["network_mode"] == "none" and "ports" not in made
    script, *rest = made["mounts"]
    assert (script["Target"], script["Source"], script["ReadOnly"]) == ("/forge", str(tmp_path), True)
    assert {mount["Target"] for mount in rest} == set(plan.caches.values())
    assert "/model" not in str(made) and "sk-1" not in str(made)


def test_production_demands_every_kernel_and_no_policy_lets_one_off() -> None:
    rules = policy.load("sm120")
    assert rules.numeric is not None and set(rules.numeric.kernels) == set(get_args(Kernel))
    assert all(rules.requires(f"numeric/{kernel}") for kernel in rules.numeric.kernels)
    assert serving.load("sm120").has_devices and not serving.load("rehearsal").has_devices


@pytest.mark.parametrize("changes", [{"kernels": ()}, {"kernels": ("x",)}, {"deadline": 0}, {"reason": "short"}])
def test_a_demand_must_make_sense(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Numeric(**({"kernels": (QUANTISE,), "deadline": 1, "reason": "any reason will do"} | changes))


def test_an_engine_elsewhere_is_refused(tmp_path: Path) -> None:
    class Remote:
        remote, address = True, "tcp://elsewhere"

    remote: Any = Remote()
    plan: Serving = serving.load("rehearsal")
    with Console(quiet=True).step("numeric") as step, pytest.raises(EnvironmentFailure, match="another machine"):
        numeric.ask(remote, "image", plan, DEMAND, tmp_path, step)


# --- the script ------------------------------------------------------------------------------------------------------


def modules() -> list[ast.Module]:
    found = [ast.parse(path.read_text()) for path in sorted((script_folder() / "numeric").glob("*.py"))]
    assert len(found) >= 5
    return found


def test_the_script_knows_the_kernels_that_policies_may_name() -> None:
    keys = {
        key.value
        for module in modules()
        for node in ast.walk(module)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "PLANS"
        and isinstance(node.value, ast.Dict)
        for key in node.value.keys
        if isinstance(key, ast.Constant)
    }  # fmt: skip
    assert keys == set(get_args(Kernel))


def test_the_script_imports_the_standard_library_torch_and_kernels_alone() -> None:
    imported = set()
    for module in modules():
        for node in ast.walk(module):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(str(node.module).partition(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"torch", "flashinfer", "sgl_kernel"}


def test_the_script_is_in_the_wheel(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=project_root(), check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for path in (script_folder() / "numeric").glob("*.py"):
        assert f"forge_validate/inside/numeric/{path.name}" in names
