"""A stand-in for a chat server with parsers, which can be made wrong while it runs; its prompt lengths are its own arithmetic.

Every byte of a prompt is a token, every word of an answer is one. It answers as a willing model would.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

TEMPLATE = """
{%- for tool in tools or [] %}{{ '[tool] ' + (tool | tojson) + '\n' }}{% endfor %}
{%- for message in messages %}
{{- '[' + message.role + '] ' + message.content }}
{%- if message.reasoning_content and enable_thinking is true %}{{ ' [thought] ' + message.reasoning_content }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ ' [call] ' + (call.function.arguments | tojson) }}{% endfor %}
{{- '\n' }}
{%- endfor %}
{{- '[assistant]' }}
{%- if enable_thinking is false %}{{ '<think></think>' }}{% endif -%}
"""
WHEN = "Mon, 30 Nov 2026 12:00:00 GMT"


def model_folder(folder: Path) -> Path:
    """A folder with the template and a tokenizer that makes a token of every byte."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def prompt_text(body: dict[str, Any], *, sglang: bool, faults: set[str]) -> str:
    """What the template above makes of a request, written down a second time."""
    thinking = (body.get("chat_template_kwargs") or {}).get("enable_thinking")
    text = ""
    for tool in body.get("tools") or ():
        shown = {**tool, **({"defer_loading": None} if sglang else {})}
        if "tools-template" in faults:
            shown = {**shown, "function": {k: v for k, v in tool["function"].items() if k != "description"}}
        text += f"[tool] {json.dumps(shown, ensure_ascii=False)}\n"
    messages = list(body["messages"])
    prefix = messages.pop()["content"] if body.get("continue_final_message") else ""
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = (" " if sglang else "\n").join(part["text"] for part in content)
        if "system-template" in faults and message["role"] == "system":
            continue
        text += f"[{message['role']}] {content}"
        if message.get("reasoning") and thinking:
            text += f" [thought] {message['reasoning']}"
        for call in message.get("tool_calls") or ():
            text += f" [call] {json.dumps(json.loads(call['function']['arguments']), ensure_ascii=False)}"
        text += "\n" if "turns-template" not in faults else "\n\n"
    return text + "[assistant]" + ("<think></think>" if thinking is False else "") + prefix


def instance(schema: dict[str, Any]) -> Any:
    """Something that a schema allows."""
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("type") == "object":
        return {name: instance(inner) for name, inner in schema["properties"].items()}
    if schema.get("type") == "array":
        return [instance(schema["items"])] * schema.get("minItems", 0)
    return "text"


def words(text: str) -> list[str]:
    return re.findall(r"\s*\S+", text)


class Answer:
    """What is said: pieces of (`content`, `reasoning` or the number of a call, text)."""

    def __init__(self) -> None:
        self.pieces: list[tuple[str | int, str]] = []
        self.names: list[str] = []
        self.finish = "stop"

    def add(self, place: str | int, text: str) -> None:
        self.pieces += [(place, word) for word in words(text)]

    def call(self, name: str, arguments: Any) -> None:
        self.names.append(name)
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self.add(len(self.names) - 1, text)
        self.finish = "tool_calls"

    def text(self, place: str | int) -> str:
        return "".join(text for where, text in self.pieces if where == place)


