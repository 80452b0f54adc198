"""A reply as the protocol has it: its choices by index, the usage, and for a stream whether its pieces come in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from forge_validate import reply
from forge_validate.exchange import Exchange


@dataclass(frozen=True)
class Call:
    """One call of a tool, the arguments as the text that was sent."""

    id: str | None
    name: str
    arguments: str


@dataclass(frozen=True)
class Choice:
    """One of the answers to a request."""

    index: int
    content: str
    """Empty for null."""
    reasoning: str
    """From either name of the field."""
    finish: str | None
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class Whole:
    """All of a reply."""

    choices: tuple[Choice, ...]
    usage: Mapping[str, Any]
    """Empty where none was told."""

    @property
    def first(self) -> Choice:
        """The choice with the smallest index."""
        return self.choices[0]


def read(exchange: Exchange) -> Whole:
    """The reply of a completion or chat exchange, buffered or streamed; raises reply.NotAReply."""
    # The refusals, errors and broken streams are told there.
    reply.read(exchange)
    if exchange.response is not None:
        body = exchange.response
        return Whole(tuple(_buffered(choice) for choice in body["choices"]), body.get("usage") or {})
    return _streamed(list(_events(exchange)))


def disorder(exchange: Exchange) -> str | None:
    """The first breach of the protocol in an event stream that was asked for its usage; none if there is none."""
    kind = exchange.headers.get("content-type", "")
    if not kind.startswith("text/event-stream"):
        return f"the content type is {kind!r}"
    lines = [line for line in (exchange.text or "").split("\n") if line.startswith("data:")]
    done = [place for place, line in enumerate(lines) if line.removeprefix("data:").strip() == "[DONE]"]
    if done != [len(lines) - 1]:
        return "`[DONE]` is not once and last" if done else "there is no `[DONE]`"
    events = list(_events(exchange))
    return _identity(events) or _places(events) or _usage(events)


def _identity(events: Sequence[Mapping[str, Any]]) -> str | None:
    for name in ("model", "object"):
        if len(told := {str(event.get(name)) for event in events}) > 1:
            return f"`{name}` changes within the stream: {', '.join(sorted(told)[:3])}"
    # Of several answers each may have an id of its own (SGLang 0.5.23).
    ids: dict[object, object] = {}
    for event in events:
        for choice in event.get("choices") or ():
            if ids.setdefault(choice.get("index"), event.get("id")) != event.get("id"):
                return f"`id` changes within the stream: {ids[choice.get('index')]}, {event.get('id')}"
    return None


def _places(events: Sequence[Mapping[str, Any]]) -> str | None:
    """The role first, the finish reason once, nothing after it, for each index."""
    began: set[int] = set()
    ended: set[int] = set()
    for event in events:
        for choice in event.get("choices") or ():
            index = choice.get("index")
            if not isinstance(index, int):
                return f"a piece has the index {index!r}"
            delta = choice.get("delta")
            says = _says(choice)
            if index in ended and (says or choice.get("finish_reason")):
                return f"choice {index} goes on after its finish reason"
            if isinstance(delta, dict) and index not in began and delta.get("role") != "assistant":
                return f"choice {index} does not begin with the role"
            began.add(index)
            if choice.get("finish_reason"):
                ended.add(index)
    if missing := began - ended:
        return f"choice {min(missing)} has no finish reason"
    return None if began else "no piece has a choice"


def _usage(events: Sequence[Mapping[str, Any]]) -> str | None:
    told = [place for place, event in enumerate(events) if event.get("usage")]
    if not told:
        return "there is no usage, which was asked for"
    if events[told[-1]].get("choices") or told[-1] != len(events) - 1:
        return "the usage is not a piece of its own at the end"
    return None if len(told) == 1 else f"{len(told)} pieces tell the usage"


def _says(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    names = ("content", "reasoning_content", "reasoning", "tool_calls")
    return bool(choice.get("text")) or any(delta.get(name) for name in names)


def _events(exchange: Exchange) -> Iterator[dict[str, Any]]:
    return (event for event in reply.events(exchange.text or "") if event is not None)


def _buffered(choice: Mapping[str, Any]) -> Choice:
    message = choice.get("message") or {"content": choice.get("text")}
    calls = []
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        calls.append(Call(call.get("id"), function.get("name") or "", function.get("arguments") or ""))
    return Choice(
        index=choice.get("index") or 0,
        content=message.get("content") or "",
        reasoning=message.get("reasoning_content") or message.get("reasoning") or "",
        finish=choice.get("finish_reason"),
        calls=tuple(calls),
    )


@dataclass
class _Call:
    id: str | None = None
    name: str = ""
    arguments: str = ""


@dataclass
class _Parts:
    content: str = ""
    reasoning: str = ""
    finish: str | None = None
    calls: dict[int, _Call] = field(default_factory=dict)


def _streamed(events: Sequence[Mapping[str, Any]]) -> Whole:
    found: dict[int, _Parts] = {}
    usage: Mapping[str, Any] = {}
    for event in events:
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            _add(found.setdefault(choice.get("index") or 0, _Parts()), choice)
    choices = tuple(
        Choice(
            index=index,
            content=parts.content,
            reasoning=parts.reasoning,
            finish=parts.finish,
            calls=tuple(Call(call.id, call.name, call.arguments) for _, call in sorted(parts.calls.items())),
        )
        for index, parts in sorted(found.items())
    )
    if not choices:
        raise reply.NotAReply("no choices in the stream")
    return Whole(choices, usage)


def _add(parts: _Parts, choice: Mapping[str, Any]) -> None:
    delta = choice.get("delta") or {}
    parts.content += delta.get("content") or choice.get("text") or ""
    parts.reasoning += delta.get("reasoning_content") or delta.get("reasoning") or ""
    parts.finish = choice.get("finish_reason") or parts.finish
    for call in delta.get("tool_calls") or ():
        mine = parts.calls.setdefault(call.get("index") or 0, _Call())
        function = call.get("function") or {}
        mine.id = call.get("id") or mine.id
        mine.name += function.get("name") or ""
        mine.arguments += function.get("arguments") or ""
