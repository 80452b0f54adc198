"""A prompt rendered without the server: the model's own chat template and tokenizer, from its folder.

The template is run as transformers does (the sandbox, its options, filters and functions); how a server changes a request
on its way to the template is a `Dialect`, which is data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from forge_core.errors import UsageError
from forge_core.model import Frozen


class Dialect(Frozen):
    """How a server reads a request before the template sees it."""

    name: str
    seen: str
    """Where this was read or measured."""
    parts: str
    """What joins the text parts of a content for a template that knows only plain text."""
    prefill: Literal["together", "apart"]
    """Whether a prefilled answer is tokenized with the rest of the prompt or by itself."""
    last_assistant: Literal["assistant", "user"]
    """Whose turn the template is told a last answer is that is not to be continued."""
    tool_nulls: tuple[str, ...] = ()
    """Fields that stand in every tool as null, though nobody sent them."""


class Refusal(ValueError):
    """The template does not take this request; the message is its own."""


class Renderer:
    """One model folder's template and tokenizer; raises UsageError where it lacks either."""

    def __init__(self, folder: Path) -> None:
        try:
            environment = _environment()
            self._templates = {name: environment.from_string(text) for name, text in _templates(folder).items()}
        except jinja2.TemplateSyntaxError as error:
            raise UsageError(f"{folder}: the chat template, line {error.lineno}: {error.message}") from error
        self._special = _special(folder)
        try:
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exceptions
            raise UsageError(f"{folder}: no tokenizer in tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def length(self, body: Mapping[str, Any], dialect: Dialect, now: datetime) -> int:
        """Tokens of the prompt that the body of a chat request comes to; raises Refusal."""
        messages = self._messages(body, dialect)
        prefix = None
        if messages and messages[-1]["role"] == "assistant":
            if body.get("continue_final_message"):
                prefix = str(messages.pop()["content"])
            elif dialect.last_assistant == "user":
                messages[-1] = {"role": "user", "content": messages[-1]["content"]}
        text = self._render(messages, _tools(body, dialect), body.get("chat_template_kwargs") or {}, now)
        if prefix is not None and dialect.prefill == "apart":
            return self._count(text) + self._count(prefix)
        return self._count(text + (prefix or ""))

    def _count(self, text: str) -> int:
        # The template writes every special token itself.
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _messages(self, body: Mapping[str, Any], dialect: Dialect) -> list[dict[str, Any]]:
        found = []
        for message in body["messages"]:
            mine = {name: value for name, value in message.items() if value is not None}
            mine["content"] = self._content(mine.get("content", ""), str(mine["role"]), dialect)
            if thought := mine.pop("reasoning", None):
                mine.setdefault("reasoning_content", thought)
            if calls := mine.get("tool_calls"):
                mine["tool_calls"] = [_call(call) for call in calls]
            found.append(mine)
        return found

    def _content(self, content: Any, role: str, dialect: Dialect) -> Any:
        if isinstance(content, str) or (role != "tool" and self._knows_parts()):
            return content
        return dialect.parts.join(part["text"] for part in content)

    @lru_cache(maxsize=1)  # noqa: B019 - a renderer lives as long as the run
    def _knows_parts(self) -> bool:
        """Whether the template takes a list of text parts for what it says."""
        said: list[Any] = ["one", [{"type": "text", "text": "one"}]]
        try:
            plain, parts = (
                self._render([{"role": "user", "content": content}], None, {}, datetime.fromtimestamp(0))
                for content in said
            )
        except Refusal:
            return False
        return plain == parts

    def _render(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, more: Mapping[str, Any], now: datetime
    ) -> str:
        template = (self._templates.get("tool_use") if tools else None) or self._templates["default"]
        values = {**self._special, "add_generation_prompt": True, **more, "messages": messages, "tools": tools}
        try:
            return template.render(values | {"strftime_now": now.strftime})
        except (jinja2.TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            raise Refusal(str(error)) from error


@lru_cache(maxsize=2)
def renderer(folder: Path) -> Renderer:
    """The renderer of a folder, loaded once; raises UsageError."""
    return Renderer(folder)


class _Generation(Extension):
    """`{% generation %}` marks what a model said, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 - as the base class has it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call of the history: templates expect its arguments as values."""
    function = dict(call["function"])
    if isinstance(arguments := function.get("arguments"), str):
        function["arguments"] = json.loads(arguments)
    return {**call, "function": function}


def _tools(body: Mapping[str, Any], dialect: Dialect) -> list[dict[str, Any]] | None:
    tools: Sequence[dict[str, Any]] = body.get("tools") or ()
    return [{**tool, **dict.fromkeys(dialect.tool_nulls)} for tool in tools] or None


def _templates(folder: Path) -> dict[str, str]:
    """The templates by name; the file of its own comes before what tokenizer_config.json holds."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return {"default": path.read_text(encoding="utf-8")}
    told = _json(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(told, str):
        return {"default": told}
    if isinstance(told, list):
        found = {str(one["name"]): str(one["template"]) for one in told}
        if "default" in found:
            return found
    raise UsageError(f"{folder}: no chat template in chat_template.jinja or tokenizer_config.json")


def _special(folder: Path) -> dict[str, str]:
    """The special tokens by name (`bos_token`), as templates know them."""
    found = {}
    for name, value in _json(folder / "tokenizer_config.json").items():
        token = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(token, str):
            found[name] = token
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    return found if isinstance(found, dict) else {}
