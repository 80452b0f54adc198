"""A small server on loopback that answers with the shapes of a real one: SGLang, vLLM, or one that knows chats alone.

The shapes (fields, nulls, errors, paths) are those of the recorded samples in `testdata/wire`; what it says is its own.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

PARIS = "The capital of France is Paris."
CALL = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
_GAUGES = {"sglang": "sglang:num_running_reqs", "vllm": "vllm:num_requests_running"}
_TOKENIZE = {("/tokenize", "vllm"), ("/tokenize", "sglang"), ("/v1/tokenize", "sglang")}


@dataclass
class Peer:
    """How the server behaves; may be changed while it runs."""

    flavour: Literal["sglang", "vllm", "plain"] = "vllm"
    models: tuple[str, ...] = ("smollm2",)
    key: str | None = None
    says: str = PARIS
    tool_parser: bool = True
    reasoning_parser: bool = True
    cache_report: bool = False
    metrics: bool = True
    logprob: float | Literal["none", "refused", "broken"] | None = -0.5
    statuses: dict[str, int] = field(default_factory=dict)
    """Path -> status that it answers with, whatever is asked."""
    silent: tuple[str, ...] = ()
    """Paths whose connections are closed without a word."""
    url: str = ""
    log: list[tuple[str, str, Any]] = field(default_factory=list)
    """Method, path and body of each request."""
    prompts: set[str] = field(default_factory=set)

    @property
    def asked(self) -> list[str]:
        """The paths that were asked."""
        return [path for _, path, _ in self.log]


@contextmanager
def serving(peer: Peer) -> Iterator[Peer]:
    """Serve until the block ends."""

    class Handler(_Handler):
        its = peer

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=lambda: server.serve_forever(0.02), daemon=True)
    thread.start()
    peer.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield peer
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    its: Peer

    def log_message(self, *_: object) -> None:
        pass

    def give(self, body: object, status: int = 200, kind: str = "application/json") -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def taken(self, body: Any = None) -> bool:
        """Whether the answer was given here: silence, a forced status, no key."""
        peer = self.its
        peer.log.append((self.command, self.path, body))
        if self.path in peer.silent:
            self.close_connection = True
        elif self.path in peer.statuses:
            self.give({"detail": "as told"}, peer.statuses[self.path])
        elif peer.key and self.headers.get("Authorization") != f"Bearer {peer.key}":
            self.give({"error": "Unauthorized"}, 401)
        else:
            return False
        return True

    def do_OPTIONS(self) -> None:
        if not self.taken():
            there = self.its.flavour == "sglang" and self.path == "/flush_cache"
            self.give({"detail": "Method Not Allowed" if there else "Not Found"}, 405 if there else 404)

    def do_GET(self) -> None:
        if self.taken():
            return
        peer, flavour = self.its, self.its.flavour
        gauge = _GAUGES.get(flavour)
        if self.path == "/v1/models":
            owned = {"owned_by": flavour} if flavour != "plain" else {}
            self.give({"object": "list", "data": [{"id": name, "object": "model"} | owned for name in peer.models]})
        elif self.path in ("/server_info", "/model_info") and flavour == "sglang":
            self.give(
                {
                    "model_path": "m",
                    "served_model_name": peer.models[0],
                    "is_generation": True,
                    "version": "0.5.23",
                    "api_key": peer.key,
                    "reasoning_parser": "qwen3" if peer.reasoning_parser else None,
                    "tool_call_parser": "hermes" if peer.tool_parser else None,
                    "enable_cache_report": peer.cache_report,
                }
            )
        elif self.path == "/version" and flavour == "vllm":
            self.give({"version": "0.32.0"})
        elif self.path == "/metrics" and gauge and peer.metrics:
            text = f'# TYPE {gauge} gauge\n{gauge}{{model_name="{peer.models[0]}"}} 0.0\n'
            self.give(text, kind="text/plain; version=0.0.4")
        else:
            self.give({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.taken(body):
            return
        flavour = self.its.flavour
        if self.path == "/v1/chat/completions":
            self.chat(body)
        elif (self.path, flavour) in _TOKENIZE:
            ids = [504, 3575, 282, 4649, 314]
            more = {"token_strs": None} if flavour == "vllm" else {}
            self.give({"count": len(ids), "max_model_len": 8192, "tokens": ids} | more)
        elif self.path == "/v1/completions" and flavour != "plain":
            choice = {"index": 0, "text": " three", "finish_reason": "length"}
            self.give({"object": "text_completion", "model": body["model"], "choices": [choice]})
        elif self.path == "/generate" and flavour == "sglang":
            self.give({"text": " three", "output_ids": [1], "meta_info": {"prompt_tokens": 2, "cached_tokens": 0}})
        else:
            self.give({"detail": "Not Found"}, 404)

    def refuse(self, message: str, status: int = 400) -> None:
        kind = "NotFoundError" if status == 404 else "BadRequestError"
        error = {"message": message, "type": kind, "param": None, "code": status}
        self.give(error | {"object": "error"} if self.its.flavour == "sglang" else {"error": error}, status)

    def chat(self, body: dict[str, Any]) -> None:
        peer = self.its
        strange = {"chat_template_kwargs", "tools", "logprobs"} & body.keys()
        if peer.flavour == "plain" and strange:
            return self.refuse(f"unknown parameters: {', '.join(sorted(strange))}")
        if peer.flavour == "vllm" and body["model"] not in peer.models:
            return self.refuse(f"The model `{body['model']}` does not exist.", 404)
        if body.get("tools") and not peer.tool_parser and peer.flavour == "vllm":
            return self.refuse('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
        if body.get("logprobs") and peer.logprob == "refused":
            return self.refuse("logprobs are not supported")
        if body.get("logprobs") and peer.logprob == "broken":
            return self.refuse("Out of range float values are not JSON compliant: nan", 500)
        message, finish = self.message(body)
        usage = self.usage(body)
        if body.get("stream"):
            return self.stream(message, finish, usage)
        choice = {"index": 0, "message": message, "logprobs": self.logprobs(body), "finish_reason": finish}
        vllm = {"stop_reason": None, "token_ids": None, "routed_experts": None}
        choice |= vllm if peer.flavour == "vllm" else {"matched_stop": 2}
        whole = {"id": "chatcmpl-1", "object": "chat.completion", "created": int(time.time()), "model": body["model"]}
        return self.give(whole | {"choices": [choice], "usage": usage})

    def message(self, body: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """What it says, with the field names of its flavour, and the finish reason."""
        peer = self.its
        thought = "reasoning" if peer.flavour == "vllm" else "reasoning_content"
        nothing = None if peer.flavour == "vllm" else ""
        message: dict[str, Any] = {"role": "assistant", "content": peer.says}
        if peer.flavour == "vllm":
            message |= {"refusal": None, "annotations": None, "audio": None, "function_call": None}
        if peer.flavour != "plain":
            message[thought] = None
        if body.get("tools"):
            if not peer.tool_parser:
                return message | {"content": f"<tool_call>{json.dumps(CALL)}</tool_call>"}, "stop"
            call = {"id": "call_0", "type": "function", "function": CALL}
            call |= {"index": 0} if peer.flavour == "sglang" else {}
            return message | {"content": nothing, "tool_calls": [call]}, "tool_calls"
        thinks = (body.get("chat_template_kwargs") or {}).get("enable_thinking", True)
        if peer.reasoning_parser and thinks and peer.flavour != "plain":
            return message | {"content": nothing, thought: peer.says}, "stop"
        return message, "stop"

    def usage(self, body: dict[str, Any]) -> dict[str, Any]:
        peer = self.its
        prompt = json.dumps(body["messages"])
        hit = prompt in peer.prompts
        peer.prompts.add(prompt)
        length = 248 if body.get("tools") else 16
        return {
            "prompt_tokens": length,
            "total_tokens": length + 8,
            "completion_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 15} if peer.cache_report and hit else None,
        }

    def logprobs(self, body: dict[str, Any]) -> dict[str, Any] | None:
        if not body.get("logprobs") or self.its.logprob == "none":
            return None
        return {"content": [{"token": "x", "logprob": self.its.logprob, "bytes": [120], "top_logprobs": []}]}

    def stream(self, message: dict[str, Any], finish: str, usage: dict[str, Any]) -> None:
        first = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
        delta = {name: value for name, value in message.items() if value and name != "role"}
        middle = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}
        pieces = [json.dumps(piece) for piece in (first, middle, last, {"choices": [], "usage": usage})]
        text = "".join(f"data: {piece}\n\n" for piece in [*pieces, "[DONE]"])
        self.give(text, kind="text/event-stream; charset=utf-8")
