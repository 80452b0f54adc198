"""The golden family and the recording of its file, against a server in memory that speaks as SGLang, as vLLM or as OpenAI did."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from asking import GOLDEN, bench, encode
from fake_engine import logprobs

from forge_core.errors import Inconclusive, Refused, UsageError
from forge_core.model import ModelFile, ModelRef
from forge_validate.checks import CheckResult
from forge_validate.diagnose import diagnose
from forge_validate.exchange import Exchange
from forge_validate.families.family import Ask, Wave
from forge_validate.families.golden import Settings
from forge_validate.golden.document import Golden, Subject
from forge_validate.golden.record import again, record
from forge_validate.judge import Bench
from forge_validate.offers import Offers

NOISE = 0.001
BUCKETS = (40, 120)
KL, TOP1, TWICE = ([f"golden/{what}/{bucket}" for bucket in BUCKETS] for what in ("kl", "top1", "re-prefill"))


class Talker:
    """Answers the requests of the family; every character is a token. `dialect`: native, vllm, echo or plain (no echo)."""

    def __init__(self, dialect: str = "native", *faults: str) -> None:
        self.dialect, self.faults = dialect, set(faults)
        self.asked: list[Ask] = []
        self._count = 0

    @property
    def offers(self) -> Offers:
        software = {"native": "sglang 0", "vllm": "vllm 0"}.get(self.dialect)
        names = ("native", "logprobs") if self.dialect == "native" else ("logprobs",)
        path = None if self.dialect == "plain" else "/tokenize"
        return Offers.certain(names, "it is made so").model_copy(update={"software": software, "tokenize_path": path})

    def send(self, wave: Wave) -> tuple[Exchange, ...]:
        self.asked += wave.asks
        return tuple(self._exchange(ask) for ask in wave.asks)

    def _exchange(self, ask: Ask) -> Exchange:
        self._count += 1
        if "late" in self.faults:
            return Exchange(name=ask.name, request=ask.request, status=None, seconds=9.0, error="no complete response")
        status, body = self._answer(ask.request.path, ask.request.body)
        return Exchange(name=ask.name, request=ask.request, status=status, seconds=0.1, response=body)

    def _answer(self, path: str, body: Mapping[str, Any]) -> tuple[int, Any]:
        if path == "/tokenize":
            return 200, {"tokens": [ord(c) + ("other-tokenizer" in self.faults) for c in body["prompt"]]}
        if "broken" in self.faults:
            return 500, {"object": "error", "message": "something went wrong"}
        if path == "/generate":
            return 200, self._generate(body)
        if body.get("echo") and self.dialect == "plain":
            return 400, {"object": "error", "message": "echo is not supported"}
        return 200, self._complete(body)

    def _row(self, context: str, count: int, *, decoding: bool) -> list[tuple[float | None, str]]:
        faults = self.faults | ({"scaled"} if decoding and "decode-scaled" in self.faults else set())
        if "restless" in self.faults:
            context += str(self._count)
        told = logprobs(context, faults, 2 * NOISE if decoding else NOISE)
        best = sorted(((value, token) for token, value in told.items()), reverse=True)[:count]
        return [(None if "null" in self.faults else value, token) for value, token in best]

    def _decode(self, prompt: str, tokens: int, count: int) -> tuple[str, list[list[tuple[float | None, str]]]]:
        said, rows = "", []
        for _ in range(tokens):
            rows.append(self._row(prompt + said, count, decoding=True))
            stray = "stray" in self.faults and len(said) == 2
            said += rows[-1][1][1] if stray else rows[-1][0][1]
        return said, rows

    def _generate(self, body: Mapping[str, Any]) -> Any:
        prompt, k = "".join(map(chr, body["input_ids"])), body["top_logprobs_num"]
        said, rows = self._decode(prompt, body["sampling_params"]["max_new_tokens"], k)
        meta: dict[str, Any] = {"prompt_tokens": len(prompt), "finish_reason": {"type": "length"}}
        meta["output_top_logprobs"] = [[[v, ord(t), t] for v, t in one] for one in rows]
        meta["output_token_logprobs"] = [[-0.1, ord(t), t] for t in said]
        if "logprob_start_len" in body:
            places = range(body["logprob_start_len"] + 1, len(prompt))
            forced = [self._row(prompt[:at], k, decoding=False) for at in places]
            meta["input_top_logprobs"] = [None, *([[v, ord(t), t] for v, t in one] for one in forced)]
        return {"text": said, "meta_info": meta}

    def _complete(self, body: Mapping[str, Any]) -> Any:
        prompt, k = "".join(map(chr, body["prompt"])), body.get("logprobs") or body["prompt_logprobs"]
        said, rows = self._decode(prompt, body["max_tokens"], k)
        forced = [None, *(self._row(prompt[:at], k, decoding=False) for at in range(1, len(prompt)))]
        by_id = body.get("return_tokens_as_token_ids")
        name = (lambda t: f"token_id:{ord(t)}") if by_id else (lambda t: t)
        choice: dict[str, Any] = {"index": 0, "text": said, "finish_reason": "length", "logprobs": None}
        if "prompt_logprobs" in body:
            choice["prompt_logprobs"] = [one and self._ranked(one, prompt[at]) for at, one in enumerate(forced)]
        if body.get("logprobs"):
            whole = [*forced, *rows] if body.get("echo") else rows
            tokens = prompt + said if body.get("echo") else said
            choice["logprobs"] = {
                "tokens": [name(t) for t in tokens],
                "token_logprobs": [None if one is None else -0.1 for one in whole],
                "top_logprobs": [one and {name(t): v for v, t in one} for one in whole],
            }
        return {"object": "text_completion", "choices": [choice], "usage": {"prompt_tokens": len(prompt)}}

    def _ranked(self, one: list[tuple[float | None, str]], stands: str) -> dict[str, Any]:
        """As vLLM's: by id, and the token that stands there is told whatever its rank."""
        found = {str(ord(t)): {"logprob": v, "rank": at + 1, "decoded_token": t} for at, (v, t) in enumerate(one)}
        return (
            found | {str(ord(stands)): {"logprob": -30.0, "rank": 99, "decoded_token": stands}}
            if stands == " "
            else found
        )


