"""Recording a golden file: a server that is trusted is measured on every path, its noise judged, and all of it written down.

The reference is a prefill of each prompt and its greedy continuation, alone and past the cache. The other paths are the same
again, all prompts at one moment, decoding, and decoding at one moment; after a restart all of them once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from forge_core.errors import Inconclusive, Refused
from forge_validate.exchange import Request
from forge_validate.families import trusted
from forge_validate.families.family import Ask, Wave
from forge_validate.families.golden import Settings
from forge_validate.families.runner import Sender
from forge_validate.golden.asker import Asker, Said, Told
from forge_validate.golden.divergence import DECIMALS, Row, Token, amount, row, step
from forge_validate.golden.document import Golden, Noise, Prompt, Subject, named
from forge_validate.golden.texts import Encode, prompt
from forge_validate.judge import Bench


@dataclass(frozen=True)
class _Text:
    """A prompt before it was asked."""

    bucket: int
    index: int
    text: str
    ids: tuple[int, ...]
    first: int

    @property
    def name(self) -> str:
        return f"{self.bucket}/{self.index}"


def record(
    sender: Sender, bench: Bench, settings: Settings, subject: Subject, why: str, encode: Encode, told: Told
) -> Golden:
    """Measure a server; `why` says why it is trusted. `encode` must be the server's own tokenizer.

    Raises Refused (1) when it does not agree with itself or says what is no number, Inconclusive (4) when it does not
    answer, or does not tell what a golden needs.
    """
    asked = Asker(sender, bench, settings, settings.alternatives, told)
    wanted = [(bucket, index) for bucket, count in settings.buckets.items() for index in range(count)]
    # Each prompt begins with another text, as far as there are texts.
    cut = [prompt(number, bucket, encode) for number, (bucket, _) in enumerate(wanted)]
    texts = [
        _Text(bucket, index, text, ids, first=max(1, len(ids) - settings.tail))
        for (bucket, index), (text, ids) in zip(wanted, cut, strict=True)
    ]
    said = asked.decoded("decoded", {one.name: one.ids for one in texts})
    whole = {one.name: (*one.ids, *_ids(said[one.name][0])) for one in texts}
    firsts = {one.name: one.first for one in texts}
    reference = asked.prefilled("reference", whole, firsts)
    prompts = tuple(
        Prompt(
            bucket=one.bucket,
            text=one.text,
            prompt=len(one.ids),
            first=one.first,
            ids=whole[one.name],
            rows=tuple(_rounded(found) for found in reference[one.name]),
        )
        for one in texts
    )
    golden = Golden(
        subject=subject,
        trusted=why,
        recorded=datetime.now(UTC).date(),
        suite=bench.suite.suite,
        alternatives=settings.alternatives,
        noise=_noise("decoded", prompts, said=said),
        prompts=prompts,
        texts=asked.named(prompts),
    )
    return _demand_trust(_measured(golden, asked, ""), settings)


def again(sender: Sender, bench: Bench, settings: Settings, golden: Golden, told: Told) -> Golden:
    """Measure a golden's prompts once more, on a server that was started anew; its noise joins the golden's.

    Raises as `record`, and Refused for another model folder or tokenizer.
    """
    if (differs := _other(sender, bench, settings, golden)) is not None:
        raise Refused(f"this server is not the golden's: {differs}")
    asked = Asker(sender, bench, settings, golden.alternatives, told)
    kept = golden.model_copy(
        update={"noise": tuple(one for one in golden.noise if not one.path.startswith("restart-"))}
    )
    said = asked.decoded("restart-decoded", _prompts(golden))
    kept = _joined(kept, _noise("restart-decoded", golden.prompts, said=said))
    return _demand_trust(_measured(kept, asked, "restart-"), settings)


def _other(sender: Sender, bench: Bench, settings: Settings, golden: Golden) -> str | None:
    """Why a server is not the one that a golden was recorded from, as far as it can be told."""
    path = bench.offers.tokenize_path
    if (differs := trusted.other_files(golden, bench.identity)) is not None or path is None:
        return differs
    first = golden.prompts[0]
    request = Request(method="POST", path=path, body={"model": bench.served, "prompt": first.text})
    (told,) = sender.send(Wave((Ask("golden/restart-tokenize", request, settings.timeout),)))
    return trusted.other_ids(first, told)


def _measured(golden: Golden, asked: Asker, prefix: str) -> Golden:
    """The golden with the noise of all paths but decoding alone, which has been measured."""
    prompts = golden.prompts
    whole = {name: one.ids for name, one in named(prompts)}
    firsts = {name: one.first for name, one in named(prompts)}
    for path, at_once in (("repeated", False), ("at-once", True)):
        rows = asked.prefilled(prefix + path, whole, firsts, at_once=at_once)
        golden = _joined(golden, _noise(prefix + path, prompts, forced=rows))
    said = asked.decoded(f"{prefix}decoded-at-once", _prompts(golden), at_once=True)
    return _joined(golden, _noise(f"{prefix}decoded-at-once", prompts, said=said))


def _prompts(golden: Golden) -> dict[str, Sequence[int]]:
    """The ids of the prompts alone."""
    return {name: one.ids[: one.prompt] for name, one in named(golden.prompts)}


def _noise(
    path: str,
    prompts: Sequence[Prompt],
    *,
    forced: Mapping[str, list[Row]] | None = None,
    said: Mapping[str, Said] | None = None,
) -> tuple[Noise, ...]:
    """How far one path lies from the reference, bucket by bucket; what was decoded counts up to where it leaves it."""
    grid = step(one.row(place) for one in prompts for place in range(one.first, len(one.ids)))
    pairs: dict[int, list[tuple[Row, Row]]] = {}
    for name, one in named(prompts):
        start = one.first if forced is not None else one.prompt
        rows = forced[name] if forced is not None else _common(one, *(said or {})[name])
        pairs.setdefault(one.bucket, []).extend((one.row(place), found) for place, found in enumerate(rows, start))
    found = []
    for bucket, both in pairs.items():
        amounts = amount(both, grid)
        assert amounts is not None
        found.append(Noise(path=path, bucket=bucket, **vars(amounts)))
    return tuple(found)


def _common(one: Prompt, tokens: Sequence[Token], rows: Sequence[Row]) -> Sequence[Row]:
    """The rows up to the first token that is not the continuation's, that one included: its context is still equal."""
    differ = (at for at, (mine, his) in enumerate(zip(tokens, one.continuation, strict=False)) if mine != his)
    return rows[: next(differ, len(one.continuation) - 1) + 1]


