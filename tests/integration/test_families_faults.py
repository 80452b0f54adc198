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
# Longer than every prompt of the other families.
WINDOW = 4000

SECTIONS = {
    "golden": GOLDEN,
    "batch": {"sizes": [1, 3], "tokens": 16, "beside": 1, "prefill": 300, "margin": MARGIN, "timeout": 60},
    "cache": {
        "words": 30,
        "lengths": [64, 65],
        "evict": 4 * POOL,
        "evict_words": 100,
        "tokens": 6,
        "margin": MARGIN,
        "timeout": 60,
    },
    "context": {
        "edges": ["chunk-1", "chunk", "chunk+1", "2chunk+1"],
        "depths": [0.2, 0.8],
        "budget": 9000,
        "reach": {"value": 4096, "reason": "the stand-in finds every needle"},
        "tokens": 10,
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


def run(fault: str | None, folder: Path, *families: str, chat: bool = False) -> dict[str, CheckResult]:
    sections = {name: SECTIONS[name] | SHORT.get(fault or "", {}).get(name, {}) for name in families or SECTIONS}
    with FakeEngine(pool=POOL, chat=chat, window=WINDOW) as engine:
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
        *(f"context/{name}" for name in ("chunk-1", "chunk", "chunk+1", "2chunk+1", "too-long")),
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
        ("flush", {"cache/flushed": "failed"}),
        ("evict", {"cache/evicted": "failed"}),
        ("chunk", {"context/chunk+1": "failed", "context/2chunk+1": "failed"}),
        ("forget", {"context/chunk+1": "failed", "context/2chunk+1": "failed"}),
        ("truncate", {"context/too-long": "failed"}),
        ("poison", {"poison/after-load": "failed"}),
        ("mends", {"poison/after-load": "failed"}),
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


def test_a_pool_that_is_larger_than_told_is_filled_again(tmp_path: Path) -> None:
    assert outcomes(run("hoard", tmp_path, "cache")) == {}
    assert (tmp_path / "cache__evicted__1.json").exists() and not (tmp_path / "cache__evicted__2.json").exists()


def test_a_chat_without_completions_is_judged_as_far_as_it_can_be(tmp_path: Path) -> None:
    """No token ids can be said there, so no prefix is cut and no length is exact."""
    healthy = run(None, tmp_path / "healthy", chat=True)
    exact = {name for name in healthy if name.startswith(("cache/branch-", "context/"))} - {"context/too-long"}
    assert outcomes(healthy) == dict.fromkeys(exact, "unmeasured")
    assert all("no /v1/completions" in healthy[name].explanation for name in exact)
    assert outcomes(run("lost", tmp_path / "lost", "hang", chat=True)) == {"hang/burst": "failed"}
    wrong = run("batch", tmp_path / "batch", "batch", chat=True)
    # Without an echo no noise was measured, so another token may be a flip.
    assert outcomes(wrong) == {"batch/size-3": "unmeasured"}


def test_hits_are_told_by_counters_where_usage_is_silent(tmp_path: Path) -> None:
    """`mute` takes both away."""
    assert outcomes(run("quiet-usage", tmp_path / "counters", "cache")) == {}
    mute = run("mute", tmp_path / "mute", "cache")
    assert outcomes(mute) == dict.fromkeys(mute, "unmeasured")


@pytest.mark.parametrize(
    ("fault", "check", "shown", "expected", "requests"),
    [
        ("batch", "batch/size-6", "for i in $(seq 3); do curl", "X", 3),
        ("prefix64", "cache/branch-64", '"max_tokens": 3', "X", 3),
        ("warm", "cache/warm", "S=$(date +%s%N); curl", "X", 3),
        ("flush", "cache/flushed", "/flush_cache", "X", 3),
        ("evict", "cache/evicted", "for i in $(seq 8); do curl", "X", 11),
        ("beside", "batch/beside-prefill", "& done; sleep ", "X", 3),
        ("mends", "poison/after-load", " --max-time ", "X", 3),
        ("poison", "poison/after-load", " --max-time ", "X", 10),
        ("kv", "leak/kv-pool", "/v1/loads", "num_used_tokens", 1),
        ("chunk", "context/chunk+1", "exchanges/context__chunk+1__pieces.json", "X", 3),
        ("truncate", "context/too-long", "exchanges/context__too-long.json", "usage", 1),
        ("lost", "hang/burst", "for i in $(seq 16); do curl", "", 0),
    ],
)
def test_the_smallest_reproducer(
    fault: str, check: str, shown: str, expected: str, requests: int, tmp_path: Path
) -> None:
    family = check.partition("/")[0]
    section = SECTIONS[family] | SHORT.get(fault, {}).get(family, {}) | ({"sizes": [6]} if family == "batch" else {})
    with FakeEngine(pool=POOL, window=WINDOW) as engine:
        engine.faults.add(fault)
        results, _ = ask(engine, {family: section}, tmp_path / "exchanges")
        line = results[check].reproduce or ""
        assert results[check].outcome == "failed" and shown in line and "\n" not in line
        environment = {"URL": engine.url, "KEY": "none", "PATH": os.environ["PATH"]}
        if fault == "lost":
            return
        # On a busy machine its processes may not come at one moment: whoever pastes it tries again.
        for _ in range(5):
            engine.asked.clear()
            shell = subprocess.run(["bash", "-c", line], env=environment, cwd=tmp_path, capture_output=True, timeout=20)
            said = shell.stdout.decode()
            assert not shell.stderr, shell.stderr
            assert len(engine.asked) == requests
            if expected in said:
                break
    assert expected in said


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
