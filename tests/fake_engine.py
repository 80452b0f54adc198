"""A stand-in for a serving engine: batches, caches prefixes, streams, and can be made wrong while it runs.

Every character is a token; what it says is a hash of all that stands before, so that any error shows at once. It speaks
the completions endpoint, /tokenize, /flush_cache, /server_info and /metrics as SGLang 0.5.23 does.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

LETTERS = "abcdefghijklmnop"
NOISE = 1e-6
STEP_S = 0.001
PREFILL_S = 0.00002  # per token


@dataclass
class Job:
    prompt: str
    tokens: int
    salt: str
    sampled: bool
    cached: int = 0
    said: list[tuple[str, float, dict[str, float]]] = field(default_factory=list)
    disturbed: bool = False
    stuck: bool = False
    gone: bool = False
    flushed: bool = False
    evicted: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def done(self) -> bool:
        return len(self.said) >= self.tokens


def next_token(context: str) -> tuple[str, float, dict[str, float]]:
    code = zlib.crc32(context.encode())
    token, other = LETTERS[code % 16], LETTERS[(code + 1) % 16]
    logprob = -0.05 - (code >> 8) % 100 / 500
    return token, logprob, {token: logprob, other: -3.0}


def logprobs(context: str, faults: Iterable[str] = (), noise: float = 0.0) -> dict[str, float]:
    """A distribution over the letters whose likeliest is `next_token`'s: hashed logits, scaled or shifted by a fault."""
    logits = {letter: zlib.crc32(f"{letter}{context}".encode()) % 4096 / 1024 for letter in LETTERS}
    logits[next_token(context)[0]] = 5.0
    if "scaled" in faults:
        logits = {letter: value * 1.05 for letter, value in logits.items()}
    if "shifted" in faults:
        logits["c"] += 0.3
    for letter in LETTERS if noise else ():
        logits[letter] += noise * (zlib.crc32(f"{noise}{letter}{context}".encode()) % 2001 / 1000 - 1)
    whole = math.log(sum(map(math.exp, logits.values())))
    return {letter: value - whole for letter, value in logits.items()}