def settings_of(judged: Bench) -> Settings:
    ((_, settings),) = judged.families
    assert isinstance(settings, Settings)
    return settings


def make(talker: Talker, **changes: Any) -> Golden:
    judged = bench({"golden": GOLDEN}, offers=talker.offers)
    about = {"model": "SmolLM2-135M-Instruct", "revision": None, "tokenizer": None} | changes
    sent: Any = talker
    return record(
        sent, judged, settings_of(judged), Subject(**about), "the server in memory is made so", encode, lambda _: None
    )


@pytest.fixture(scope="module")
def golden() -> Golden:
    return make(Talker())


def judge(
    talker: Talker, golden: Golden | None, section: Mapping[str, Any] = GOLDEN, **changes: Any
) -> dict[str, CheckResult]:
    judged = bench({"golden": section}, offers=talker.offers, golden=golden, **changes)
    ((family, settings),) = judged.families
    recorded: dict[str, Exchange] = {}
    waves = family.waves(settings, judged)
    try:
        wave = next(waves)
        while True:
            found = talker.send(wave)
            recorded.update((one.name, one) for one in found)
            wave = waves.send(found)
    except StopIteration:
        return {one.check: one for one in family.judge(settings, judged, recorded)}


def wrong(results: Mapping[str, CheckResult]) -> dict[str, str]:
    return {name: one.outcome for name, one in results.items() if one.outcome != "passed"}


def kind(results: Mapping[str, CheckResult]) -> str:
    found = diagnose([one for one in results.values() if one.outcome != "passed"])
    assert found is not None
    return found.kind