def _joined(golden: Golden, more: Sequence[Noise]) -> Golden:
    return Golden.model_validate(golden.model_dump() | {"noise": [*golden.noise, *more]})


def _demand_trust(golden: Golden, settings: Settings) -> Golden:
    least = settings.agreement.value
    broken = [one for one in golden.noise if one.top1 < least]
    if broken:
        raise Refused(
            "no golden is taken from this server: it does not agree with itself",
            details=tuple(
                f"{one.path}, {one.bucket} tokens: the same likeliest token at {one.top1:.0%} of {one.positions} places, "
                f"divergence {one.mean:.2g}"
                for one in broken
            ),
            hint=f"the suite wants {least:.0%}",
        )
    return golden


def _ids(tokens: Sequence[Token]) -> tuple[int, ...]:
    if not all(isinstance(token, int) for token in tokens):
        raise Inconclusive(
            "the server does not tell the ids of its tokens", hint="a golden is recorded from SGLang or vLLM"
        )
    return tuple(token for token in tokens if isinstance(token, int))


def _rounded(found: Row) -> tuple[tuple[int, float], ...]:
    # Rounding may join two neighbours, so the order is made again.
    return tuple(
        (int(token), value) for token, value in row([(t, round(v, DECIMALS)) for t, v in found.items()]).items()
    )
