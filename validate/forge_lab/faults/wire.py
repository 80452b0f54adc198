"""What a faulty proxy does to one answer: to its events one by one, or to the whole of it. No sockets here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from forge_core.errors import UsageError

Kind = Literal[
    "busy",
    "cut",
    "double",
    "drop",
    "empty",
    "finish",
    "hang",
    "ids",
    "logprobs-500",
    "models",
    "no-done",
    "no-finish",
    "no-role",
    "no-usage",
    "null-logprobs",
    "ok-for-error",
    "one-choice",
    "replacement",
    "swap",
    "usage",
    "usage-prompt",
]
"""The faults of the protocol."""

GENERATES = ("/v1/completions", "/v1/chat/completions")
HANG = "hang"
CUT = "cut"
_AT = 3


@dataclass
class Spoiler:
    """One fault on one answer."""

    fault: Kind
    path: str
    asked: Mapping[str, Any]
    """The request's body."""
    number: int
    """Of the request, from 0."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    fired: bool = False
    _words: int = 0
    _held: str | None = None

    def instead(self) -> tuple[int, Any] | None:
        """A whole answer that is given without asking the server; none: it is asked."""
        if self.path not in GENERATES:
            return None
        if self.fault == "logprobs-500" and self.asked.get("logprobs"):
            self.fired = True
            message = "Out of range float values are not JSON compliant: nan"
            return 500, {"object": "error", "message": message, "code": 500}
        if self.fault == "busy" and self.number % int(self.parameters.get("every", 8)) == 3:
            self.fired = True
            return 503, {"object": "error", "message": "no healthy upstream", "code": 503}
        return None

    def status(self, status: int) -> int:
        """The status that the client is told."""
        if self.fault == "ok-for-error" and status >= 400:
            self.fired = True
            return 200
        return status

    def whole(self, body: bytes) -> bytes:
        """A buffered body."""
        try:
            told = json.loads(body)
        except ValueError:
            return body
        if not isinstance(told, dict):
            return body
        before = json.dumps(told, ensure_ascii=False)
        if self.fault == "models" and self.path == "/v1/models":
            for one in told.get("data") or ():
                one["id"] = one["root"] = "another-model"
        elif self.path in GENERATES:
            self._spoil(told)
        after = json.dumps(told, ensure_ascii=False)
        if after == before:
            return body
        self.fired = True
        return after.encode()

    def event(self, data: str) -> Iterator[str]:
        """What is sent in place of one event of a stream; `HANG` and `CUT` say that nothing follows."""
        if self.path not in GENERATES:
            yield data
            return
        if data == "[DONE]":
            yield from self._last()
            return
        try:
            told = json.loads(data)
        except ValueError:
            yield data
            return
        self._words += 1 if _says(told) else 0
        yield from self._placed(self._changed(data, told), bool(_says(told)))

    def _last(self) -> Iterator[str]:
        if self._held is not None:
            yield self._held
            self._held = None
        if self.fault == "no-done":
            self.fired = True
        else:
            yield "[DONE]"

    def _changed(self, data: str, told: dict[str, Any]) -> str:
        before = json.dumps(told, ensure_ascii=False)
        self._spoil(told)
        if self.fault == "ids" and self._words > 1:
            told["id"] = f"{told.get('id')}-{self._words}"
        if self.fault == "no-role":
            for choice in told.get("choices") or ():
                (choice.get("delta") or {}).pop("role", None)
        after = json.dumps(told, ensure_ascii=False)
        if after == before:
            return data
        self.fired = True
        return after

    def _placed(self, data: str, says: bool) -> Iterator[str]:
        """Drop, double, hold back or stop at the third event that says something."""
        here = says and self._words == _AT
        if self._held is not None and says:
            held, self._held = self._held, None
            yield data
            yield held
            return
        if not here or self.fault not in ("drop", "double", "swap", "hang", "cut"):
            yield data
            return
        if self.fault in ("hang", "cut") and self.number % int(self.parameters.get("every", 1)):
            yield data
            return
        self.fired = True
        if self.fault == "double":
            yield from (data, data)
        elif self.fault == "swap":
            self._held = data
        elif self.fault != "drop":
            yield HANG if self.fault == "hang" else CUT

    def _spoil(self, told: dict[str, Any]) -> None:
        """What is changed in the same way in a whole answer and in an event."""
        usage, choices = told.get("usage"), told.get("choices") or []
        if isinstance(usage, dict):
            _USAGE.get(self.fault, _nothing)(told)
        if self.fault == "one-choice" and any(choice.get("index") for choice in choices):
            told["choices"] = [choice for choice in choices if not choice.get("index")]
        for choice in choices:
            _CHOICE.get(self.fault, _nothing)(choice)


def _says(told: Mapping[str, Any]) -> bool:
    """Whether an event carries text, reasoning or a part of a call."""
    for choice in told.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls")):
            return True
    return False


def _texts(choice: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    for place in (choice, choice.get("message"), choice.get("delta")):
        if isinstance(place, dict):
            for name in ("text", "content", "reasoning_content"):
                if isinstance(place.get(name), str):
                    yield place, name


def _nothing(told: dict[str, Any]) -> None:
    """Leave it as it is."""


def _empty(choice: dict[str, Any]) -> None:
    for place, name in _texts(choice):
        place[name] = ""


def _replacement(choice: dict[str, Any]) -> None:
    for place, name in _texts(choice):
        place[name] = "".join(c if c.isascii() else "\ufffd" for c in place[name])


def _no_finish(choice: dict[str, Any]) -> None:
    choice["finish_reason"] = None


def _finish(choice: dict[str, Any]) -> None:
    other = {"length": "stop", "stop": "length"}
    choice["finish_reason"] = other.get(choice.get("finish_reason") or "", choice.get("finish_reason"))


def _null_logprobs(choice: dict[str, Any]) -> None:
    told = choice.get("logprobs")
    if isinstance(told, dict) and isinstance(told.get("content"), list):
        for token in told["content"]:
            token["logprob"] = None
    elif isinstance(told, dict) and isinstance(told.get("token_logprobs"), list):
        told["token_logprobs"] = [None] * len(told["token_logprobs"])


def _more(field_name: str) -> Callable[[dict[str, Any]], None]:
    def more(told: dict[str, Any]) -> None:
        for name in (field_name, "total_tokens"):
            if isinstance(told["usage"].get(name), int):
                told["usage"][name] += 1

    return more


_USAGE: Mapping[str, Callable[[dict[str, Any]], None]] = {
    "usage": _more("completion_tokens"),
    "usage-prompt": _more("prompt_tokens"),
    "no-usage": lambda told: told.update(usage=None),
}
_CHOICE: Mapping[str, Callable[[dict[str, Any]], None]] = {
    "empty": _empty,
    "replacement": _replacement,
    "no-finish": _no_finish,
    "finish": _finish,
    "null-logprobs": _null_logprobs,
}


def known(kind: str) -> Kind:
    """A fault of this module by name; raises UsageError."""
    if kind not in Kind.__args__:  # type: ignore[attr-defined]
        raise UsageError(f"the proxy knows no fault {kind!r}", hint=f"there are: {', '.join(Kind.__args__)}")  # type: ignore[attr-defined]
    return kind  # type: ignore[return-value]
