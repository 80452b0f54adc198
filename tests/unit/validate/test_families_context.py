"""The context family: what a long prompt is made of, and a server that can be made wrong for it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from asking import MARGIN, ask, bench, outcomes
from fake_engine import FakeEngine

from forge_validate import exchange
from forge_validate.diagnose import diagnose
from forge_validate.families import about, hits, long
from forge_validate.families.about import About
from forge_validate.families.long import Parts

CONTEXT = {
    "context": {
        "edges": ["chunk-1", "chunk", "chunk+1", "2chunk+1"],
        "depths": [0.1, 0.5, 0.9],
        "budget": 9000,
        "reach": {"value": 4096, "reason": "the stand-in finds every needle"},
        "tokens": 10,
        "margin": MARGIN,
        "timeout": 30,
    }
}
LENGTHS = {f"context/{edge}" for edge in ("chunk-1", "chunk", "chunk+1", "2chunk+1")}
BEHIND = {"context/chunk+1", "context/2chunk+1"}


def test_a_healthy_server_passes_and_costs_no_more_than_stated(tmp_path: Path) -> None:
    with FakeEngine(window=2000) as engine:
        results, exchanges = ask(engine, CONTEXT, tmp_path)
    assert outcomes(results) == {} and results.keys() == LENGTHS | {"context/too-long"}
    told = results["context/chunk+1"].explanation
    assert told.startswith("513 tokens; the needle at 10% is found; 10 tokens are the same")
    ((family, settings),) = bench(CONTEXT).families
    spent = sum(hits.prompt_tokens(one) + one.request.body["max_tokens"] for one in exchanges.values() if _said(one))
    assert 0 < spent <= family.cost(settings)


def _said(one: exchange.Exchange) -> bool:
    return one.status == 200 and "max_tokens" in (one.request.body or {})


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        ("chunk", dict.fromkeys(BEHIND, "failed")),
        ("forget", dict.fromkeys(BEHIND, "failed")),
        ("truncate", {"context/too-long": "failed"}),
        ("unsalted", dict.fromkeys(LENGTHS, "unmeasured")),
        ("mute", dict.fromkeys(LENGTHS, "unmeasured")),
    ],
)
def test_what_a_fault_fails(fault: str, wrong: dict[str, str], tmp_path: Path) -> None:
    with FakeEngine(window=2000) as engine:
        engine.faults.add(fault)
        results, _ = ask(engine, CONTEXT, tmp_path)
    assert outcomes(results) == wrong
    failing = [one for one in results.values() if one.outcome == "failed"]
    if failing:
        found = diagnose(failing)
        assert found is not None and found.kind == "context"
    if fault == "forget":
        assert "lost: 00000 instead of" in results["context/chunk+1"].explanation
    # The smallest length that fails is shown, from its recorded file.
    if fault in ("chunk", "forget"):
        line = results["context/chunk+1"].reproduce or ""
        assert line.count("exchanges/context__chunk+1__") == 3 and results["context/2chunk+1"].reproduce is None


def test_a_prompt_that_is_too_long_and_never_answered(tmp_path: Path) -> None:
    with FakeEngine(window=400) as engine:
        engine.faults.add("swallow")
        short = {"context": CONTEXT["context"] | {"edges": [], "timeout": 0.5}}
        results, _ = ask(engine, short, tmp_path)
    assert outcomes(results) == {"context/too-long": "failed"}


def test_the_window_itself_and_the_budget(tmp_path: Path) -> None:
    section = CONTEXT["context"] | {"edges": ["chunk", "2chunk+1", "window"], "budget": 4400, "lengths": [300]}
    with FakeEngine(window=900) as engine:
        results, exchanges = ask(engine, {"context": section}, tmp_path)
    # Beyond the window there is nothing to ask.
    assert results.keys() == {f"context/{name}" for name in ("too-long", "length-300", "chunk", "window")}
    assert outcomes(results) == {}
    assert hits.prompt_tokens(exchanges["context/window/cold"]) == 890
    with FakeEngine(window=900) as engine:
        poor, _ = ask(engine, {"context": section | {"budget": 2300}}, tmp_path / "poor")
    assert outcomes(poor) == {"context/window": "unmeasured"} and "budget" in poor["context/window"].explanation


def test_a_model_that_finds_nothing_is_judged_by_equality(tmp_path: Path) -> None:
    section = CONTEXT["context"] | {"reach": {"value": 64, "reason": "as if nothing were known of the model"}}
    with FakeEngine(window=2000) as engine:
        engine.faults.add("forget")
        results, _ = ask(engine, {"context": section}, tmp_path)
    assert outcomes(results) == {}
    assert "no needle is demanded beyond 64 tokens" in results["context/chunk+1"].explanation


def test_recorded_exchanges_are_judged_the_same(tmp_path: Path) -> None:
    with FakeEngine(window=2000) as engine:
        engine.faults.add("forget")
        results, _ = ask(engine, CONTEXT, tmp_path)
    loaded = {one.name: one for one in map(exchange.load, tmp_path.glob("*.json"))}
    judged = bench(CONTEXT)
    ((family, settings),) = judged.families
    live = {name: one.model_copy(update={"reproduce": None}) for name, one in results.items()}
    assert {one.check: one for one in family.judge(settings, judged, loaded)} == live
    assert {one.outcome for one in family.judge(settings, judged, {})} == {"unmeasured"}


# --- what a prompt is made of ---------------------------------------------------------------------------------------


def test_a_prompt_is_exact_and_holds_its_needles_where_they_belong() -> None:
    parts = Parts(tuple(range(100)), ((201, 202), (211, 212)), ((301,), (311, 312)))
    ids = long.compose(parts, 60, (0.5, 0.0), asked=1, start=7)
    assert len(ids) == 60 and ids[-2:] == [311, 312]
    # Depth 0 is the second needle's, and text begins where it was told.
    assert ids[:3] == [211, 212, 7] and ids.index(201) == 2 + (60 - 2 - 4) // 2
    with pytest.raises(ValueError, match="do not hold"):
        long.compose(parts, parts.least - 1, (0.5, 0.0), 1, 0)
    assert len(long.compose(parts, parts.least, (0.5, 0.0), 1, 0)) == parts.least


@pytest.mark.parametrize(
    ("size", "chunk", "expected"),
    [
        (511, 512, (255,)),
        (513, 512, (256,)),
        (1025, 512, (341, 683)),
        (8184, 512, (3069,)),
        (100, None, (50,)),
        (100, 0, (50,)),
    ],
)
def test_pieces_are_whole_where_they_can_be(size: int, chunk: int | None, expected: tuple[int, ...]) -> None:
    assert long.steps(size, chunk) == expected
    if chunk and len(expected) > 1:
        assert all(end - begin <= chunk for begin, end in zip((0, *expected), (*expected, size), strict=True))


def test_lengths_that_a_server_has() -> None:
    told = About(window=8192, input=8186, chunk=512)
    found = {
        one.name: (one.tokens, one.over)
        for one in long.lengths(("chunk+1", "sliding", "window"), (9000,), told, None, 10)
    }
    assert found == {"chunk+1": (513, 512), "window": (8182, None)}
    found = {one.name: (one.tokens, one.over) for one in long.lengths(("sliding+1",), (), told, 1024, 10)}
    assert found == {"sliding+1": (1025, 1024)}
    # Off is no edge; not told is one that is lacking.
    assert long.lengths(("chunk",), (), About(chunk=0), None, 10) == ()
    assert [one.tokens for one in long.lengths(("chunk", "window"), (), About(), None, 10)] == [None, None]


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"sliding_window": 1024}, 1024),
        ({"sliding_window": 1024, "use_sliding_window": False}, None),
        ({"text_config": {"sliding_window": 512}}, 512),
        ({"sliding_window": None}, None),
        ({"attention_chunk_size": 8192}, 8192),
    ],
)
def test_the_sliding_window_of_a_model(config: dict[str, object], size: int | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert long.sliding_window(tmp_path) == size
    assert long.sliding_window(None) is None and long.sliding_window(tmp_path / "none") is None


def test_answers_are_numbers_as_a_whole() -> None:
    assert [long.answer(text) for text in (" 12345.", "123456", "the 12345", "")] == ["12345", "123456", "", ""]
    assert len({long.number(i) for i in range(len(long.CITIES))}) == len(long.CITIES)


def test_what_servers_tell_of_their_window_and_chunks() -> None:
    def one(name: str, body: object) -> exchange.Exchange:
        request = exchange.Request(method="GET", path="/x")
        return exchange.Exchange(name=f"context/about/{name}", request=request, status=200, seconds=0, response=body)

    sglang = one("server-info", {"chunked_prefill_size": 4096, "context_length": None, "max_req_input_len": 8186})
    models = one("models", {"data": [{"id": "m", "max_model_len": 8192}]})
    told = about.read({e.name: e for e in (sglang, models)}, "context")
    assert (told.chunk, told.window, told.input) == (4096, 8192, 8186)
    off = about.read({"context/about/server-info": one("server-info", {"chunked_prefill_size": -1})}, "context")
    assert (off.chunk, off.window, off.input) == (0, None, None)
