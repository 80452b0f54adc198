"""The framework of families and the batch ladder, against a server that can be made wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from asking import MARGIN, ask, bench, outcomes
from fake_engine import FakeEngine

from forge_core.errors import UsageError
from forge_validate import exchange
from forge_validate.exchange import Exchange, Request
from forge_validate.families import Ask, Wave, about, overlap
from forge_validate.families.runner import Sender
from forge_validate.server import Server

BATCH = {
    "batch": {
        "sizes": [1, 2, 3, 4],
        "largest": 8,
        "tokens": 16,
        "beside": 1,
        "prefill": 400,
        "margin": MARGIN,
        "timeout": 10,
    }
}
SIZES = {"batch/size-1", "batch/size-2", "batch/size-3", "batch/size-4", "batch/size-8"}


def test_a_healthy_server_passes(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        results, exchanges = ask(engine, BATCH, tmp_path)
    assert results.keys() == SIZES | {"batch/beside-prefill"}
    assert outcomes(results) == {}
    assert overlap.at_once(one for name, one in exchanges.items() if name.startswith("batch/8/")) == 8
    assert (results["batch/size-8"].value or 0) == pytest.approx(7e-6, rel=0.01)


@pytest.mark.parametrize("fault", ["batch", "nan"])
def test_wrong_from_batch_3_on(fault: str, tmp_path: Path) -> None:
    with FakeEngine() as engine:
        engine.faults.add(fault)
        results, _ = ask(engine, BATCH, tmp_path)
    assert outcomes(results) == dict.fromkeys(SIZES - {"batch/size-1", "batch/size-2"}, "failed")
    assert results["batch/size-3"].value == 3


def test_wrong_beside_a_prefill(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        engine.faults.add("beside")
        results, _ = ask(engine, BATCH, tmp_path)
    assert outcomes(results) == {"batch/beside-prefill": "failed"}


def test_a_server_that_does_not_batch_is_not_measured(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        engine.faults.add("serial")
        results, _ = ask(engine, BATCH, tmp_path)
    assert outcomes(results) == dict.fromkeys(results.keys() - {"batch/size-1"}, "unmeasured")
    assert "only 1 of 4" in results["batch/size-4"].explanation


def test_recorded_exchanges_are_judged_the_same(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        engine.faults.add("batch")
        results, _ = ask(engine, BATCH, tmp_path)
    loaded = {one.name: one for one in map(exchange.load, tmp_path.glob("*.json"))}
    judged = bench(BATCH)
    ((family, settings),) = judged.families
    # the smallest reproducer takes a server that can be asked again
    live = {name: one.model_copy(update={"reproduce": None}) for name, one in results.items()}
    assert {one.check: one for one in family.judge(settings, judged, loaded)} == live
    asked = {r.check: r for r in family.judge(settings, judged, {})}
    assert asked["batch/size-1"].outcome == "unmeasured"


def test_the_cost_is_no_less_than_what_was_asked(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        _, exchanges = ask(engine, BATCH, tmp_path)
        spent = sum(_tokens(one) for one in exchanges.values())
    ((family, settings),) = bench(BATCH).families
    assert spent <= family.cost(settings)


def _tokens(one: Exchange) -> int:
    body = one.request.body
    if not body:
        return 0
    prompt = body["prompt"]
    # Here a token is a character; a tokenizer makes one or two of a word.
    words = 2 * len(prompt.split()) if prompt.count("river") > 1 else len(prompt)
    return int(words + body["max_tokens"])


def test_a_suite_with_mistakes_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown families: nope"):
        bench({"nope": {}})
    with pytest.raises(UsageError, match=r"families\.batch: \d mistake"):
        bench({"batch": {"sizes": [0], "tokens": 4, "timeout": 1}})


# --- the runner -----------------------------------------------------------------------------------------------------


def completion(tokens: int) -> Request:
    body = {"model": "m", "prompt": "Hello", "max_tokens": tokens, "stream": True}
    return Request(method="POST", path="/v1/completions", body=body)


def test_what_a_wave_records(tmp_path: Path) -> None:
    with FakeEngine() as engine, Sender(Server(url=engine.url, served="m"), tmp_path) as sender:
        whole, cut, after = sender.send(
            Wave(
                (
                    Ask("f/whole", completion(20), timeout=5),
                    Ask("f/cut", completion(10_000), timeout=5, abort_after=0.2),
                    Ask("f/after", Request(method="GET", path="/metrics"), timeout=5, follows="f/whole"),
                )
            )
        )
        assert whole.error is None and whole.status == 200 and (whole.text or "").endswith("data: [DONE]\n\n")
        assert whole.began is not None and whole.first is not None and whole.ended is not None
        assert whole.began < whole.first < whole.ended
        assert cut.aborted and cut.error is None and "data:" in (cut.text or "")
        assert after.began is not None and after.began >= whole.first
        assert exchange.load(tmp_path / "f__cut.json") == cut
        for number in range(100):
            (idle,) = sender.send(Wave((about.metrics(f"f/metrics/{number}"),), pause=0.02))
            if about.gauge(idle, about.RUNNING) == 0:
                break
        else:
            pytest.fail("hanging up does not end the request")


def test_a_silence_is_an_error_with_what_was_read(tmp_path: Path) -> None:
    with FakeEngine(max_running=1) as engine, Sender(Server(url=engine.url, served="m"), tmp_path) as sender:
        engine.faults.add("stall")
        asks = tuple(Ask(f"f/{i}", completion(20), timeout=5, stall=0.3) for i in range(4))
        found = sender.send(Wave(asks))
    assert any("no byte for" in (one.error or "") and one.text for one in found)


def test_time_out_refused_connection_and_dead_server(tmp_path: Path) -> None:
    with FakeEngine() as engine:
        url = engine.url
        with Sender(Server(url=url, served="m"), tmp_path) as sender:
            (late,) = sender.send(Wave((Ask("f/late", completion(10_000), timeout=0.2),)))
    assert late.error == "no complete response within 0 s" and not late.aborted
    with Sender(Server(url=url, served="m", died=lambda: None), tmp_path) as sender:
        (refused,) = sender.send(Wave((Ask("f/refused", completion(1), timeout=5),)))
    assert "ConnectError" in (refused.error or "")
    with Sender(Server(url=url, served="m", died=lambda: "it died"), tmp_path) as sender:
        (dead,) = sender.send(Wave((Ask("f/dead", completion(1), timeout=5),)))
    assert dead.error == "not asked: it died"
