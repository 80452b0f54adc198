"""The golden family: what this server finds likely, against what a trusted run of the same model found likely.

Wrong numbers that still make good sentences (fp8 KV without scales, one expert off by a factor) show here and nowhere else. The
golden's own tokens are forced by prefilling them, so that the context is equal at every place; a server that does not tell
logprobs of a prompt is judged along its own answer as far as that is the golden's. What it decodes by itself is prefilled
again: both are ways to compute the same thing. Every request is asked alone and computed anew, past the prefix cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, model_validator

from forge_core.model import Frozen
from forge_validate.checks.result import CheckResult
from forge_validate.exchange import Exchange, Request
from forge_validate.families import forcing, nearness, trusted
from forge_validate.families.family import Ask, Wave, Waves, result
from forge_validate.golden.document import Golden, Prompt, named
from forge_validate.golden.limits import limits
from forge_validate.policy import Threshold

if TYPE_CHECKING:
    from forge_validate.judge import Bench

LACKS = "golden"
"""What a check lacks without a golden file: the policy's bootstrap rule is about this."""
_LOOK_S = 30


class Settings(Frozen):
    """The section `golden` of a suite: what is asked, and what goes into a golden that is recorded for it."""

    buckets: Annotated[dict[Annotated[int, Field(gt=8)], Annotated[int, Field(gt=0)]], Field(min_length=1)]
    """Tokens of a prompt at most -> how many such prompts."""
    tail: Annotated[int, Field(gt=0)]
    """Recording: so many places at the end of each prompt are judged, beside the continuation."""
    continuation: Annotated[int, Field(gt=0)]
    """Tokens that the model goes on with."""
    alternatives: Annotated[int, Field(ge=2, le=20)]
    """Likeliest tokens that are asked for at each place."""
    least: Annotated[int, Field(gt=0)]
    """Places in a bucket; what is judged on fewer is unmeasured."""
    margin: Threshold
    """The limits are the trusted run's own noise times this."""
    agreement: Threshold
    """Recording: the least share of places at which two paths of a server that is to be trusted agree on the likeliest token."""
    timeout: Annotated[float, Field(gt=0)]
    """Seconds for one answer."""

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        for bucket, count in self.buckets.items():
            if (most := count * self.continuation) < self.least:
                raise ValueError(f"bucket {bucket}: what is decoded are {most} places, and `least` is {self.least}")
        return self


class GoldenFamily:
    """The family."""

    name = "golden"
    settings = Settings
    checks = "likeliest tokens against a trusted run, forced and decoded, by length"

    def waves(self, settings: Settings, bench: Bench) -> Waves:
        """The tokenizer, then each prompt: forced, decoded, and what was decoded forced again."""
        golden = bench.golden
        if golden is None or trusted.other_files(golden, bench.identity) is not None:
            return
        for bucket in settings.buckets:
            of_bucket = chosen(settings, golden, bucket)
            if bench.offers.tokenize_path is not None and of_bucket:
                prompt = of_bucket[0][1]
                body = {"model": bench.served, "prompt": prompt.text}
                request = Request(method="POST", path=bench.offers.tokenize_path, body=body)
                (told,) = yield Wave((Ask(f"golden/tokenize/{bucket}", request, _LOOK_S),))
                if trusted.other_ids(prompt, told) is not None:
                    return
        forces = True
        for bucket in settings.buckets:
            for name, prompt in chosen(settings, golden, bucket):
                forces = yield from self._ask(settings, bench, golden.alternatives, name, prompt, forces)

    def _ask(
        self, settings: Settings, bench: Bench, alternatives: int, name: str, prompt: Prompt, forces: bool
    ) -> nearness.Forcing:
        """One prompt; returns whether the server tells logprobs of a prompt."""
        end = min(len(prompt.ids), prompt.prompt + settings.continuation)
        if forces:
            request = forcing.prefill(bench, prompt.ids[:end], prompt.first, alternatives)
            (forced,) = yield Wave((Ask(f"golden/forced/{name}", request, settings.timeout),))
            forces = not forcing.not_offered(forced, prompt.first)
        request = forcing.decode(bench, prompt.ids[: prompt.prompt], end - prompt.prompt, alternatives)
        (decoded,) = yield Wave((Ask(f"golden/decoded/{name}", request, settings.timeout),))
        if forces and (ids := forcing.ids(decoded)):
            request = forcing.prefill(bench, (*prompt.ids[: prompt.prompt], *ids), prompt.prompt, alternatives)
            yield Wave((Ask(f"golden/again/{name}", request, settings.timeout),))
        return forces

    def judge(self, settings: Settings, bench: Bench, exchanges: Mapping[str, Exchange]) -> tuple[CheckResult, ...]:
        """Whether the golden is this server's, then three checks for each bucket."""
        golden = bench.golden
        if golden is None:
            return tuple(_without(name, bench) for name in ("golden/subject", *_names(settings)))
        subject = trusted.subject(golden, bench.identity, exchanges)
        why = None
        if subject.outcome == "failed":
            why = "not asked: the golden is of something else"
        elif golden.alternatives < settings.alternatives:
            why = f"the golden has {golden.alternatives} tokens for each place, the suite wants {settings.alternatives}"
        if why is not None:
            return (subject, *(result(name, "unmeasured", why) for name in _names(settings)))
        found = [subject]
        for bucket in settings.buckets:
            found += self._bucket(settings, golden, bucket, exchanges)
        return tuple(found)

    def _bucket(
        self, settings: Settings, golden: Golden, bucket: int, exchanges: Mapping[str, Exchange]
    ) -> tuple[CheckResult, ...]:
        most = limits(golden, bucket, settings.margin.value)
        if most is None:
            told = f"the golden has no prompts of {bucket} tokens: record one with this suite"
            return tuple(result(name, "unmeasured", told) for name in _names(settings, bucket))
        prompts = chosen(settings, golden, bucket)
        forced = nearness.against(golden, prompts, exchanges)
        again = nearness.again(prompts, exchanges)
        kl, top1, twice = _names(settings, bucket)
        return (
            nearness.divergence(kl, forced, golden.step, most, settings.least),
            nearness.agreement(top1, forced, golden.step, most, settings.least),
            nearness.divergence(twice, again, golden.step, most, settings.least),
        )

    def cost(self, settings: Settings) -> int:
        """Each prompt three times, with its continuation and one token more."""
        return sum(3 * count * (bucket + settings.continuation + 1) for bucket, count in settings.buckets.items())


def chosen(settings: Settings, golden: Golden, bucket: int) -> list[tuple[str, Prompt]]:
    """The prompts of a bucket that a suite asks, each with its name `BUCKET/INDEX`."""
    return [pair for pair in named(golden.prompts) if pair[1].bucket == bucket][: settings.buckets[bucket]]


def _names(settings: Settings, *buckets: int) -> tuple[str, ...]:
    """The checks of some buckets, or of all."""
    return tuple(f"golden/{what}/{one}" for one in buckets or settings.buckets for what in ("kl", "top1", "re-prefill"))


def _without(name: str, bench: Bench) -> CheckResult:
    """Unmeasured for want of a golden; a bootstrap rule that holds for this subject excuses that, and nothing else."""
    told = result(name, "unmeasured", f"there is no golden file of {bench.answers.golden_of}")
    rule = bench.bootstrap
    why = None if rule is None else f"{rule.reason}; approved by {rule.approved_by}, once"
    return told.model_copy(update={"lacks": LACKS, "excused": why})
