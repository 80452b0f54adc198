"""Each family fails on the server made wrong for it, and only that family; all pass on a healthy one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from asking import GOLDEN, MARGIN, ask, outcomes, recorded_golden
from fake_engine import FakeEngine

from forge_validate.checks import CheckResult
from forge_validate.families.shrink import Size, shrink
from forge_validate.families.slope import slope

POOL = 3000

SECTIONS = {
    "golden": GOLDEN,
    "batch": {"sizes": [1, 3], "tokens": 16, "beside": 1, "prefill": 300, "margin": MARGIN, "timeout": 60},
    "cache": {
        "words": 30,
        "lengths": [64, 65],
        "evict": POOL,
        "evict_words": 100,
        "tokens": 6,
        "margin": MARGIN,
        "timeout": 60,
    },
    "poison": {
        "questions": 2,
        "rounds": 2,
        "at_once": 8,
        # So little that the questions stay in the cache: a cold answer after warm ones is the cache's matter.
        "words": 12,
        "tokens": 16,
        "margin": MARGIN,
        "timeout": 60,
    },
    "hang": {
        "burst": 16,
        "most": 16,
        "storm": 12,
        "tokens": 32,
        "stall": 60,
        "timeout": 60,
        "drain": 30,
        "idle": 0.1,
    },
    "leak": {
        "rounds": 6,
        "warm_up": 2,
        "at_once": 4,
        "words": 12,
        "tokens": 12,
        "growth": {"value": 0.5, "reason": "the stand-in's memory wobbles by 4 KiB"},
        "drain": 30,
        "timeout": 60,
    },
}
# What shows only when a time is over gets a short one; the machine may be busy, so no other test does.
SHORT = {
    "lost": {"hang": {"timeout": 4, "stall": 60}},
    "stall": {"hang": {"stall": 2}},
    "zombie": {"hang": {"timeout": 4, "drain": 1}},
    "kv": {"leak": {"drain": 1}},
}


def run(fault: str | None, folder: Path, *families: str) -> dict[str, CheckResult]:
    sections = {name: SECTIONS[name] | SHORT.get(fault or "", {}).get(name, {}) for name in families or SECTIONS}
    with FakeEngine(pool=POOL) as engine:
        golden = recorded_golden(engine, folder / "golden") if "golden" in sections else None
        if fault is not None:
            engine.faults.add(fault)
        results, _ = ask(engine, sections, folder, golden=golden)
    return results


def test_all_pass_on_a_healthy_server(tmp_path: Path) -> None:
    results = run(None, tmp_path)
    assert outcomes(results) == {}
    assert results.keys() == {
        "golden/subject",
        *(f"golden/{what}/{bucket}" for what in ("kl", "top1", "re-prefill") for bucket in (40, 120)),
        *(f"batch/{name}" for name in ("size-1", "size-3", "beside-prefill")),
        *(f"cache/{name}" for name in ("warm", "flushed", "evicted")),
        *(f"cache/branch-{length}" for length in (1, 2, 64, 65)),
        "poison/after-load",
        *(f"hang/{name}" for name in ("burst", "cancel-storm", "drain", "idle")),
        *(f"leak/{name}" for name in ("kv-pool", "memory")),
    }
    assert "64 prompt tokens cached" in results["cache/branch-64"].explanation


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        ("scaled", {"golden/kl/40": "failed", "golden/kl/120": "failed"}),
        ("shifted", {"golden/kl/40": "failed", "golden/kl/120": "failed"}),
        ("decode-scaled", {"golden/re-prefill/40": "failed", "golden/re-prefill/120": "failed"}),
        ("batch", {"batch/size-3": "failed"}),
        ("nan", {"batch/size-3": "failed"}),
        ("beside", {"batch/beside-prefill": "failed"}),
        ("warm", {"cache/warm": "failed"}),
        ("prefix64", {"cache/branch-64": "failed"}),
        ("poison", {"poison/after-load": "failed"}),
        ("lost", {"hang/burst": "failed"}),
        ("stall", {"hang/burst": "failed"}),
        ("kv", {"leak/kv-pool": "failed"}),
        ("grow", {"leak/memory": "failed"}),
    ],
)
def test_only_the_family_that_should_fails(fault: str, wrong: dict[str, str], tmp_path: Path) -> None:
    assert outcomes(run(fault, tmp_path)) == wrong


def test_places_that_are_never_given_back(tmp_path: Path) -> None:
    """Who hung up keeps the place: nothing waits any more, and yet something runs."""
    found = outcomes(run("zombie", tmp_path, "hang"))
    # On a busy machine the time of other asks may be over too, and then those places are lost as well.
    assert found["hang/drain"] == "failed"


def test_what_was_not_exercised_is_unmeasured(tmp_path: Path) -> None:
    uncached = run("uncached", tmp_path / "uncached", "cache")
    assert outcomes(uncached) == dict.fromkeys(uncached, "unmeasured")
    serial = outcomes(run("serial", tmp_path / "serial", "batch", "poison"))
    assert serial == dict.fromkeys(("batch/size-3", "batch/beside-prefill", "poison/after-load"), "unmeasured")


def test_hits_are_told_by_counters_where_usage_is_silent(tmp_path: Path) -> None:
    """`mute` takes both away."""
    assert outcomes(run("quiet-usage", tmp_path / "counters", "cache")) == {}
    mute = run("mute", tmp_path / "mute", "cache")
    assert outcomes(mute) == dict.fromkeys(mute, "unmeasured")


@pytest.mark.parametrize(
    ("fault", "check", "shown"),
    [
        ("batch", "batch/size-6", "for i in $(seq 3); do curl"),
        ("prefix64", "cache/branch-64", '"max_tokens": 3'),
        ("warm", "cache/warm", "S=$(date +%s%N); curl"),
        ("lost", "hang/burst", "for i in $(seq 16); do curl"),
    ],
)
def test_the_smallest_reproducer(fault: str, check: str, shown: str, tmp_path: Path) -> None:
    family = check.partition("/")[0]
    section = SECTIONS[family] | SHORT.get(fault, {}).get(family, {}) | ({"sizes": [6]} if family == "batch" else {})
    with FakeEngine(pool=POOL) as engine:
        engine.faults.add(fault)
        results, _ = ask(engine, {family: section}, tmp_path)
        line = results[check].reproduce or ""
        assert results[check].outcome == "failed" and shown in line and "\n" not in line
        engine.asked.clear()
        environment = {"URL": engine.url, "KEY": "none", "PATH": os.environ["PATH"]}
        if fault != "lost":
            shell = subprocess.run(["bash", "-c", line], env=environment, capture_output=True, timeout=20)
            assert b"X" in shell.stdout
    assert len(engine.asked) in (3, 0)


def test_sizes_are_halved_while_they_fail() -> None:
    tried: list[Size] = []

    def fails(size: Size) -> bool:
        tried.append(size)
        return size.batch >= 5 and size.length >= 3 and size.tokens >= 1

    sizes, found = shrink(Size(batch=64, length=40, tokens=16), 40), None
    try:
        size = next(sizes)
        while True:
            size = sizes.send(fails(size))
    except StopIteration as end:
        found = end.value
    assert found == Size(batch=5, length=3, tokens=1) and len(tried) < 20


def test_a_slope_and_its_interval() -> None:
    straight = slope([1.0, 3.0, 5.0, 7.0])
    assert (straight.low, straight.value, straight.high) == (2.0, 2.0, 2.0)
    # Least squares by hand: residuals 0.1, -0.2, 0.1; 1 degree of freedom; t = 12.706.
    bent = slope([0.1, 0.8, 2.1])
    assert bent.value == pytest.approx(1.0)
    assert bent.high - bent.value == pytest.approx(12.706 * (0.06 / 2) ** 0.5)
    with pytest.raises(ValueError, match="three"):
        slope([1.0, 2.0])
