"""Asking a server what it offers. It never judges; what it sends changes nothing on the server.

What a server tells about itself (SGLang's /server_info) is not asked for a second time: a question costs tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forge_validate import exchange
from forge_validate.exchange import Exchange, Request
from forge_validate.offers import see
from forge_validate.server import Server
from forge_validate.talk import send

CHAT = "/v1/chat/completions"
_LOOK_S = 30
_GENERATE_S = 90

# Long enough to fill a page or a block of a prefix cache twice (64 tokens are the largest usual one): servers report
# cached tokens only where there are some.
_NUMBERS = "one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, thirteen, fourteen, fifteen, "
PROMPT = f"Here are numbers: {_NUMBERS * 5}sixteen. What is the last one?"
TOOL = {
    "type": "function",
    "function": {
        "name": "say_number",
        "description": "Say a number",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}


def ask(server: Server, folder: Path) -> dict[str, Exchange]:
    """Ask what `see` looks at; writes `folder/offers__*.json` and returns the exchanges by name.

    A dead or silent server is not asked to the end: what is missing is unknown.
    """
    talk = _Talk(server, folder)
    talk.get("models", "/v1/models")
    info = see.native_info(talk.get("server-info", "/server_info"))
    talk.get("metrics", "/metrics")
    if see.token_ids(talk.post("tokenize-v1", "/v1/tokenize", {"model": server.served, "prompt": "one two"})) is None:
        talk.post("tokenize", "/tokenize", {"model": server.served, "prompt": "one two"})
    talk.post("completions", "/v1/completions", {"model": server.served, "prompt": "one two", "max_tokens": 1})
    if info is None:
        talk.get("version", "/version")
    else:
        talk.send("flush", Request(method="OPTIONS", path="/flush_cache"), _LOOK_S)
        sampling = {"max_new_tokens": 1, "temperature": 0}
        talk.post("generate", "/generate", {"text": "one two", "sampling_params": sampling})
    talk.chat("logprobs", max_tokens=2, logprobs=True, top_logprobs=1)
    if info is None or "reasoning_parser" not in info:
        switched = {"enable_thinking": True}
        if see.refused(talk.chat("thinking", max_tokens=16, chat_template_kwargs=switched)):
            talk.chat("plain", max_tokens=16)
    if (info is None or "tool_call_parser" not in info) and not see.refused(
        talk.chat("tools", max_tokens=1, tools=[TOOL])
    ):
        talk.chat("tools-required", max_tokens=64, tools=[TOOL], tool_choice="required")
    return talk.exchanges


class _Talk:
    """Sends, records, and stops after a generation that did not come."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.exchanges: dict[str, Exchange] = {}
        self._server, self._folder = server, folder
        self._silent = False
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, path: str) -> Exchange | None:
        return self.send(name, Request(method="GET", path=path), _LOOK_S)

    def post(self, name: str, path: str, body: dict[str, Any]) -> Exchange | None:
        return self.send(name, Request(method="POST", path=path, body=body), _GENERATE_S)

    def chat(self, name: str, **more: Any) -> Exchange | None:
        messages = [{"role": "user", "content": PROMPT}]
        return self.post(name, CHAT, {"model": self._server.served, "messages": messages, "temperature": 0} | more)

    def send(self, name: str, request: Request, timeout: float) -> Exchange | None:
        if self._silent or self._server.died() is not None:
            return None
        secrets = (self._server.api_key,) if self._server.api_key else ()
        found = exchange.masked(send(self._server, f"offers/{name}", request, timeout), secrets)
        exchange.save(found, self._folder)
        self.exchanges[found.name] = found
        self._silent = found.error is not None
        return found
