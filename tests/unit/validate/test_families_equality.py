"""What counts as the same answer, and what a reply's tokens are on both servers' wires."""

from __future__ import annotations

import math

import pytest

from forge_validate import exchange
from forge_validate.families import about, prompts
from forge_validate.families.equality import compare, measure
from forge_validate.families.said import Said, read

from .conftest import WIRE


def said(text: str, *logprobs: float | None, finish: str = "length", second: str = "z", gap: float = 1.0) -> Said:
    """One token per character; each had one alternative, `gap` nats less likely."""
    values = logprobs or (-0.5,) * len(text)
    top = tuple({c: v, second: (v or 0.0) - gap} for c, v in zip(text, values, strict=True))
    return Said(text, tuple(text), tuple(values), top, finish, 5, len(text), None)


def test_equal_within_the_bound() -> None:
    found = compare(said("abc"), said("abc", -0.5, -0.51, -0.5), 0.02)
    assert (found.complaint, found.tokens, round(found.largest, 4)) == (None, 3, 0.01)
    beyond = compare(said("abc"), said("abc", -0.5, -0.53, -0.5), 0.02)
    assert beyond.sure and "token 1 is 0.03 off" in (beyond.complaint or "")
    assert compare(said("abc"), said("abc", -0.5, -9.0, -0.5), None).complaint is None


def test_a_flip_between_nearly_equal_tokens_is_no_difference() -> None:
    assert compare(said("abc", gap=0.03), said("azq"), 0.02).complaint is None
    assert compare(said("abc", gap=0.03), said("azq"), 0.02).tokens == 1
    far = compare(said("abc", gap=0.05), said("azq"), 0.02)
    assert far.sure and "0.05 nats less likely" in (far.complaint or "")
    strange = compare(said("abc", gap=0.03), said("aXq"), 0.02)
    assert strange.sure and "not among the likely ones" in (strange.complaint or "")
    blind = compare(said("abc", gap=0.03), said("azq"), None)
    assert not blind.sure and blind.complaint is not None


@pytest.mark.parametrize("value", [None, math.nan, -math.inf])
def test_a_logprob_that_is_no_number(value: float | None) -> None:
    found = compare(said("abc"), said("abc", -0.5, value, -0.5), 0.1)
    assert found.sure and "token 1" in (found.complaint or "")
    own = compare(said("abc", -0.5, value, -0.5), said("abc"), 0.1)
    assert not own.sure and "the reference's own" in (own.complaint or "")


def test_an_early_end_is_a_difference_and_a_shorter_budget_is_not() -> None:
    assert compare(said("abc"), said("abcde"), 0.1).complaint is None
    ended = compare(said("abc"), said("ab", finish="stop"), 0.1)
    assert ended.sure and "ends after 2 tokens" in (ended.complaint or "")


def test_without_logprobs_the_text_decides_but_is_not_sure() -> None:
    def plain(text: str, finish: str = "length") -> Said:
        return Said(text, (), (), (), finish, None, None, None)

    assert compare(plain("one two"), plain("one two"), None).complaint is None
    assert compare(plain("one"), plain("one two"), None).complaint is None
    differs = compare(plain("one two"), plain("one too"), None)
    assert differs.complaint is not None and not differs.sure
    assert compare(plain("one two"), plain("  "), None).sure


def test_noise_is_the_largest_difference_before_any_flip() -> None:
    found = measure([(said("abc"), said("abz", -0.5, -0.52, -3.0)), (said("a", -1.0), said("a", -1.01))])
    assert found is not None and found.tokens == 3 and found.largest == pytest.approx(0.02)
    assert measure([(said("a"), said("b"))]) is None


@pytest.mark.parametrize("server", ["sglang-0.5.23", "vllm-0.32.0"])
def test_tokens_of_both_servers(server: str) -> None:
    found = read(exchange.load(WIRE / server / "chat_logprobs.json"))
    assert found.tokens[:3] == ("\n", "The", " capital")
    assert "".join(found.tokens).startswith(found.text) and found.logprobs[0] == pytest.approx(-0.75, abs=0.05)
    assert found.top[0].keys() == {"\n", "1"}
    if server.startswith("sglang"):
        assert found.cached == 45


def test_metrics_and_sizes() -> None:
    text = (
        '# HELP x y\nvllm:cache_config_info{block_size="16",num_gpu_blocks="100",a="b,c"} 1.0\n'
        'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 1.0\n'
    )
    one = exchange.Exchange(
        name="batch/about/metrics",
        request=exchange.Request(method="GET", path="/metrics"),
        status=200,
        seconds=0.1,
        text=text,
    )
    assert about.gauge(one, about.RUNNING) == 3.0
    assert about.gauge(one, about.KV_USED) is None
    told = about.read({one.name: one}, "batch")
    assert (told.page, told.pool, told.max_running, told.graphs) == (16, 1600, None, ())


def test_curl_lines_are_one_line_of_shell() -> None:
    request = exchange.Request(method="POST", path="/v1/completions", body={"prompt": "it's", "max_tokens": 1})
    line = prompts.curl_at_once(request, 3)
    assert line.startswith("for i in $(seq 3); do curl") and "\n" not in line
    assert """'{"prompt": "it'"'"'s", "max_tokens": 1}'""" in line


def test_a_recorded_prompt_is_sent_from_its_file() -> None:
    request = exchange.Request(method="POST", path="/v1/completions", body={"prompt": [1], "max_tokens": 1})
    one = exchange.Exchange(name="context/chunk+1/cold", request=request, status=200, seconds=0.1)
    line = prompts.curl_recorded(one, salt="cold")
    assert line.startswith(
        "S=$S jq -c '.request.body | .cache_salt = env.S + \"-cold\"' exchanges/context__chunk+1__cold.json"
    )
    assert line.endswith('-H "Content-Type: application/json" -d @-') and '"$URL/v1/completions"' in line
    flush = prompts.curl(exchange.Request(method="POST", path="/flush_cache"))
    assert flush.endswith("-X POST")
