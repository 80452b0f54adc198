"""Every known line in 50,000 lines of a real SGLang log; needs no engine, but half a minute."""

from __future__ import annotations

from typing import Any

import pytest
from logs import facts, healthy, joined

from forge_core.explain import read


@pytest.fixture(scope="module")
def around() -> tuple[bytes, bytes]:
    lines = healthy(50_000)
    return joined(lines[:25_000]), joined(lines[25_000:])


@pytest.mark.parametrize("fact", facts(), ids=lambda fact: fact["class"])
def test_a_known_line_in_fifty_thousand(fact: dict[str, Any], around: tuple[bytes, bytes]) -> None:
    reading = read([around[0], joined([fact["sample"]]), around[1]])
    assert reading.lines == 50_001
    if fact["severity"] in ("info", "ignore"):
        assert reading.finding is None
    else:
        assert reading.finding is not None
        assert (reading.finding.kind, reading.finding.line) == (fact["class"], 25_001)


def test_fifty_thousand_healthy_lines(around: tuple[bytes, bytes]) -> None:
    assert read(around).finding is None
