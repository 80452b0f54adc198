"""What a server offers, found by asking it (`ask`), judged from what it answered (`see`), each with its evidence.

Only values here: what needs more than the OpenAI endpoints looks whether the server has it, whatever the server is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Self

from forge_core.model import Frozen

Offer = Literal[
    "container",
    "log",
    "native",
    "metrics",
    "completions",
    "tokenize",
    "logprobs",
    "tools",
    "reasoning",
    "thinking-switch",
    "cache-report",
    "gpu-memory",
]
"""`container` and `log`: we started it; `native`: SGLang's /server_info, /generate and /flush_cache; `metrics`: /metrics with
the names of SGLang or vLLM; `completions`: /v1/completions; `thinking-switch`: `chat_template_kwargs` are taken;
`cache-report`: cached tokens in `usage`; `gpu-memory`: the driver tells what its GPUs hold."""


class Seen(Frozen):
    """Whether a server offers one thing."""

    name: Offer
    state: Literal["offered", "absent", "unknown"]
    """`unknown`: no answer that tells; then whoever needs it tries, and finds out."""
    evidence: str
    """What shows it, for example `GET /metrics: HTTP 404`."""


class Offers(Frozen):
    """What one server offers."""

    software: str | None = None
    """What it is, with its version where it tells one: `sglang 0.5.23`."""
    seen: tuple[Seen, ...] = ()
    tokenize_path: str | None = None
    """Where it turns text into token ids; SGLang has `/v1/tokenize`, vLLM `/tokenize` alone."""
    metrics: Literal["sglang", "vllm"] | None = None
    """Whose names `/metrics` uses, before the colon."""

    @classmethod
    def certain(cls, names: Iterable[Offer], evidence: str) -> Self:
        """Offers that need not be asked for."""
        return cls(seen=tuple(Seen(name=name, state="offered", evidence=evidence) for name in names))

    def __contains__(self, name: object) -> bool:
        """Whether it was seen to be offered."""
        return any(one.name == name and one.state == "offered" for one in self.seen)

    def lacking(self, names: Iterable[Offer]) -> Offer | None:
        """The first of `names` that was seen to be absent; none: there is reason to try."""
        absent = {one.name for one in self.seen if one.state == "absent"}
        return next((name for name in names if name in absent), None)

    def refusal(self, name: Offer) -> str:
        """Why a check that needs `name` says nothing, for people."""
        evidence = next((one.evidence for one in self.seen if one.name == name), "it was not asked")
        return f"the server does not offer {name}: {evidence}"

    def joined(self, other: Offers) -> Offers:
        """These and the other's; where both say something, the other's counts."""
        later = {one.name for one in other.seen}
        return Offers(
            software=other.software or self.software,
            seen=(*(one for one in self.seen if one.name not in later), *other.seen),
            tokenize_path=other.tokenize_path or self.tokenize_path,
            metrics=other.metrics or self.metrics,
        )


UNSEEN = Offers()
"""Nothing was asked yet: nothing is offered, and nothing is known to be absent."""
