"""Template, parsers and stream against a server that can be made wrong: each fault is found, by its own family alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from asking import OFFERS, bench, outcomes
from fake_chat import FakeChat, model_folder

from forge_validate import exchange
from forge_validate.checks import CheckResult
from forge_validate.diagnose import diagnose
from forge_validate.exchange import Exchange
from forge_validate.families import runner
from forge_validate.families.runner import Sender
from forge_validate.offers import UNSEEN
from forge_validate.server import Server

SECTIONS = {
    "template": {"words": 60, "at_once": 8, "timeout": 10},
    "parsers": {"tokens": 40, "small": 3, "at_once": 4, "timeout": 10},
    "stream": {"tokens": 24, "short": 5, "several": 3, "timeout": 10},
}


def ask(server: FakeChat, folder: Path, *, model: bool = True) -> tuple[dict[str, CheckResult], dict[str, Exchange]]:
    place = Server(url=server.url, served="m")
    judged = bench(
        SECTIONS, offers=OFFERS if server.native else UNSEEN, model=model_folder(folder / "model") if model else None
    )
    recorded: dict[str, Exchange] = {}
    results: list[CheckResult] = []
    with Sender(place, folder / "exchanges") as sender:
        for family, settings in judged.families:
            runner.run(sender, judged, family, settings, recorded, lambda wave, count: None)
            results += family.judge(settings, judged, recorded)
    return {one.check: one for one in results}, recorded


def both(*checks: str) -> set[str]:
    return {f"{check}{way}" for check in checks for way in ("", "-streamed")}


@pytest.mark.parametrize("sglang", [True, False])
def test_a_healthy_server_passes_and_costs_no_more_than_stated(sglang: bool, tmp_path: Path) -> None:
    with FakeChat(sglang=sglang) as server:
        results, exchanges = ask(server, tmp_path)
    assert outcomes(results) == {}
    assert sum(name.startswith("template/") for name in results) >= 20
    read_as = "sglang" if sglang else "plain"
    assert all(
        f"read as {read_as})" in one.explanation for name, one in results.items() if name.startswith("template/")
    )
    for family, settings in bench(SECTIONS).families:
        asked = [one for name, one in exchanges.items() if name.startswith(f"{family.name}/")]
        assert 0 < sum(map(_spent, asked)) <= family.cost(settings)


def _spent(one: Exchange) -> int:
    if isinstance(one.response, dict):
        return int(one.response.get("usage", {}).get("total_tokens", 0))
    return int((one.text or "").rpartition('"total_tokens": ')[2].partition("}")[0] or 0)


FAULTS: dict[str, set[str]] = {
    "think-leak": both("parsers/thinking-on"),
    "thought-in-content": both("parsers/thinking-cut"),
    "reasoning-off": both("parsers/thinking-off"),
    "wrong-name": both("parsers/tool-named"),
    "mojibake": both("parsers/tool-nested"),
    "ignored-none": both("parsers/tool-none"),
    "merged": both("parsers/tool-parallel"),
    "third-turn": both("parsers/after-result"),
    "schema": both("parsers/json-schema"),
    "call-as-text": both(
        "parsers/tool-required",
        "parsers/tool-named",
        "parsers/tool-nested",
        "parsers/tool-auto",
        "parsers/tool-parallel",
        "parsers/third-turn",
    ),
    "swallowed": both(
        "parsers/tool-required", "parsers/tool-named", "parsers/tool-nested", "parsers/tool-auto", "parsers/third-turn"
    ),
    "broken-arguments": both(
        "parsers/tool-required",
        "parsers/tool-named",
        "parsers/tool-nested",
        "parsers/tool-auto",
        "parsers/tool-parallel",
        "parsers/third-turn",
    ),
    "dropped": {"stream/completion-same", "stream/chat-same", "stream/chat-thinking-same"},
    "doubled": {"stream/completion-same", "stream/chat-same", "stream/chat-thinking-same"},
    "swapped": {"stream/completion-same", "stream/chat-same", "stream/chat-thinking-same"},
    "length-stop": {"stream/length-buffered", "stream/length-streamed"},
    "stop-leak": {"stream/stop-buffered", "stream/stop-streamed"},
    "one-of-n": {"stream/n-buffered", "stream/n-streamed"},
}
PROBES = ("completion", "chat", "chat-thinking", "chat-unicode", "chat-tool")
ORDER = {f"stream/{probe}-order" for probe in PROBES}
FAULTS |= {
    "no-role": ORDER - {"stream/completion-order"},
    "late": {
        *(ORDER - {"stream/chat-unicode-order"}),
        *("stream/completion-same", "stream/chat-same", "stream/chat-thinking-same"),
        *("stream/stop-streamed", "stream/n-streamed"),
    },
    "two-ids": ORDER | {"stream/n-streamed"},
    "no-usage": ORDER | {f"stream/{probe}-usage" for probe in PROBES} | {"stream/length-streamed", "stream/n-streamed"},
    "usage": {f"stream/{probe}-usage" for probe in PROBES} | {"stream/length-streamed"},
}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_a_fault_fails_its_own_checks_alone(fault: str, tmp_path: Path) -> None:
    with FakeChat() as server:
        server.faults.add(fault)
        results, _ = ask(server, tmp_path)
    wrong = {name for name, outcome in outcomes(results).items() if outcome == "failed"}
    assert wrong == FAULTS[fault]
    (family,) = {name.partition("/")[0] for name in outcomes(results)}
    failing = [one for one in results.values() if one.outcome == "failed"]
    assert all("curl " in (one.reproduce or "") for one in failing if not one.check.endswith("-usage"))
    found = diagnose(failing)
    assert found is not None and found.kind == {"parsers": "parser", "stream": "stream"}[family]


@pytest.mark.parametrize(
    ("fault", "some", "other"),
    [
        ("turns-template", "template/user", None),
        ("tools-template", "template/tools-nested", "template/system"),
        ("system-template", "template/system", "template/tool"),
    ],
)
def test_a_template_that_is_not_the_models(fault: str, some: str, other: str | None, tmp_path: Path) -> None:
    with FakeChat() as server:
        server.faults.add(fault)
        results, _ = ask(server, tmp_path)
    wrong = outcomes(results)
    assert wrong[some] == "failed" and (other is None or other not in wrong)
    assert {name.partition("/")[0] for name in wrong} == {"template"}
    found = diagnose([one for one in results.values() if one.outcome == "failed"])
    assert found is not None and found.kind == "template"


@pytest.mark.parametrize("fault", ["no-finish", "no-done"])
def test_a_stream_that_breaks_off(fault: str, tmp_path: Path) -> None:
    with FakeChat() as server:
        server.faults.add(fault)
        results, _ = ask(server, tmp_path)
    assert outcomes(results).items() >= dict.fromkeys(ORDER, "failed").items()
    assert not [name for name in outcomes(results) if name.startswith("template/")]


@pytest.mark.parametrize("native", [True, False])
def test_a_server_without_a_tool_parser_is_not_wrong(native: bool, tmp_path: Path) -> None:
    with FakeChat(native=native) as server:
        server.faults.add("no-parser")
        results, _ = ask(server, tmp_path)
    needs = both("parsers/tool-required", "parsers/tool-named", "parsers/tool-nested", "parsers/tool-auto")
    assert needs <= {name for name, outcome in outcomes(results).items() if outcome == "unmeasured"}
    assert results["stream/chat-tool-same"].outcome == "passed"


def test_without_a_model_folder_the_template_is_not_measured(tmp_path: Path) -> None:
    with FakeChat() as server:
        results, _ = ask(server, tmp_path, model=False)
    assert set(outcomes(results).values()) == {"unmeasured"}
    assert all(name.startswith("template/") for name in outcomes(results))


def test_recorded_exchanges_are_judged_the_same(tmp_path: Path) -> None:
    with FakeChat() as server:
        server.faults |= {"dropped", "merged", "tools-template"}
        results, _ = ask(server, tmp_path)
    loaded = {one.name: one for one in map(exchange.load, (tmp_path / "exchanges").glob("*.json"))}
    judged = bench(SECTIONS, model=tmp_path / "model")
    again = [one for family, settings in judged.families for one in family.judge(settings, judged, loaded)]
    assert {one.check: one for one in again} == results
    nothing = [one for family, settings in judged.families for one in family.judge(settings, judged, {})]
    assert {one.outcome for one in nothing} == {"unmeasured"} and len(nothing) == len(results)
