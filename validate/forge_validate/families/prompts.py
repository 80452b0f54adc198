"""What the families ask: texts that any model goes on with confidently, and the requests that carry them.

Counting is what the smallest model does without doubt, so that equality is not spoilt by coin flips between nearly equal
tokens; prompts differ in where they start and in length, so that an answer to a neighbour's prompt is seen.
"""

from __future__ import annotations

import itertools
import json
import secrets
import shlex
from typing import TYPE_CHECKING, Any

from forge_validate.exchange import Request

if TYPE_CHECKING:
    from forge_validate.judge import Bench

PATH = "/v1/completions"
# Alternatives per token: the most that every server of this interface gives.
_ALTERNATIVES = 5
_TEXT = "river stone market garden winter letter bridge silver candle forest harbour copper meadow lantern"
# A common word and its blank are one or two tokens.
_TOKENS_A_WORD = 2


def nonce() -> str:
    """A word that no cache has seen: it stands first in a prompt that must not be cached."""
    return secrets.token_hex(6)


def counting(index: int, shown: int | None = None) -> str:
    """The `index`-th counting prompt; each has a start and a length of its own, unless `shown` numbers are asked for."""
    start = 11 + 17 * index
    shown = shown or counted(index)
    return "Counting up one by one: " + ", ".join(str(start + step) for step in range(shown)) + ","


def counted(index: int) -> int:
    """How many numbers the `index`-th counting prompt shows."""
    return 5 + (5 * index) % 13


def filler(first: str, words: int) -> str:
    """About `words` words of plain text behind the word `first`."""
    rest = itertools.islice(itertools.cycle(_TEXT.split()), max(0, words - 1))
    return " ".join((first, *rest))


def filler_tokens(words: int) -> int:
    """Tokens of a filler text at most, its first word (12 digits) included."""
    return _TOKENS_A_WORD * words + 12


def tokens_at_most(text: str) -> int:
    """No tokenizer makes more tokens of a plain English text than it has characters; one may stand before it."""
    return len(text) + 1


def complete(
    bench: Bench,
    prompt: str | list[int],
    tokens: int,
    *,
    stream: bool = True,
    logprobs: bool = True,
    salt: str | None = None,
    **more: Any,
) -> Request:
    """A greedy completion of a text or of token ids, with the logprobs of its tokens.

    `salt` keeps it apart from what the prefix cache holds (SGLang and vLLM know it as `cache_salt`).
    """
    body: dict[str, Any] = {
        "model": bench.served,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "seed": bench.suite.seed,
    }
    if logprobs:
        body["logprobs"] = _ALTERNATIVES
    if salt is not None:
        body["cache_salt"] = salt
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return Request(method="POST", path=PATH, body=body | more)


def echo(bench: Bench, text: str) -> Request:
    """The prefill of a text with the logprobs of its tokens: another path than decoding them."""
    return complete(bench, text, 1, stream=False, echo=True)


def curl(request: Request) -> str:
    """One line that sends a request; `$URL` is the server, `$KEY` its key."""
    line = f'curl -sS "$URL{request.path}" -H "Authorization: Bearer $KEY"'
    if request.method == "GET":
        return line
    body = shlex.quote(json.dumps(request.body, ensure_ascii=False))
    return f'{line} -H "Content-Type: application/json" -d {body}'


def curl_at_once(request: Request, times: int) -> str:
    """One line that sends a request so many times at one moment."""
    return curl(request) if times == 1 else f"for i in $(seq {times}); do {curl(request)} & done; wait"
