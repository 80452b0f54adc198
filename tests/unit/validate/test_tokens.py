"""The garbage detector against what broken servers said, and against clean text of many kinds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forge_validate import policy
from forge_validate.checks.tokens import complain, complain_of_tokens, garbage, measure, texts
from forge_validate.checks.tokens.repetition import fewest_distinct, repeated_share, stretches
from forge_validate.policy import Text
from forge_validate.reply import Reply, ToolCall

from .conftest import WIRE

LIMITS: Text = policy.load("rehearsal").text
CLEAN = {path.stem: path.read_text(encoding="utf-8") for path in sorted((WIRE.parent / "texts").glob("*.txt"))}
PARAGRAPHS = [part for text in CLEAN.values() for part in text.split("\n\n") if sum(map(str.isalpha, part)) > 20]
GOOD = CLEAN["long-english"].strip()


def why(said: str, **how: Any) -> str | None:
    return complain(measure(said, LIMITS, **how), LIMITS)


# What broken servers said, each as long as a budget lets it be: alone, and after a good start.
COLLAPSE = {
    "token-0": "!" * 64,
    "slashes": "/" * 200,
    "questions": "?" * 48,
    "spaced": "! " * 40,
    "dots": "." * 180,
    "zeros": "0" * 200,
    "numbers": "1, " * 120,
    "should": "should " * 12,
    "pair": "the of " * 16,
    "chinese": "的" * 60,
    "chinese-phrase": "我不知道" * 12,
    "arabic": "في " * 30,
    "thai": "และ" * 20,
    "hindi": "और " * 20,
    "emoji": "\U0001f600" * 40,
    "sentence": "I am sorry, but I cannot help you with that question today. " * 9,
    "paragraph": ("The valve opens when the pump stops and the float has sunk below the line. " * 2 + "Then wait. ")
    * 9,
    "two-words": " ".join("is" if (7 * n * n + n) % 5 < 2 else "of" for n in range(200)),
    "replacement": "\ufffd\ufffd\ufffd\ufffd and so on",
    "control": "\x00\x01\x02\x03 and",
    "escape": "\x1b[31m and red",
    "private": "\ue000\ue123 and",
    "zero-width": "a\u200bb\u200bc\u200bd",
    "byte-order": "\ufeff\ufeff and",
    "newlines": "\n" * 400 + "x",
    "blanks": " \n" * 300 + "}",
    "salad": "capital столица 首都 عاصمة hauptstadt πρωτεύουσα पूंजी ciudad 도시 город เมือง kota שלום ville",
    "alphabets": "прoverkа сloвo текstы миrом словоform буkвы",
    "drawn": "─" * 300,
    "abab": "abab" * 40,
    "brackets": "]" * 60,
    "dollar": "$" * 60,
    "quote": '"' * 60,
    "mixed-token": "Ġthe" * 20,
    "digits": "42" * 100,
}
# Only as the whole reply: too short to be told from laughter or a refrain inside a text.
SHORT = [
    "!!!!",
    "////",
    "????",
    "----",
    "====",
    "should should should should",
    "........",
    "00000000",
    "哈哈哈哈",
    "\u00a0\ufffd",
]


@pytest.mark.parametrize("name", CLEAN)
def test_clean_text_is_clean(name: str) -> None:
    assert why(CLEAN[name]) is None
    assert why(CLEAN[name].strip(), cut=True) is None
    assert measure(CLEAN[name], LIMITS).special == ()


@pytest.mark.parametrize("name", CLEAN)
def test_clean_text_is_clean_wherever_it_stands(name: str) -> None:
    text = CLEAN[name]
    calls = (
        ToolCall("write", json.dumps({"lines": text.split("\n"), "text": text})),
        ToolCall("note", json.dumps([text])),
    )
    assert garbage(Reply("m", text, text, "stop", calls), LIMITS) is None


@pytest.mark.parametrize("name", CLEAN)
def test_clean_text_cut_anywhere_is_clean(name: str) -> None:
    text = CLEAN[name]
    for end in range(len(text) // 3, len(text), len(text) // 9 + 1):
        assert why(text[:end], cut=True) is None, text[:end]


@pytest.mark.parametrize("name", COLLAPSE)
def test_garbage_is_garbage(name: str) -> None:
    assert why(COLLAPSE[name]) is not None
    assert why(COLLAPSE[name], cut=True) is not None


@pytest.mark.parametrize("name", COLLAPSE)
def test_a_collapse_after_a_good_start_is_garbage(name: str) -> None:
    for start in (GOOD, GOOD + "\n\n", CLEAN["chinese"], CLEAN["python-code"], CLEAN["arabic"]):
        assert why(start + " " + COLLAPSE[name], cut=True) is not None, start[-40:]


@pytest.mark.parametrize("said", SHORT)
def test_short_garbage_alone_is_garbage(said: str) -> None:
    assert why(said) is not None


@pytest.mark.parametrize("name", COLLAPSE)
@pytest.mark.parametrize("place", ["content", "reasoning", "arguments"])
def test_garbage_is_found_in_every_place(name: str, place: str) -> None:
    bad = COLLAPSE[name]
    said = {
        "content": Reply("m", bad, "All is well with the answer.", "stop"),
        "reasoning": Reply("m", "All is well with the answer.", bad, "stop"),
        "arguments": Reply("m", "", "", "tool_calls", (ToolCall("f", json.dumps({"a": {"b": ["well", bad]}})),)),
    }[place]
    found = garbage(said, LIMITS)
    assert found is not None and place in found[0]


def test_where_garbage_stands_in_arguments() -> None:
    said = Reply("m", "", "", "tool_calls", (ToolCall("f", '{"a": {"b": ["x", "y\\u0000"]}}'),))
    assert garbage(said, LIMITS) == (
        "arguments of the tool call, .a.b",
        "the arguments of the tool call, .a.b is garbage: "
        "1 control, zero-width, unassigned or replacement characters (U+0000)",
    )


def test_a_collapse_says_how_much_stood_before_it() -> None:
    found = measure(GOOD + " " + "!" * 64, LIMITS).repeat
    assert found is not None and (found.unit, found.length) == ("!", 64)
    assert found.before == len("".join(GOOD.split()))


@pytest.mark.parametrize(
    "said",
    [
        "1111", "2222222", "www.example.org", "No, no, no!", "100000", "1000000000000", "3.333333", "Hmmm...", "ha ha ha",
        "(((1 + 2) * 3) * 4)", "aaa", "哈哈哈", "00:00:00", "11:11", "C++", "Zzz...", "🎉🎉🎉", "[[0, 0], [0, 0]]", "{}", "...",
        "10.0.0.0", "no", "x", "π", "Привет", "你", "a\u0301", "e\u0301\u0323", "\u05e9\u05b8\u05c1", "क्‍ष", "🏴\u200d☠️",
        "naïve café", "100%", "#### Title", "- - -\ntext", "I said: \"no no no\"", "\t\tx = 1", "Yes!!!", "What???",
    ],
)  # fmt: skip
def test_short_clean_text_is_clean(said: str) -> None:
    assert why(said) is None


@pytest.mark.parametrize(
    "said",
    [
        "می\u200cخواهم", "क्\u200dष", "ක්\u200dරී", "👩\u200d🚀", "ไทย\u200bภาษา", "co\u00adoperate", "❤\ufe0f", "1\ufe0f\u20e3",
        "葛\U000e0100城", "שלום\u200f!", "\U0001fae8", "\U000323b0", "العدد \u0600٣",
    ],
)  # fmt: skip
def test_format_characters_in_their_place(said: str) -> None:
    assert measure(said, LIMITS).strange == ()


@pytest.mark.parametrize(
    "said",
    [
        "Par\u200dis", "Par\u200cis", "Par\u200bis", "\u200d", "a\ufe0f", "\ufe0f", "hello\u200f", "x\ufeff", "x\u2060y", "\u00ad",
        "\U000e0041", "\ud800", "\uffff", "\u0378", "\x7f", "\x85", "👩\u200d", "\U0010ffff",
    ],
)  # fmt: skip
def test_format_characters_out_of_place(said: str) -> None:
    assert measure(said, LIMITS).strange != ()


def test_the_last_character_may_be_cut() -> None:
    assert why("It rains \ufffd\ufffd", cut=True) is None
    assert why("It rains \ufffd\ufffd") is not None
    assert why("It rains" + "\ufffd" * 4, cut=True) is not None
    assert why("It \ufffd rains", cut=True) is not None


def test_repetition_that_was_asked_for() -> None:
    said = Reply("m", "knock " * 40, "", "stop")
    assert garbage(said, LIMITS) is not None
    assert garbage(said, LIMITS, asked={"content"}) is None
    assert garbage(said, LIMITS, prompt="Say it as often as I do: knock knock knock knock knock") is None
    assert garbage(said, LIMITS, prompt="Say knock forty times") is not None
    assert garbage(Reply("m", "!" * 40, "", "stop"), LIMITS, prompt="Answer me!!!!") is not None
    # Asked for or not, broken characters are broken.
    assert garbage(Reply("m", "knock \x00" * 40, "", "stop"), LIMITS, asked={"content"}) is not None


def test_one_token_over_and_over_shows_without_text() -> None:
    assert complain_of_tokens([0] * 48, 0, LIMITS) is not None
    assert complain_of_tokens(["<|endoftext|>"] * 48, 0, LIMITS) is not None
    assert complain_of_tokens([7042, 30, 198, 198], 8, LIMITS) is None
    assert complain_of_tokens([5, 9] * 40, 10, LIMITS) is not None
    # ten to the twentieth, one token a digit: the text says that it is one
    assert complain_of_tokens([33, *[32] * 20], 21, LIMITS) is None
    assert complain_of_tokens(["1", *["0"] * 20], 21, LIMITS) is None
    found = garbage(Reply("m", "", "", "length", tokens=(0,) * 48, completion_tokens=48), LIMITS)
    assert found is not None and "'0' over and over, 48 of 48 tokens, and no text" in found[1]


@pytest.mark.parametrize("reply", [Reply("m", "", "", "stop"), Reply("m", " \n", "", "length", completion_tokens=48)])
def test_nothing_at_all_is_garbage(reply: Reply) -> None:
    found = garbage(reply, LIMITS)
    assert found is not None and "not one character" in found[1]


def test_texts_of_a_reply() -> None:
    calls = (ToolCall("f", '{"a": "x"}'), ToolCall("g", "no JSON"), ToolCall("h", ""))
    assert dict(texts(Reply("m", "hello", " ", "stop", calls))) == {
        "content": "hello",
        "arguments of tool call 1": '{"0": "1"}',
        "arguments of tool call 1, .a": "x",
        "arguments of tool call 2": "no JSON",
    }


def test_translations_are_no_salad_and_salad_is() -> None:
    assert measure(CLEAN["translations"], LIMITS).salad is None
    found = measure(GOOD + " " + COLLAPSE["salad"], LIMITS).salad
    assert found is not None and len(found.scripts) > 2 and found.start > 0


@given(st.text())
@example("\ud800")
@example("a" * 3000)
@example("[" * 3000)
@settings(max_examples=60)
def test_no_text_is_too_strange_to_look_at(said: str) -> None:
    for cut in (False, True):
        found = measure(said, LIMITS, cut=cut)
        complain(found, LIMITS)
    garbage(Reply("m", said, said[::-1], None, (ToolCall(said, said),), tokens=tuple(said)), LIMITS, prompt=said)


@given(st.lists(st.sampled_from(PARAGRAPHS), min_size=1, max_size=5, unique=True), st.sampled_from(["\n\n", "\n", " "]))
@settings(max_examples=60)
def test_clean_parts_make_a_clean_whole(parts: list[str], between: str) -> None:
    if between == " ":
        # Two languages in one line are what salad is made of; tables and rules are such only on lines of their own.
        parts = [part for part in parts if part.isascii() and "\n" not in part and "|" not in part]
    assert why(between.join(parts)) is None


@given(
    st.lists(st.sampled_from(PARAGRAPHS), max_size=3, unique=True),
    st.text("abcdefghijklmnopqrstuvwxyzABCDEFéßжщאبहไ中文語한!?/$&@", min_size=1, max_size=12),
    st.sampled_from(["", " ", "\n"]),
)
@settings(max_examples=80)
def test_a_unit_over_and_over_is_garbage_after_any_good_start(start: list[str], unit: str, between: str) -> None:
    said = between.join([unit] * (48 // len(unit) + 10))
    assert why(said) is not None
    assert why("\n\n".join([*start, said]), cut=True) is not None


@given(st.sampled_from(PARAGRAPHS), st.sampled_from("\ufffd\x00\x08\u200b\ufeff\ue000\uffff"), st.data())
def test_one_broken_character_anywhere_is_found(text: str, broken: str, data: st.DataObject) -> None:
    here = data.draw(st.integers(0, len(text)))
    # A zero-width space has work to do in some scripts.
    if broken != "\u200b" or text.isascii():
        assert why(text[:here] + broken + text[here:]) is not None


@given(st.lists(st.sampled_from("ab"), max_size=40), st.integers(1, 6), st.integers(2, 5))
def test_stretches_repeat_and_none_is_missed(items: list[str], longest: int, times: int) -> None:
    found = list(stretches(items, longest, times))
    for one in found:
        assert one.times >= times and one.period <= longest
        part = items[one.start : one.end]
        assert all(part[n] == part[n - one.period] for n in range(one.period, len(part)))
    for period in range(1, longest + 1):
        for start in range(len(items) - times * period + 1):
            unit = items[start : start + period]
            if items[start : start + times * period] == unit * times:
                assert any(f.period == period and f.start <= start and f.end >= start + times * period for f in found)


@given(st.lists(st.integers(0, 5), max_size=60), st.integers(1, 10))
def test_fewest_distinct(items: list[int], window: int) -> None:
    windows = [len(set(items[n : n + window])) for n in range(len(items) - window + 1)]
    assert fewest_distinct(items, window) == min(windows, default=None)


def test_repeated_share() -> None:
    assert repeated_share("abcabcabc", 3) == pytest.approx(4 / 7)
    assert repeated_share("ab", 3) == 0


def test_every_threshold_says_why() -> None:
    for name in ("rehearsal", "sm120"):
        for field, threshold in policy.load(name).text:
            assert len(threshold.reason) > 30, f"{name}: {field}"


def test_texts_lie_where_the_tests_look() -> None:
    assert len(CLEAN) >= 37 and Path(WIRE).is_dir()
