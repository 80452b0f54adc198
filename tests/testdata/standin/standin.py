"""A stand-in for a server, run inside a container in the place of SGLang: says what the file `mode` beside it says.

Only the standard library; the folder is mounted as if it were a model.
"""

import argparse
import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HERE = Path(__file__).parent
MODE = (HERE / "mode").read_text().strip()
PARIS = "The capital of France is Paris."
CALL = {"id": "call_0", "index": 0, "type": "function"}
CALL["function"] = {"name": "get_weather", "arguments": '{"city": "Paris"}'}


def say(text: str) -> None:
    print(f"[2026-11-30 00:00:00] {text}", file=sys.stderr, flush=True)


class Handler(BaseHTTPRequestHandler):
    options: argparse.Namespace

    def log_message(self, *_: object) -> None:
        pass

    def give(self, body: object, status: int = 200, kind: str = "application/json") -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def locked(self) -> bool:
        """As SGLang does: everything but the health needs the key."""
        key = self.options.api_key
        if MODE == "open" or not key or self.path == "/health" or self.headers.get("Authorization") == f"Bearer {key}":
            return False
        self.give({"error": "Unauthorized"}, 401)
        return True

    def do_OPTIONS(self) -> None:
        self.give({}, 405 if self.path == "/flush_cache" else 404)

    def do_GET(self) -> None:
        name = self.options.served_model_name
        if self.locked():
            return
        if self.path == "/health":
            self.give({}, 503 if MODE == "unhealthy" else 200)
        elif self.path == "/v1/models":
            self.give({"object": "list", "data": [{"id": name}]})
        elif self.path == "/model_info":
            word = "default" if MODE == "impostor" else self.options.weight_version
            self.give({"served_model_name": name, "is_generation": True, "weight_version": word, "model_type": "x"})
        elif self.path == "/server_info":
            told = {key.replace("-", "_"): value for key, value in vars(self.options).items()}
            self.give(told | {"launch_command": " ".join(sys.argv)})
        else:
            self.give({"object": "error", "message": "Not Found", "code": 404}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.locked():
            return
        if MODE == "dies":
            say("RuntimeError: died while answering")
            os._exit(7)
        if MODE == "mute":
            say("asked, and silent")
            time.sleep(600)
        content = "!" * 48 if MODE == "garbage" else PARIS
        if self.path == "/generate":
            self.give({"text": content, "meta_info": {"cached_tokens": 0}})
            return
        if self.path == "/v1/tokenize":
            self.give({"tokens": [504, 3575, 282, 4649, 314]})
            return
        if self.path == "/v1/completions":
            self.give(
                {"choices": [{"text": content if MODE == "garbage" else " Paris. It", "finish_reason": "length"}]}
            )
            return
        message: dict[str, object] = {"role": "assistant", "content": content, "reasoning_content": None}
        finish, prompt = "stop", 16
        if body.get("chat_template_kwargs", {}).get("enable_thinking", True):
            message |= {"content": "", "reasoning_content": content}
            prompt = 128
        if body.get("tools"):
            message |= {"content": "", "tool_calls": [CALL]}
            finish, prompt = "tool_calls", 248
        usage = {"completion_tokens": 8, "prompt_tokens": prompt}
        if body.get("stream"):
            piece = {"choices": [{"index": 0, "delta": message, "finish_reason": finish}], "usage": usage}
            self.give(f"data: {json.dumps(piece)}\n\ndata: [DONE]\n\n", kind="text/event-stream")
            return
        choice = {"index": 0, "message": message, "finish_reason": finish}
        if body.get("logprobs"):
            value = None if MODE == "garbage" else -0.5
            choice["logprobs"] = {"content": [{"token": "x", "logprob": value}]}
        self.give({"choices": [choice], "usage": usage})


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("model-path", "served-model-name", "host", "weight-version", "device", "api-key"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--port", type=int)
    if MODE == "flag":
        parser.parse_args()
    Handler.options, _ = parser.parse_known_args()
    if MODE == "secret":
        say("launch: --api-key sk-leaked-0123456789 --device cpu")
    # In clear, as SGLang prints it.
    say(f"server_args={vars(Handler.options)}")
    say(f"the command was {sys.argv}")
    if MODE == "weights":
        raise RuntimeError("Cannot find any model weights with `/model`")
    if MODE == "dead":
        raise ValueError("No NvFp4 MoE backend supports the deployment configuration")
    if MODE == "oom":
        hoard = []
        while True:
            hoard.append(bytearray(os.urandom(1 << 20) * 16))
    if MODE == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    if MODE == "hangs":
        time.sleep(600)
    say("Load weight end. type=StandIn")
    server = ThreadingHTTPServer((Handler.options.host, Handler.options.port), Handler)
    say("The server is fired up and ready to roll!")
    server.serve_forever()


main()
