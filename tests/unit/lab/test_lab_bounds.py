"""Bounds against numbers that can be had by hand, and against each other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_lab import bounds


def test_the_rule_of_three() -> None:
    # 1 - 0.05^(1/200) = 0.01487; the rule of three says 0.015.
    assert bounds.upper(0, 200) == pytest.approx(1 - 0.05 ** (1 / 200), abs=1e-9)
    assert bounds.upper(0, 200) == pytest.approx(3 / 200, rel=0.02)


def test_published_values() -> None:
    # Clopper and Pearson, 95 % two-sided: 5 of 10 gives 0.1871 to 0.8129; 0 of 10 gives 0 to 0.3085.
    assert bounds.interval(5, 10) == pytest.approx((0.1871, 0.8129), abs=1e-4)
    assert bounds.interval(0, 10) == pytest.approx((0.0, 0.3085), abs=1e-4)
    assert bounds.interval(10, 10) == pytest.approx((1 - 0.3085, 1.0), abs=1e-4)


@pytest.mark.parametrize(("events", "trials"), [(-1, 3), (4, 3), (0, 0)])
def test_counts_that_cannot_be(events: int, trials: int) -> None:
    with pytest.raises(ValueError, match="trials"):
        bounds.upper(events, trials)


@given(st.integers(1, 60), st.data())
@settings(max_examples=40)
def test_a_bound_lies_above_the_rate_and_falls_with_trials(trials: int, data: st.DataObject) -> None:
    events = data.draw(st.integers(0, trials))
    assert bounds.upper(events, trials) >= events / trials
    assert bounds.upper(events, trials + 5) <= bounds.upper(events, trials) + 1e-9
    low, high = bounds.interval(events, trials)
    assert 0 <= low <= events / trials <= high <= 1


def test_the_closed_form() -> None:
    assert bounds.caught(0, 64) == 0 and bounds.caught(5, 1) == 1
    assert bounds.caught(64, 64) == pytest.approx(1 - (63 / 64) ** 64)
    assert bounds.mean([]) == 0 and bounds.mean([1, 2]) == 1.5