@pytest.mark.parametrize("dialect", ["native", "vllm", "echo"])
def test_a_healthy_server_passes_whatever_it_speaks(dialect: str, golden: Golden) -> None:
    results = judge(Talker(dialect), golden)
    # By text there are no ids of what it said, so that cannot be given back to it.
    assert wrong(results) == ({} if dialect != "echo" else dict.fromkeys(TWICE, "unmeasured"))
    assert results.keys() == {"golden/subject", *KL, *TOP1, *TWICE}
    assert "40 places" in results["golden/kl/40"].explanation


@pytest.mark.parametrize("dialect", ["native", "vllm", "echo"])
@pytest.mark.parametrize("fault", ["scaled", "shifted"])
def test_slightly_wrong_logits_fail(dialect: str, fault: str, golden: Golden) -> None:
    results = judge(Talker(dialect, fault), golden)
    assert {name for name, one in results.items() if one.outcome == "failed"} == set(KL)
    assert kind(results) == "golden" and "curl" in (results[KL[0]].reproduce or "")


@pytest.mark.parametrize("dialect", ["native", "vllm"])
def test_a_decode_that_is_not_the_prefill_fails(dialect: str, golden: Golden) -> None:
    assert wrong(judge(Talker(dialect, "decode-scaled"), golden)) == dict.fromkeys(TWICE, "failed")


def test_without_forcing_it_is_judged_up_to_where_the_answers_part(golden: Golden) -> None:
    results = judge(Talker("plain"), golden)
    assert wrong(results) == dict.fromkeys(("golden/subject", *TWICE), "unmeasured")
    assert "16 places before its answers left the golden's" in results["golden/kl/40"].explanation
    scaled = judge(Talker("plain", "scaled"), golden)
    assert {name for name, one in scaled.items() if one.outcome == "failed"} == set(KL)
    # It says something else from the third token on: two prompts of three places each, where eight are wanted.
    stray = judge(Talker("plain", "stray"), golden)
    assert stray["golden/kl/40"].outcome == "unmeasured" and "6 places" in stray["golden/kl/40"].explanation


def test_the_golden_of_another_tokenizer_is_no_matter_of_numbers(golden: Golden) -> None:
    talker = Talker("native", "other-tokenizer")
    results = judge(talker, golden)
    assert results["golden/subject"].outcome == "failed" and kind(results) == "wrong-golden"
    assert set(wrong(results).values()) == {"failed", "unmeasured"}
    assert [ask.name for ask in talker.asked] == ["golden/tokenize/40"]


@pytest.mark.parametrize(("path", "told"), [("config.json", "of revision"), ("tokenizer.json", "tokenizer.json is")])
def test_the_golden_of_another_model_folder(path: str, told: str) -> None:
    def folder(digit: str) -> ModelRef:
        files = {"config.json": "1" * 64, "tokenizer.json": "2" * 64} | {path: digit * 64}
        return ModelRef(name="m", files=tuple(ModelFile(path=p, sha256=s, size=1) for p, s in files.items()))

    own = folder("7")
    tokenizer = next(one.sha256 for one in own.files if one.path == "tokenizer.json")
    golden = make(Talker(), revision=own.revision, tokenizer=tokenizer)
    talker = Talker()
    results = judge(talker, golden, identity=folder("8"))
    assert told in results["golden/subject"].explanation and kind(results) == "wrong-golden" and talker.asked == []
    assert wrong(judge(Talker(), golden, identity=own)) == {}


def test_a_logprob_that_is_no_number_fails(golden: Golden) -> None:
    results = judge(Talker("native", "null"), golden)
    assert wrong(results) == dict.fromkeys((*KL, *TOP1, *TWICE), "failed")
    assert "null (NaN)" in results["golden/kl/40"].explanation


def test_errors_fail_and_silence_is_unmeasured(golden: Golden) -> None:
    assert wrong(judge(Talker("native", "broken"), golden)) == dict.fromkeys((*KL, *TOP1, *TWICE), "failed")
    late = judge(Talker("native", "late"), golden)
    assert wrong(late) == dict.fromkeys(late, "unmeasured")


