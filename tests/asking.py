"""Asks families of the stand-in engine, as a trial does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine

from forge_validate import policy, suite
from forge_validate.checks import CheckResult
from forge_validate.exchange import Exchange
from forge_validate.families import runner
from forge_validate.families.golden import Settings
from forge_validate.families.runner import Sender
from forge_validate.golden.document import Golden, Subject
from forge_validate.golden.record import record
from forge_validate.judge import Bench
from forge_validate.offers import Offers, Seen
from forge_validate.server import Server

CHAT = "the stand-in chats only"
OFFERS = Offers.certain(("native", "metrics", "tokenize", "logprobs"), "the stand-in has it").model_copy(
    update={"tokenize_path": "/tokenize"}
)
MARGIN = {"value": 4, "reason": "the stand-in adds a millionth for each request more"}


def bench(sections: Mapping[str, Mapping[str, Any]], **changes: Any) -> Bench:
    """A bench with these families."""
    cases, answers = suite.load("smoke", "SmolLM2-135M-Instruct")
    asked = cases.model_copy(update={"families": {name: dict(section) for name, section in sections.items()}})
    return Bench(asked, answers, policy.load("rehearsal"), "m", **changes)


GOLDEN: dict[str, Any] = {
    "buckets": {40: 2, 120: 1},
    "tail": 12,
    "continuation": 8,
    "alternatives": 8,
    "least": 8,
    "margin": MARGIN,
    "agreement": {"value": 0.9, "reason": "the stand-in's likeliest letter is far ahead"},
    "timeout": 60,
}


def recorded_golden(engine: FakeEngine, folder: Path, **changes: Any) -> Golden:
    """A golden of the stand-in as it is now."""
    judged = bench({"golden": GOLDEN | changes}, offers=OFFERS)
    ((_, settings),) = judged.families
    assert isinstance(settings, Settings)
    subject = Subject(model="SmolLM2-135M-Instruct", revision=None, tokenizer=None)
    with Sender(Server(url=engine.url, served="m"), folder) as sender:
        return record(sender, judged, settings, subject, "the stand-in is healthy", encode, lambda _: None)


def encode(text: str) -> tuple[int, ...]:
    """The stand-in's tokens."""
    return tuple(map(ord, text))


def ask(
    engine: FakeEngine,
    sections: Mapping[str, Mapping[str, Any]],
    folder: Path,
    *,
    gpu_memory: Callable[[], int | None] | None = None,
    **changes: Any,
) -> tuple[dict[str, CheckResult], dict[str, Exchange]]:
    """The results by check, and the exchanges by name."""
    server = Server(url=engine.url, served="m", memory=engine.memory, gpu_memory=gpu_memory)
    offers = OFFERS
    if engine.chat:
        offers = OFFERS.joined(Offers(seen=(Seen(name="completions", state="absent", evidence=CHAT),)))
    if gpu_memory is not None:
        offers = offers.joined(Offers.certain(("gpu-memory",), "the test has it"))
    judged = bench(sections, **({"offers": offers} | changes))
    recorded: dict[str, Exchange] = {}
    results: list[CheckResult] = []
    with Sender(server, folder) as sender:
        for family, settings in judged.families:
            runner.run(sender, judged, family, settings, recorded, lambda wave, count: None)
            found = family.judge(settings, judged, recorded)
            results += runner.reproduce(sender, judged, family, settings, found, recorded, lambda wave, count: None)
    return {one.check: one for one in results}, recorded


def outcomes(results: Mapping[str, CheckResult]) -> dict[str, str]:
    """What did not pass, and how."""
    return {name: one.outcome for name, one in results.items() if one.outcome != "passed"}
