"""The signatures: each finds its own sample, and every known line gets the class that people gave it, alone and buried."""

from __future__ import annotations

import re
from typing import Any

import pytest
from logs import facts, healthy, joined

from forge_core.explain import Reading, read
from forge_core.explain.signatures import Signature, Signatures, book

SIGNATURES = book().data.signatures
NAMES = [f"{number}-{one.class_}-{one.role}" for number, one in enumerate(SIGNATURES)]
FACTS = [f"{number}-{fact['class']}" for number, fact in enumerate(facts())]
TOLD = ("fatal", "wrapper", "banner", "secondary", "context", "warn")
"""Severities of the facts that make a finding; the others are markers."""


def classes(reading: Reading) -> list[str]:
    """The finding's class, or those of the markers where there is none."""
    return [reading.finding.kind] if reading.finding else [marker.kind for marker in reading.markers]


@pytest.mark.parametrize("signature", SIGNATURES, ids=NAMES)
def test_a_signature_finds_its_own_sample(signature: Signature) -> None:
    text = f"{signature.given}\n{signature.sample}" if signature.given else signature.sample
    reading = read([text.encode()])
    if signature.role == "consequence" and signature.confidence == "low":
        assert reading.finding is None, "that somebody was told to end is no cause"
        return
    assert signature.class_ in classes(reading)
    if signature.role in ("marker", "harmless"):
        assert reading.finding is None
        return
    assert reading.finding is not None and reading.finding.remedy == signature.remedy
    assert reading.finding.line == text.count("\n") + 1


@pytest.mark.parametrize("signature", SIGNATURES, ids=NAMES)
def test_a_sample_holds_a_literal_that_is_searched_for(signature: Signature) -> None:
    """Or its lines would never be looked at."""
    assert any(need in signature.sample.lower() for need in signature.needs)


def test_every_class_of_the_facts_has_a_signature() -> None:
    """But for what only the doctor can tell, and classes that a phase or an exit status tells."""
    known = {one.class_ for one in SIGNATURES} | {phase.class_ for phase in book().data.phases}
    assert {fact["class"] for fact in facts()} <= known


@pytest.mark.parametrize("fact", facts(), ids=FACTS)
def test_a_known_line_alone(fact: dict[str, Any]) -> None:
    reading = read([fact["sample"].encode()])
    assert fact["class"] in classes(reading)
    assert (reading.finding is not None) == (fact["severity"] in TOLD)
    if reading.finding is not None:
        assert (reading.finding.severity == "warning") == (fact["severity"] == "warn")
        if fact["severity"] in ("secondary", "banner", "context"):
            assert reading.finding.confidence == "low"


@pytest.mark.parametrize("fact", facts(), ids=FACTS)
def test_a_known_line_among_healthy_ones(fact: dict[str, Any]) -> None:
    """Of 2,000 lines; tests/integration has 50,000."""
    around = healthy(2000)
    reading = read([joined(around[:1000]), joined([fact["sample"]]), joined(around[1000:])])
    if fact["severity"] in TOLD:
        assert reading.finding is not None
        assert (reading.finding.kind, reading.finding.line) == (fact["class"], 1001)
    else:
        assert reading.finding is None


@pytest.mark.parametrize("lines", [1, 30, 66, 67, 115, 5000])
def test_a_healthy_log_of_any_length_has_no_finding(lines: int) -> None:
    assert read([joined(healthy(lines))]).finding is None


PREFIXES = [
    "[2026-11-30 14:12:19 TP3] ",
    "[2026-11-30 14:12:19 DP0 TP3] ",
    "2026-11-30T14:11:53.1234567Z ",
    "2026-11-30T14:11:53.123456789Z stderr F ",
    "server-1  | ",
    "#12 34.56 ",
    "nox > ",
    "[rank3]: ",
    "(Worker_TP3 pid=811) ERROR 11-30 14:12:19 [core.py:844] ",
    "Nov 30 14:12:19 host sglang[77]: ",
    "\x1b[31m",
    "\x00\xff",
    "   ",
]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_what_stands_before_a_line_does_not_matter(prefix: str) -> None:
    for fact in facts():
        if fact["severity"] == "fatal":
            reading = read([f"{prefix}{fact['sample']}\x1b[0m\r\n".encode("latin-1")])
            assert reading.finding is not None and reading.finding.kind == fact["class"], fact


def test_wording_drifts() -> None:
    """Other numbers, other places, another case."""
    for fact in facts():
        if fact["severity"] != "fatal" or re.search(
            r"exit.code|CMP|major versions|signal", fact["sample"], re.IGNORECASE
        ):
            continue
        other = re.sub(r"(?<![\w.])\d+(?![\w.-])", "7", fact["sample"])
        for text in (other, f"some words before: {other} and some after", other.replace("/deepgemm/", "/x/y/")):
            reading = read([text.encode()])
            assert reading.finding is not None and reading.finding.kind == fact["class"], text


def test_a_wrong_file_is_refused() -> None:
    data = book().data.model_dump(mode="json", by_alias=True)
    broken = data | {"signatures": [data["signatures"][0] | {"phase": "nowhere"}]}
    with pytest.raises(ValueError, match="nowhere"):
        Signatures.model_validate(broken)
    broken = data | {"signatures": [data["signatures"][0] | {"needs": ["Upper Case"]}]}
    with pytest.raises(ValueError, match="needs"):
        Signatures.model_validate(broken)
    for pattern, word in (("(", "no regular expression"), ("Upper", "upper case"), ("^begin", "begin of a line")):
        broken = data | {"signatures": [data["signatures"][0] | {"pattern": pattern}]}
        with pytest.raises(ValueError, match=word):
            Signatures.model_validate(broken)
