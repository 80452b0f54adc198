"""The divergence of two rows, the grid of logits, what a golden file must be, and what its noise allows."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from forge_core.errors import IntegrityError, UsageError
from forge_validate import data
from forge_validate.families.golden import Settings, chosen
from forge_validate.golden import document, texts
from forge_validate.golden.divergence import RESOLUTION, Row, agree, alike, amount, by_text, kl, row, step
from forge_validate.golden.document import Golden, Noise, Prompt, Subject
from forge_validate.golden.limits import limits
from forge_validate.suite import Suite

VOCABULARY = 60


def rows_of(*probabilities: float) -> Row:
    return row([(token, math.log(value)) for token, value in enumerate(probabilities)])


def softmax(logits: Mapping[int, float], k: int) -> Row:
    whole = math.log(math.fsum(math.exp(value) for value in logits.values()))
    return row(sorted(((t, v - whole) for t, v in logits.items()), key=lambda pair: -pair[1])[:k])


def model(
    seed: int, positions: int, *, scale: float = 1.0, noise: float = 0.0, grid: float = 0.0, k: int = 10
) -> list[Row]:
    """Rows of a made-up model; `seed` makes it, the rest disturbs how it is computed."""
    made, disturbed = random.Random(seed), random.Random(str((seed, scale, noise)))
    found = []
    for _ in range(positions):
        logits = {token: made.gauss(12, 2.5) for token in range(VOCABULARY)}
        logits = {t: v * scale + disturbed.gauss(0, noise) if noise else v * scale for t, v in logits.items()}
        if grid:
            logits = {token: round(value / grid) * grid for token, value in logits.items()}
        found.append(softmax(logits, k))
    return found


def test_a_divergence_known_by_closed_form() -> None:
    # Two outcomes and no rest: KL of two coins.
    one, other = rows_of(0.5, 0.5), rows_of(0.25, 0.75)
    assert kl(one, other) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), abs=1e-4)
    # The rest is one outcome: 0.4, 0.3 and 0.3 against 0.2, 0.3 and 0.5.
    assert kl(rows_of(0.4, 0.3), rows_of(0.2, 0.3)) == pytest.approx(0.4 * math.log(2) + 0.3 * math.log(0.6))


def test_an_absent_token_has_at_most_what_the_last_named_one_has() -> None:
    mine, theirs = row([(1, math.log(0.6)), (2, math.log(0.2))]), row([(1, math.log(0.6)), (3, math.log(0.1))])
    # 2 may have 0.1 there, 3 may have 0.1 here (half of the rest of 0.2): 0.6, 0.2, 0.1, 0.1 against 0.6, 0.1, 0.1, 0.2.
    assert kl(mine, theirs) == pytest.approx(0.2 * math.log(2) + 0.1 * math.log(0.5))
    # Nothing in common is no agreement.
    strange = row([(8, math.log(0.7)), (9, math.log(0.2))])
    assert kl(mine, strange) > 0.5


def test_rows_of_unequal_length_are_cut() -> None:
    long = softmax({token: -0.3 * token for token in range(VOCABULARY)}, 10)
    assert kl(long, dict(list(long.items())[:5])) == 0.0 == kl(dict(list(long.items())[:5]), long)


PROBABILITIES = st.lists(st.floats(1e-6, 1.0), min_size=2, max_size=8)


@settings(max_examples=60, deadline=None)
@given(PROBABILITIES, PROBABILITIES, st.integers(0, 6))
def test_a_divergence_is_never_negative_and_zero_for_equals(one: list[float], other: list[float], shift: int) -> None:
    mine = row([(at, math.log(value / sum(one))) for at, value in enumerate(one)])
    theirs = row([(at + shift, math.log(value / sum(other) * 0.9)) for at, value in enumerate(other)])
    assert kl(mine, theirs) >= 0.0 and math.isfinite(kl(mine, theirs))
    assert kl(mine, mine) == 0.0 == kl(theirs, theirs)


def test_an_amount_sums_up() -> None:
    same = rows_of(0.5, 0.3)
    other = rows_of(0.3, 0.5)
    found = amount([(same, same)] * 199 + [(same, other)], RESOLUTION)
    assert found is not None and found.positions == 200
    assert found.largest == pytest.approx(0.2 * math.log(5 / 3)) and found.p99 == 0.0
    assert found.mean == pytest.approx(found.largest / 200) and found.top1 == 0.995
    assert amount([], RESOLUTION) is None


def test_the_likeliest_token_within_one_step_is_the_same() -> None:
    mine = row([(1, -1.0), (2, -1.125), (3, -2.0)])
    assert agree(mine, row([(2, -1.0), (1, -1.1)]), 0.125)
    assert not agree(mine, row([(2, -1.0), (1, -1.1)]), 0.0625)
    assert not agree(mine, row([(9, -1.0), (1, -1.1)]), 0.125)


@pytest.mark.parametrize("grid", [0.125, 0.0625, 0.03125])
def test_the_grid_of_the_logits_is_read_from_the_logprobs(grid: float) -> None:
    found = [dict((t, round(v, 5)) for t, v in one.items()) for one in model(3, 40, grid=grid)]
    assert step(found) == grid


def test_logits_without_a_grid_have_none() -> None:
    assert step(model(3, 40)) == RESOLUTION == step([rows_of(1.0)])


def test_by_text_tokens_of_one_text_are_one_and_pieces_of_characters_are_none() -> None:
    names = {1: "a", 2: "a", 3: "b", 4: "\ufffd"}
    found = by_text(rows_of(0.0001, 0.3, 0.2, 0.1, 0.2), names)
    assert found == {"a": pytest.approx(math.log(0.5)), "b": pytest.approx(math.log(0.1))}
    mine, theirs = alike(rows_of(0.1, 0.3, 0.2, 0.1), row([("a", math.log(0.5)), ("b", math.log(0.1))]), names)
    assert kl(mine, theirs) == pytest.approx(0.0, abs=1e-12)
    assert alike(rows_of(0.5, 0.2), rows_of(0.4, 0.3), names) == (rows_of(0.5, 0.2), rows_of(0.4, 0.3))


# --- what noise allows -----------------------------------------------------------------------------------------------


def made(reference: list[Row], *paths: list[Row], bucket: int = 64) -> Golden:
    """A golden of one prompt whose noise was measured on these paths."""
    rows = [row([(t, round(v, 5)) for t, v in one.items()]) for one in reference]
    noise = []
    for number, path in enumerate(paths):
        found = amount(zip(rows, path, strict=True), step(rows))
        assert found is not None
        noise.append(Noise(path="abcdef"[number], bucket=bucket, **vars(found)))
    ids = tuple(range(8 + len(rows)))
    prompt = Prompt(
        bucket=bucket,
        text="some text",
        prompt=min(bucket, 7 + len(rows)),
        first=8,
        ids=ids,
        rows=tuple(tuple((int(t), v) for t, v in one.items()) for one in rows),
    )
    texts_of = {token: chr(97 + token) for token in {*ids, *range(VOCABULARY)}}
    return Golden(
        subject=Subject(model="m", revision="1" * 64, tokenizer="2" * 64),
        trusted="it was made for a test",
        recorded=date(2026, 11, 30),
        suite="x",
        alternatives=len(rows[0]),
        noise=tuple(noise),
        prompts=(prompt,),
        texts=texts_of,
    )


@pytest.mark.parametrize(("noise", "grid"), [(0.01, 0.0), (0.03, 0.0), (0.01, 0.0625)])
def test_noise_passes_and_a_scale_of_the_logits_does_not(noise: float, grid: float) -> None:
    """A made-up model of 60 tokens; rounding, then the grid of the number format."""
    for seed in range(5):
        reference = model(seed, 60, grid=grid)
        golden = made(
            reference, model(seed, 60, noise=noise, grid=grid), model(seed, 60, noise=noise * 1.01, grid=grid)
        )
        most = limits(golden, 64, 4)
        assert most is not None
        for other, wrong in (
            (model(seed, 60, noise=noise * 1.02, grid=grid), False),
            (model(seed, 60, scale=1.05), True),
        ):
            found = amount(zip(reference, other, strict=True), golden.step)
            assert found is not None
            assert (most.excess(found) is not None) is wrong, (seed, found, most)
            assert round((1 - found.top1) * found.positions) <= most.disagreements(60)


def test_limits_are_the_worst_path_times_the_margin_and_what_the_numbers_cannot_resolve() -> None:
    reference = model(1, 30, grid=0.125)
    golden = made(reference, model(1, 30, grid=0.125), model(1, 30, noise=0.1, grid=0.125))
    most = limits(golden, 64, 3)
    assert most is not None and golden.step == 0.125
    assert most.mean == pytest.approx(3 * golden.noise[1].mean + 0.125**2 / 12)
    assert most.largest == pytest.approx(3 * golden.noise[1].largest + 0.125**2 / 2)
    assert most.disagreements(10) == math.floor(3 * (1 - golden.noise[1].top1) * 10) + 1
    assert limits(golden, 65, 3) is None


# --- the file --------------------------------------------------------------------------------------------------------


def test_a_golden_is_written_one_place_in_a_line_and_read_back(tmp_path: Path) -> None:
    golden = made(model(1, 5), model(1, 5, noise=0.01))
    path = tmp_path / "m.json"
    document.save(golden, path)
    assert document.load(path) == golden
    lines = path.read_text().splitlines()
    assert sum(line.startswith("   [[") for line in lines) == 5
    assert max(map(len, lines)) < 400


def test_a_golden_that_was_edited_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    document.save(made(model(1, 5), model(1, 5, noise=0.01)), path)
    data = json.loads(path.read_text())
    data["noise"][0]["mean"] *= 10
    path.write_text(json.dumps(data))
    with pytest.raises(IntegrityError, match="was changed"):
        document.load(path)
    with pytest.raises(UsageError, match="no golden file"):
        document.load(tmp_path / "none.json")
    assert document.find("no-such-model") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"first": 9}, "rows for"),
        ({"prompt": 999}, "must ascend"),
        ({"bucket": 9}, "do not fit"),
        ({"rows": (((1, -1.0), (2, -0.5)),) * 5}, "does not descend"),
        ({"rows": (((1, -1.0), (1, -1.5)),) * 5}, "names a token twice"),
        ({"rows": (((1, math.nan),),) * 5}, "without logprobs"),
        ({"extra": 1}, "Extra inputs"),
    ],
)
def test_a_prompt_must_make_sense(changes: dict[str, Any], message: str) -> None:
    good = made(model(1, 5), model(1, 5, noise=0.01)).prompts[0].model_dump()
    with pytest.raises(ValidationError, match=message):
        Prompt.model_validate(good | changes)


def test_a_golden_must_be_whole() -> None:
    good = made(model(1, 5), model(1, 5, noise=0.01)).model_dump()
    for changes, message in (
        ({"alternatives": 9}, "does not have 9 tokens"),
        ({"noise": [good["noise"][0] | {"bucket": 32}]}, "no noise was measured in the bucket 64"),
        ({"texts": {}}, "no text for the token"),
        ({"schema_version": 2}, "schema_version"),
    ):
        with pytest.raises(ValidationError, match=message):
            Golden.model_validate(good | changes)


# --- what is asked ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encode", [lambda text: tuple(text.encode()), lambda text: tuple(range(len(text.split())))])
def test_prompts_are_as_long_as_they_may_be(encode: texts.Encode) -> None:
    for tokens in (24, 200, 2000):
        found = [texts.prompt(index, tokens, encode) for index in range(12)]
        assert all(tokens - 24 < len(ids) <= tokens and ids == encode(text) for text, ids in found)
        assert len({text[:20] for text, _ in found}) >= 10


def test_a_tokenizer_that_makes_many_tokens_of_little_is_refused() -> None:
    with pytest.raises(UsageError, match="tokens of"):
        texts.prompt(0, 10, lambda text: (0,) * 40)


# --- those of the package ---------------------------------------------------------------------------------------------


def test_the_goldens_of_the_package_are_whole_and_small() -> None:
    found = sorted(document.place("x").parent.glob("*.json"))
    assert [path.stem for path in found] == ["SmolLM2-135M-Instruct"]
    for path in found:
        golden = document.load(path)
        assert golden.subject.model == path.stem and golden.subject.revision and golden.subject.tokenizer
        assert path.stat().st_size < 200_000
        # Recorded in bfloat16 on the CPU: logits below 2 lie on a grid of 1/128.
        assert golden.step == 2**-7


def test_the_rehearsal_has_all_that_its_suites_ask() -> None:
    golden = document.find("SmolLM2-135M-Instruct")
    assert golden is not None
    for name in ("cpu-standard", "quick"):
        section = Settings.model_validate(data.load("suites", name, Suite).families["golden"])
        for bucket, count in section.buckets.items():
            some = chosen(section, golden, bucket)
            assert len(some) == count and all(len(prompt.continuation) >= section.continuation for _, prompt in some)
            assert limits(golden, bucket, section.margin.value) is not None
        assert golden.alternatives >= section.alternatives
