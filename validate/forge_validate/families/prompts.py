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

from forge_validate.exchange import Exchange, Request
from forge_validate.families.family import Ask

if TYPE_CHECKING:
    from forge_validate.judge import Bench

PATH = "/v1/completions"
CHAT = "/v1/chat/completions"
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


def chat_only(bench: Bench) -> bool:
    """Whether the server was seen to have no /v1/completions."""
    return bench.offers.lacking(("completions",)) is not None


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

    `salt` keeps it apart from what the prefix cache holds (SGLang and vLLM know it as `cache_salt`). Where there are no
    completions the text is what a user says in a chat; token ids cannot be said there (ValueError).
    """
    body: dict[str, Any] = {"model": bench.served, "max_tokens": tokens, "temperature": 0, "seed": bench.suite.seed}
    chat = chat_only(bench)
    if chat and not isinstance(prompt, str):
        raise ValueError("a chat takes no token ids")
    if chat:
        body["messages"] = [{"role": "user", "content": prompt}]
        if "thinking-switch" in bench.offers:
            body["chat_template_kwargs"] = {"enable_thinking": False}
    else:
        body["prompt"] = prompt
    if logprobs:
        body |= {"logprobs": True, "top_logprobs": _ALTERNATIVES} if chat else {"logprobs": _ALTERNATIVES}
    if salt is not None:
        body["cache_salt"] = salt
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return Request(method="POST", path=CHAT if chat else PATH, body=body | more)


def tokenize(name: str, bench: Bench, text: str, *, special: bool) -> Ask:
    """An ask for the token ids of a text, with those that the tokenizer puts around it or without."""
    body = {"model": bench.served, "prompt": text, "add_special_tokens": special}
    return Ask(name, Request(method="POST", path=bench.offers.tokenize_path or "/tokenize", body=body), timeout=30)


def token_ids(one: Exchange) -> list[int]:
    """The ids that `tokenize` gave; empty if it gave none."""
    found = one.response.get("tokens") if isinstance(one.response, dict) else None
    return found if isinstance(found, list) and all(isinstance(token, int) for token in found) else []


def echo(bench: Bench, text: str) -> Request:
    """The prefill of a text with the logprobs of its tokens: another path than decoding them."""
    return complete(bench, text, 1, stream=False, echo=True)


def curl(request: Request) -> str:
    """One line that sends a request; `$URL` is the server, `$KEY` its key."""
    line = _curl(request)
    return line if request.body is None else f"{line} -d {shlex.quote(json.dumps(request.body, ensure_ascii=False))}"


def _curl(request: Request) -> str:
    line = f'curl -sS "$URL{request.path}" -H "Authorization: Bearer $KEY"'
    if request.body is not None:
        return f'{line} -H "Content-Type: application/json"'
    return line if request.method == "GET" else f"{line} -X {request.method}"


def curl_at_once(request: Request, times: int) -> str:
    """One line that sends a request so many times at one moment."""
    return curl(request) if times == 1 else f"for i in $(seq {times}); do {curl(request)} & done; wait"


def curl_load(ask: Ask, took: float) -> str:
    """One line that sends a request in the background, ended by `&`; `took`: seconds of a whole answer.

    The client that hangs up in an answer does so by time here; what stands first in the prompt is new in each run.
    """
    cut = ask.abort_after or (took * 0.5 if ask.abort_at is not None else None)
    limit = "" if cut is None else f" --max-time {max(cut, 0.01):.2f}"
    line = curl(beginning(ask.request, "FIRST")).replace("FIRST", "'\"$RANDOM$RANDOM\"'")
    return f"{line}{limit} >/dev/null 2>&1 &"


def beginning(request: Request, word: str) -> Request:
    """The same request with another first word in its text."""

    def changed(text: str) -> str:
        return f"{word} {text.partition(' ')[2]}"

    body = dict(request.body)
    if "messages" in body:
        body["messages"] = [{"role": "user", "content": changed(body["messages"][0]["content"])}]
    else:
        body["prompt"] = changed(body["prompt"])
    return request.model_copy(update={"body": body})


def curl_recorded(one: Exchange, *, salt: str | None = None) -> str:
    """One line that sends a recorded request again, from its file below the folder of the run; `$S` begins its salt."""
    change = "" if salt is None else f' | .cache_salt = env.S + "-{salt}"'
    file = f"exchanges/{one.name.replace('/', '__')}.json"
    return f"S=$S jq -c {shlex.quote('.request.body' + change)} {file} | {_curl(one.request)} -d @-"