def common_prefix(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class FakeEngine:
    """`with FakeEngine() as engine:` listens at `engine.url`; `engine.faults` may change at any time.

    Faults: `batch` (wrong from batch 3 on), `beside` (wrong beside a prefill), `warm` (wrong behind a long cached
    prefix), `prefix64` (wrong behind a cached prefix of 64), `poison` (wrong for ever after a client hung up),
    `nan` (null logprobs from batch 3 on), `lost` (who comes when 4 wait is forgotten), `stall` (streams stop in the middle
    when many wait), `zombie` (who hung up keeps the place), `kv` (every request leaves tokens in the pool), `grow`
    (every request leaves memory), `chunk` (wrong when more than a chunk is prefilled at once), `forget` (finds no needle beyond
    a chunk), `truncate` (a prompt beyond the window is cut), `swallow` (it is never answered), `unsalted` (salts do not
    count), `flush` (the first answer after a flush is wrong), `evict` (wrong for what was cached and evicted), `hoard` (the
    pool is twice what is told), `mends` (as `poison`, until two counting prompts were answered),
    `serial` (no batches), `uncached` (no prefix cache), `quiet-usage` (no usage
    details), `mute` (no counters either). Of `/generate`, which is there for golden files: `scaled` (all logits times 1.05),
    `shifted` (one letter is likelier), `decode-scaled` (when decoding only), `null` (a NaN),
    `no-input-logprobs` (those of the prompt are not told).
    """

    def __init__(
        self,
        *,
        max_running: int = 8,
        pool: int = 20_000,
        page: int = 1,
        chunk: int = 512,
        window: int = 50_000,
        chat: bool = False,
    ) -> None:
        self.faults: set[str] = set()
        self.max_running, self.pool, self.page = max_running, pool, page
        self.chunk, self.window, self.chat = chunk, window, chat
        self.asked: list[dict[str, Any]] = []
        self.finished = 0
        self._cache: OrderedDict[str, None] = OrderedDict()
        self._hits = self._leaked = 0
        self._running: list[Job] = []
        self._waiting: deque[Job] = deque()
        self._poisoned = 0
        self._flushed = False
        self._evicted: set[str] = set()
        self._url: str | None = None
        self._started = threading.Event()

    @property
    def url(self) -> str:
        assert self._url is not None
        return self._url

    def memory(self) -> int:
        """What a container would weigh: some wobble, and what a fault leaves."""
        return (100 << 20) + (self.finished * 7919) % 4096 + (self.finished << 18 if "grow" in self.faults else 0)

    def __enter__(self) -> FakeEngine:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()))
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    async def _main(self) -> None:
        self._loop, self._stop, self._work = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self._url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        compute = asyncio.create_task(self._compute())
        self._started.set()
        await self._stop.wait()
        server.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        assert compute.done()

    # --- the engine -----------------------------------------------------------------------------------------------------

    async def _compute(self) -> None:
        while True:
            if not self._running and not self._waiting:
                self._work.clear()
                await self._work.wait()
            await self._admit()
            batch = list(self._running)
            for job in batch:
                self._decode(job, len(batch))
            for job in batch:
                if job.done or (job.gone and "zombie" not in self.faults):
                    self._running.remove(job)
                    self._finish(job)
                job.news.set()
            await asyncio.sleep(STEP_S)

    async def _admit(self) -> None:
        limit = 1 if "serial" in self.faults else self.max_running
        while self._waiting and len(self._running) < limit:
            job = self._waiting.popleft()
            if job.gone:
                continue
            job.cached = self._match(job)
            job.flushed, self._flushed = self._flushed, False
            kept = f"{job.salt}\0{job.prompt}" if job.prompt.startswith("Kept") and not job.cached else None
            job.evicted = kept is not None and any(known.startswith(kept) for known in self._evicted)
            self._hits += job.cached
            uncached = len(job.prompt) - job.cached
            if uncached > 1000:
                for other in self._running:
                    other.disturbed = True
            job.stuck = "stall" in self.faults and len(self._waiting) > limit
            await asyncio.sleep(uncached * PREFILL_S)
            self._running.append(job)

    def _match(self, job: Job) -> int:
        if "uncached" in self.faults:
            return 0
        best = 0
        for known in tuple(self._cache):
            if known.startswith(job.salt + "\0"):
                text = known[len(job.salt) + 1 :]
                best = max(best, common_prefix(text, job.prompt))
                if common_prefix(text, job.prompt):
                    # SGLang takes a beginning in common for a use of the whole.
                    self._cache.move_to_end(known)
        return min(best, len(job.prompt) - 1) // self.page * self.page

    def _decode(self, job: Job, batch: int) -> None:
        if job.done or (job.gone and "zombie" in self.faults):
            return
        if job.stuck and len(job.said) == 3:
            return
        so_far = "".join(one for one, _, _ in job.said)
        token, logprob, top = next_token(job.prompt + so_far)
        if (known := self._recalled(job.prompt))[: len(so_far)] == so_far and len(known) > len(so_far):
            token = known[len(so_far)]
            logprob, top = -0.1, {token: -0.1}
        if self._wrong(job, batch):
            token, logprob, top = "X", -0.5, {"X": -0.5}
        logprob += NOISE * (batch - 1)
        if "nan" in self.faults and batch >= 3:
            logprob = float("nan")
        job.said.append((token, logprob, top))

    def _recalled(self, prompt: str) -> str:
        """What a prompt that asks for a number it holds is gone on with."""
        asked = re.search(r"The secret number of (\w+) is$", prompt)
        found = re.search(rf"number of {asked.group(1)} is (\d+)\.", prompt) if asked else None
        if found is None:
            return ""
        return " 00000." if "forget" in self.faults and len(prompt) > self.chunk else f" {found.group(1)}."

    def _wrong(self, job: Job, batch: int) -> bool:
        if len(job.said) < 2 and not self._poisoned:
            return False
        return (
            ("batch" in self.faults and batch >= 3)
            or ("beside" in self.faults and job.disturbed)
            or ("warm" in self.faults and job.cached > 0.8 * len(job.prompt))
            or ("flush" in self.faults and job.flushed)
            or ("evict" in self.faults and job.evicted)
            or ("chunk" in self.faults and len(job.prompt) - job.cached > self.chunk)
            or ("prefix64" in self.faults and job.cached == 64)
            or self._poisoned > 0
        )

    def _finish(self, job: Job) -> None:
        self.finished += 1
        if self._poisoned and job.prompt.startswith("Counting"):
            self._poisoned -= 1
        if job.gone and self.faults & {"poison", "mends"}:
            self._poisoned = 2 if "mends" in self.faults else 1_000_000
        if "kv" in self.faults:
            self._leaked += 3
        key = f"{job.salt}\0{job.prompt}" + "".join(token for token, _, _ in job.said)
        self._cache[key] = None
        self._cache.move_to_end(key)
        while sum(map(len, self._cache)) > self.pool * (2 if "hoard" in self.faults else 1):
            self._evicted.add(self._cache.popitem(last=False)[0])

    # --- the wire -------------------------------------------------------------------------------------------------------

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            _, path, _ = head.split("\r\n", 1)[0].split(" ")
            lines = head.lower().splitlines()
            lengths = [line.split(":")[1] for line in lines if line.startswith("content-length")]
            length = int(lengths[0]) if lengths else 0
            body = json.loads(await reader.readexactly(length)) if length else {}
            if path == ("/v1/chat/completions" if self.chat else "/v1/completions"):
                await self._complete(body, reader, writer)
            elif path == "/generate":
                await self._generate(body, writer)
            else:
                self._answer(writer, *self._told(path, body))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    def _told(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        used = sum(len(job.prompt) + len(job.said) for job in self._running) + self._leaked
        if path == "/server_info":
            state = {"effective_max_running_requests_per_dp": self.max_running, "decode_cuda_graph_bs": []}
            sizes = {
                "page_size": self.page,
                "chunked_prefill_size": self.chunk,
                "max_total_num_tokens": self.pool,
                "version": "0",
                "model_path": "m",
            }
            return 200, sizes | {"internal_states": [state]}
        if path == "/v1/models":
            model = {"id": "m", "object": "model", "owned_by": "sglang", "max_model_len": self.window}
            return 200, {"object": "list", "data": [model]}
        if path == "/v1/chat/completions":
            message = {"role": "assistant", "content": "a"}
            return 200, {"model": "m", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
        if path.startswith("/v1/loads"):
            running, waiting = len(self._running), len(self._waiting)
            return 200, {"loads": [{"num_running_reqs": running, "num_waiting_reqs": waiting, "num_used_tokens": used}]}
        if path == "/metrics":
            hits = [] if "mute" in self.faults else [f'sglang:cached_tokens_total{{a="b"}} {float(self._hits)}']
            lines = [
                "# TYPE sglang:num_running_reqs gauge",
                f'sglang:num_running_reqs{{model_name="m"}} {float(len(self._running))}',
                f'sglang:num_queue_reqs{{model_name="m"}} {float(len(self._waiting))}',
                f'sglang:kv_used_tokens{{model_name="m"}} {float(used)}',
                *hits,
            ]
            return 200, "\n".join(lines) + "\n"
        if path.endswith("/tokenize"):
            return 200, {"tokens": [ord(c) for c in body["prompt"]], "count": len(body["prompt"])}
        if path.startswith("/flush_cache"):
            idle = not self._running and not self._waiting
            if idle:
                self._cache.clear()
                self._flushed = True
            return (200 if idle else 400), "Cache flushed.\n"
        return 404, {"detail": "Not Found"}

    async def _complete(self, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.append(body)
        if body.get("temperature", 0) < 0:
            self._answer(writer, 400, {"object": "error", "message": "temperature must be non-negative", "code": 400})
            return
        prompt = body["messages"][-1]["content"] if self.chat else body["prompt"]
        prompt = prompt if isinstance(prompt, str) else "".join(map(chr, prompt))
        if len(prompt) >= self.window:
            if "swallow" in self.faults:
                await reader.read(1)
                return
            if "truncate" not in self.faults:
                self._answer(writer, 400, {"object": "error", "message": "the input is longer than the window"})
                return
            prompt = prompt[: self.window - body["max_tokens"]]
        salt = "" if "unsalted" in self.faults else str(body.get("cache_salt", ""))
        job = Job(prompt, body["max_tokens"], salt, body.get("temperature", 0) > 0)
        if "lost" not in self.faults or len(self._running) + len(self._waiting) < self.max_running + 4:
            self._waiting.append(job)
            self._work.set()
        hangs_up = asyncio.create_task(self._listen(job, reader))
        try:
            if body.get("stream"):
                await self._stream(body, job, writer)
            else:
                while not job.done and not job.gone:
                    await self._news(job)
                if body.get("echo"):
                    job.said = [*self._prefilled(prompt), *job.said]
                self._answer(
                    writer, 200, self._piece(body, job, job.said, "length") | {"usage": self._usage(job, prompt)}
                )
        finally:
            job.gone = job.gone or not job.done
            hangs_up.cancel()

    async def _generate(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        """As SGLang's: `[logprob, id, text]`, and nothing told of the first place of the prompt's."""
        prompt = body.get("text") or "".join(map(chr, body["input_ids"]))
        limit = body["sampling_params"]["max_new_tokens"]
        job = Job(prompt, limit, str(body.get("cache_salt", "")), False)
        self._waiting.append(job)
        self._work.set()
        while not job.done:
            await self._news(job)
        said, k = "".join(token for token, _, _ in job.said), body.get("top_logprobs_num", 1)
        # A prefill is no decode, and several at one time are not one.
        noise = 0.002 if len(self._running) > 1 else 0.001
        faults = self.faults - {"scaled"} | ({"scaled"} if self.faults & {"scaled", "decode-scaled"} else set())
        decoded = [self._triples(prompt + said[:at], k, faults, 2 * noise) for at in range(len(said))]
        meta: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": len(said), "cached_tokens": 0}
        meta["finish_reason"] = {"type": "length", "length": limit}
        meta["output_top_logprobs"] = decoded
        meta["output_token_logprobs"] = [[-0.1, ord(token), token] for token in said]
        meta["input_token_logprobs"] = meta["input_top_logprobs"] = []
        if "logprob_start_len" in body and "no-input-logprobs" not in self.faults:
            start = body["logprob_start_len"]
            rows = [self._triples(prompt[:at], k, self.faults, noise) for at in range(start + 1, len(prompt))]
            meta["input_top_logprobs"] = [None, *rows]
            meta["input_token_logprobs"] = [[None, ord(token), token] for token in prompt[start:]]
        self._answer(writer, 200, {"text": said, "output_ids": [ord(c) for c in said], "meta_info": meta})

    def _triples(self, context: str, count: int, faults: set[str], noise: float) -> list[list[Any]]:
        told = sorted(logprobs(context, faults, noise).items(), key=lambda pair: -pair[1])[:count]
        if "null" in faults and len(context) % 7 == 0:
            return [[None, ord(token), token] for token, _ in told]
        return [[value, ord(token), token] for token, value in told]

    async def _stream(self, body: dict[str, Any], job: Job, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        sent = 0
        while sent < job.tokens and not job.gone:
            while len(job.said) == sent and not job.gone:
                await self._news(job)
            piece = self._piece(body, job, job.said[sent:], "length" if job.done else None)
            sent = len(job.said)
            writer.write(f"data: {json.dumps(piece)}\n\n".encode())
            await writer.drain()
        usage = {"object": "text_completion", "model": "m", "choices": [], "usage": self._usage(job, job.prompt)}
        writer.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())

    async def _news(self, job: Job) -> None:
        await job.news.wait()
        job.news.clear()

    async def _listen(self, job: Job, reader: asyncio.StreamReader) -> None:
        """Until the client hangs up."""
        if not await reader.read(1):
            job.gone = True
            job.news.set()

    def _prefilled(self, prompt: str) -> Iterator[tuple[str, float | None, dict[str, float]]]:
        """The logprobs of a prompt's own tokens, a little off from what decoding gives."""
        yield prompt[0], None, {}
        for place in range(1, len(prompt)):
            token, logprob, top = next_token(prompt[:place])
            mine = logprob if prompt[place] == token else -9.0
            yield prompt[place], mine + 5 * NOISE, top

    def _piece(self, body: dict[str, Any], job: Job, said: list[Any], finish: str | None) -> dict[str, Any]:
        text = "".join(t for t, _, _ in said)
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None}
        if self.chat:
            choice["delta" if body.get("stream") else "message"] = {"role": "assistant", "content": choice.pop("text")}
            if body.get("logprobs"):
                tokens = [
                    {"token": t, "logprob": None if v is None or v != v else v, "top_logprobs": []} for t, v, _ in said
                ]
                choice["logprobs"] = {"content": tokens}
        elif body.get("logprobs"):
            plain = [None if value is None or value != value else value for _, value, _ in said]
            choice["logprobs"] = {
                "tokens": [token for token, _, _ in said],
                "token_logprobs": plain,
                "top_logprobs": [top or None for _, _, top in said],
                "text_offset": [-1] * len(said),
            }
        return {"object": "text_completion", "model": "m", "choices": [choice]}

    def _usage(self, job: Job, prompt: str) -> dict[str, Any]:
        found: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": job.tokens}
        if not self.faults & {"mute", "quiet-usage"}:
            found["prompt_tokens_details"] = {"cached_tokens": job.cached}
        return found

    def _answer(self, writer: asyncio.StreamWriter, status: int, body: Any) -> None:
        kind = "text/plain" if isinstance(body, str) else "application/json"
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        head = (
            f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        )
        writer.write(head.encode() + data)