def test_without_a_golden_file_all_is_unmeasured_and_nothing_is_asked() -> None:
    talker = Talker()
    results = judge(talker, None)
    assert wrong(results) == dict.fromkeys(("golden/subject", *KL, *TOP1, *TWICE), "unmeasured")
    assert kind(results) == "no-golden" and talker.asked == []
    assert "no golden file of SmolLM2-135M-Instruct" in results["golden/subject"].explanation


def test_what_a_golden_does_not_hold_is_unmeasured(golden: Golden) -> None:
    more = judge(Talker(), golden, GOLDEN | {"buckets": {40: 2, 64: 2}})
    assert set(wrong(more)) == {f"golden/{what}/64" for what in ("kl", "top1", "re-prefill")}
    finer = judge(Talker(), golden, GOLDEN | {"alternatives": 12})
    assert wrong(finer) == dict.fromkeys((*KL, *TOP1, *TWICE), "unmeasured")
    # A shorter suite takes a part of what is there.
    assert wrong(judge(Talker(), golden, GOLDEN | {"buckets": {40: 1}, "continuation": 4, "least": 4})) == {}


def test_the_cost_is_no_less_than_what_was_asked(golden: Golden) -> None:
    talker = Talker()
    judge(talker, golden)
    bodies = [ask.request.body for ask in talker.asked if ask.request.path == "/generate"]
    spent = sum(len(body["input_ids"]) + body["sampling_params"]["max_new_tokens"] for body in bodies)
    judged = bench({"golden": GOLDEN})
    assert (
        0.8 * judged.families[0][0].cost(settings_of(judged)) < spent <= judged.families[0][0].cost(settings_of(judged))
    )


def test_a_suite_that_wants_more_places_than_it_asks_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        bench({"golden": GOLDEN | {"least": 9}})
    assert "what is decoded are 8 places" in caught.value.details[0]


# --- recording --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["native", "vllm"])
def test_a_golden_holds_the_noise_of_every_path(dialect: str) -> None:
    golden = make(Talker(dialect))
    paths = ("decoded", "repeated", "at-once", "decoded-at-once")
    assert {(one.path, one.bucket) for one in golden.noise} == {(path, bucket) for path in paths for bucket in BUCKETS}
    # Prefilling is the same each time in this stand-in, and decoding is noisier.
    noise = {(one.path, one.bucket): one for one in golden.noise}
    assert noise["repeated", 40].largest < 1e-8 < noise["decoded", 40].mean
    assert len(golden.prompts) == 3 and all(len(one.continuation) == 8 for one in golden.prompts)
    assert [one.text[:5] for one in golden.prompts] == ["The f", "def m", "To re"]


def test_a_restart_joins_the_noise_and_replaces_an_earlier_one(golden: Golden) -> None:
    judged = bench({"golden": GOLDEN}, offers=Talker().offers)
    first: Any = Talker()
    twice = again(first, judged, settings_of(judged), golden, lambda _: None)
    assert len(twice.noise) == 2 * len(golden.noise) and twice.prompts == golden.prompts
    assert {one.path for one in twice.noise} == {p for n in golden.noise for p in (n.path, f"restart-{n.path}")}
    second: Any = Talker()
    assert again(second, judged, settings_of(judged), twice, lambda _: None) == twice
    other: Any = Talker("native", "other-tokenizer")
    with pytest.raises(Refused, match="not the golden's"):
        again(other, judged, settings_of(judged), golden, lambda _: None)


def test_no_golden_is_taken_from_a_server_that_is_none_to_trust() -> None:
    with pytest.raises(Refused, match="does not agree with itself") as caught:
        make(Talker("native", "restless"))
    assert any("places" in line for line in caught.value.details)
    with pytest.raises(Refused, match=r"null \(NaN\)"):
        make(Talker("native", "null"))


@pytest.mark.parametrize(("dialect", "told"), [("echo", "ids of its tokens"), ("plain", "ids of its tokens")])
def test_a_golden_needs_ids(dialect: str, told: str) -> None:
    with pytest.raises(Inconclusive, match=told):
        make(Talker(dialect))
    with pytest.raises(Inconclusive, match="HTTP 500"):
        make(Talker("native", "broken"))