class FakeChat:
    """`with FakeChat() as server:` listens at `server.url`; `server.faults` may change at any time.

    Faults of the template: `turns-template`, `system-template`, `tools-template`. Of the parsers: `think-leak`,
    `thought-in-content`, `reasoning-off`, `call-as-text`, `swallowed`, `wrong-name`, `mojibake`, `ignored-none`, `merged`,
    `third-turn`, `schema`, `broken-arguments`, `no-parser` (which is none). Of the stream: `dropped`, `doubled`,
    `swapped`, `no-role`, `no-done`, `late`, `no-usage`, `usage`, `length-stop`, `stop-leak`, `one-of-n`, `no-finish`,
    `two-ids`.
    """

    def __init__(self, *, sglang: bool = True, native: bool = True) -> None:
        self.faults: set[str] = set()
        self.sglang, self.native = sglang, native
        self.asked: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeChat:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                parser = None if "no-parser" in outer.faults else "hermes"
                known = self.path == "/server_info" and outer.native
                self._send(200 if known else 404, {"tool_call_parser": parser, "reasoning_parser": parser})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(body)
                if self.path not in ("/v1/chat/completions", "/v1/completions"):
                    self._send(404, {"detail": "Not Found"})
                elif body.get("stream"):
                    self._head(200, "text/event-stream; charset=utf-8")
                    for event in outer.events(body):
                        text = event if isinstance(event, str) else json.dumps(event)
                        self.wfile.write(f"data: {text}\n\n".encode())
                else:
                    self._send(200, outer.buffered(body))

            def _send(self, status: int, body: Any) -> None:
                self._head(status, "application/json")
                self.wfile.write(json.dumps(body).encode())

            def _head(self, status: int, kind: str) -> None:
                self.send_response_only(status)
                self.send_header("Content-Type", kind)
                self.send_header("Date", WHEN)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join(10)
        self._server.server_close()

    # --- what is said ---------------------------------------------------------------------------------------------------

    def answer(self, body: dict[str, Any], index: int = 0) -> Answer:
        said = Answer()
        if "prompt" in body:
            said.add("content", " ".join(f" {number}," for number in range(17 + index, 600)))
        else:
            self._chat(body, said)
        self._end(body, said)
        return said

    def _chat(self, body: dict[str, Any], said: Answer) -> None:
        faults, tools = self.faults, {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or ()}
        choice = body.get("tool_choice")
        last = body["messages"][-1]
        if wanted := body.get("response_format"):
            schema = wanted["json_schema"]["schema"]
            said.add("content", "Paris." if "schema" in faults else json.dumps(instance(schema), ensure_ascii=False))
            return
        if choice == "required" or isinstance(choice, dict) or (choice == "none" and "ignored-none" in faults):
            name = choice["function"]["name"] if isinstance(choice, dict) else next(iter(tools))
            if "wrong-name" in faults and isinstance(choice, dict):
                name = next(iter(tools))
            self._call(said, name, instance(tools[name]["parameters"]))
            return
        if tools and choice == "auto" and last["role"] == "user":
            for city in re.findall(r"in ([A-Z]\w+)", last["content"]):
                self._call(said, "get_weather", {"city": city})
            return
        thinking = (body.get("chat_template_kwargs") or {}).get("enable_thinking")
        if (thinking or "reasoning-off" in faults) and not tools:
            place = "content" if "thought-in-content" in faults and body["max_tokens"] < 6 else None
            said.add(place or "reasoning", "They ask for the capital of France, which is known to be Paris.")
        leak = "</think> " if "think-leak" in faults and thinking else ""
        if "third-turn" in faults and any(message["role"] == "tool" for message in body["messages"]):
            leak = "<tool_call> "
        said.add("content", leak + "The capital of France is Paris.")

    def _call(self, said: Answer, name: str, arguments: Any) -> None:
        text = json.dumps(arguments, ensure_ascii=False)
        if "no-parser" in self.faults or "call-as-text" in self.faults:
            said.add("content", f'<tool_call> {{"name": "{name}", "arguments": {text}}} </tool_call>')
            return
        if "swallowed" in self.faults:
            said.finish = "tool_calls"
            return
        if "mojibake" in self.faults:
            text = text.replace("🌧", "\ufffd")
        if "broken-arguments" in self.faults:
            text = text[:-1]
        said.call(name, text)

    def _end(self, body: dict[str, Any], said: Answer) -> None:
        limit = body["max_tokens"]
        for stop in body.get("stop") or ():
            text = said.text("content")
            if stop in text:
                end = text.index(stop) + (len(stop) if "stop-leak" in self.faults else 0)
                said.pieces = [("content", word) for word in words(text[:end])]
                said.pieces = said.pieces or [("content", text[:end])]
                missing = text[:end][len(said.text("content")) :]
                said.pieces.append(("content", missing))
        if len(said.pieces) > limit:
            said.pieces = said.pieces[:limit]
            said.finish = "stop" if "length-stop" in self.faults and "prompt" in body else "length"

    # --- the wire -------------------------------------------------------------------------------------------------------

    def buffered(self, body: dict[str, Any]) -> dict[str, Any]:
        chat = "messages" in body
        choices = []
        for index in range(1 if "one-of-n" in self.faults else body.get("n", 1)):
            said = self.answer(body, index)
            if not chat:
                choices.append({"index": index, "text": said.text("content"), "finish_reason": said.finish})
                continue
            message: dict[str, Any] = {"role": "assistant", "content": said.text("content") or None}
            message["reasoning_content" if self.sglang else "reasoning"] = said.text("reasoning") or None
            if said.names:
                message["tool_calls"] = [self._wire_call(said, place, True) for place in range(len(said.names))]
            choices.append({"index": index, "message": message, "finish_reason": said.finish})
        return {"id": "a", "object": "x", "model": "m", "choices": choices, "usage": self._usage(body)}

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any] | str]:
        chat, faults = "messages" in body, self.faults
        count = 1 if "one-of-n" in faults else body.get("n", 1)
        for index in range(count):
            said = self.answer(body, index)
            if chat and "no-role" not in faults:
                yield self._event(index, {"role": "assistant", "content": ""})
            yield from self._said(body, index, said, chat)
            if "no-finish" not in faults:
                yield self._event(index, {} if chat else None, finish=said.finish)
            if "late" in faults and "response_format" not in body and body["max_tokens"] > 3:
                yield self._event(index, {"content": "!"} if chat else None, text="!")
        if "no-usage" not in faults:
            usage = self._usage(body)
            if "usage" in faults:
                usage = {
                    **usage,
                    "completion_tokens": usage["completion_tokens"] + 1,
                    "total_tokens": usage["total_tokens"] + 1,
                }
            yield {"id": "a", "object": "x", "model": "m", "choices": [], "usage": usage}
        if "no-done" not in faults:
            yield "[DONE]"

    def _said(self, body: dict[str, Any], index: int, said: Answer, chat: bool) -> Iterator[dict[str, Any]]:
        pieces = list(said.pieces)
        if not body.get("tools") and not body.get("response_format") and "stop" not in body and len(pieces) > 4:
            if "dropped" in self.faults:
                del pieces[2]
            if "doubled" in self.faults:
                pieces.insert(2, pieces[2])
            if "swapped" in self.faults:
                pieces[2], pieces[3] = pieces[3], pieces[2]
        started: set[int] = set()
        for number, (place, text) in enumerate(pieces):
            ident = "b" if "two-ids" in self.faults and number == 1 else "a"
            if not chat:
                yield self._event(index, None, text=text, ident=ident)
            elif isinstance(place, int):
                if place not in started:
                    started.add(place)
                    yield self._event(index, {"tool_calls": [self._wire_call(said, place, False)]}, ident=ident)
                delta = {"tool_calls": [{"index": place, "id": None, "function": {"name": None, "arguments": text}}]}
                yield self._event(index, delta, ident=ident)
            elif place == "reasoning":
                yield self._event(index, {"reasoning_content" if self.sglang else "reasoning": text}, ident=ident)
            else:
                yield self._event(index, {"content": text}, ident=ident)

    def _wire_call(self, said: Answer, place: int, whole: bool) -> dict[str, Any]:
        ident = "call_0" if "merged" in self.faults else f"call_{place}"
        function = {"name": said.names[place], "arguments": said.text(place) if whole else ""}
        return {"id": ident, "index": place, "type": "function", "function": function}

    def _event(
        self, index: int, delta: dict[str, Any] | None, *, text: str = "", finish: str | None = None, ident: str = "a"
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": finish}
        choice |= {"text": text} if delta is None else {"delta": delta}
        return {"id": ident, "object": "x", "model": "m", "choices": [choice]}

    def _usage(self, body: dict[str, Any]) -> dict[str, int]:
        text = body.get("prompt") or prompt_text(body, sglang=self.sglang, faults=self.faults)
        prompt = len(text.encode())
        said = sum(len(self.answer(body, index).pieces) for index in range(body.get("n", 1)))
        return {"prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said}
