"""The verb `golden`: a trusted server is reached or booted, measured, and its golden file written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from forge_core.console import Console, Step
from forge_core.errors import EnvironmentFailure, UsageError
from forge_core.model import ModelRef
from forge_validate import bench as benches
from forge_validate.exchange import Request
from forge_validate.families.golden import GoldenFamily, Settings
from forge_validate.families.runner import Sender
from forge_validate.families.trusted import TOKENIZER
from forge_validate.golden import document, record
from forge_validate.golden.document import WHY, Golden, Subject
from forge_validate.golden.texts import Encode
from forge_validate.judge import Bench
from forge_validate.line import Wish
from forge_validate.offers.ask import ask
from forge_validate.offers.see import PREFIX, see, token_ids
from forge_validate.resolved import resolved
from forge_validate.server import Server
from forge_validate.talk import send
from forge_validate.target.address import attach

_LOOK_S = 30
# Of what a server resolved to, and of a model's own config: what decides how its numbers come about.
_FORMATS = (
    "attention_backend",
    "moe_runner_backend",
    "fp4_gemm_runner_backend",
    "kv_cache_dtype",
    "dtype",
    "log.kv-dtype",
)


@dataclass(frozen=True)
class Order:
    """What the user asks for."""

    wish: Wish
    """Which server, which suite, whose answers; `model` is the folder that a server at an address is said to serve."""
    why: str
    """Why that server may be trusted; empty only to `add`."""
    out: Path | None = None
    """The file; none: the model's in this package."""
    add: bool = False
    """Measure the prompts of that file once more, on a server that was started anew."""


@dataclass(frozen=True)
class _Made:
    """What is known of a server because we started it."""

    image: str | None = None
    """Digest."""
    serving: str | None = None
    """Sha256."""
    tells: Mapping[str, str] = field(default_factory=dict)
    """Patterns for its log."""


def make(order: Order, work: Path, console: Console) -> tuple[Golden, Path]:
    """Write a golden file; returns it and its place. Exchanges and logs lie in `work`.

    Raises what attaching or booting raises, and
    as `record.record`; UsageError without a reason, for a suite without a `golden` section, for a model without answers of its own.
    """
    if not order.add and len(order.why.strip()) < WHY:
        raise UsageError("a golden needs a reason to trust this server", hint="say it in a sentence: --why TEXT")
    if order.wish.url is not None:
        golden, path = _attached(order, order.wish.url, work, console)
    else:
        golden, path = _booted(order, work, console)
    document.save(golden, path)
    return golden, path


def _attached(order: Order, url: str, work: Path, console: Console) -> tuple[Golden, Path]:
    wish = order.wish
    with console.step("attach", url.rpartition("@")[2]) as step:
        target, server = attach(
            url, profile=wish.profile, served=wish.served, key_variable=wish.api_key_env, offline=wish.offline
        )
        judged = benches.bench_of_others(wish.profile, target.served, suite_name=wish.suite, answers=wish.answers)
        settings, path = _settings(judged), _place(order, judged)
        identity = None if wish.model is None else ModelRef.of_folder(judged.answers.model, wish.model)
        step.result(f"serves {target.served}, known as {judged.answers.model}")
    judged = replace(judged, model=wish.model, identity=identity)
    before = document.load(path) if order.add else None
    return _measured(order, server, judged, settings, before, work, console, _Made()), path


def _booted(order: Order, work: Path, console: Console) -> tuple[Golden, Path]:
    # Here, not above: a server at an address needs no engine, and none of the code that speaks to one.
    from forge_validate import booted, trial
    from forge_validate.boot import boot

    wish = order.wish
    judged = benches.bench(wish.profile, suite_name=wish.suite, answers=wish.answers)
    settings, path = _settings(judged), _place(order, judged)
    reached = booted.reach(wish, work.parent, console)
    subject, image = reached.subject, reached.target.image
    judged = replace(judged, model=subject.folder, identity=subject.model)
    made = _Made(image.digest, subject.serving.content_sha256(), subject.serving.tells)
    before = document.load(path) if order.add else None
    log = work / "logs" / "server.log"
    with (
        trial.held(subject, console, keep=False),
        boot(
            reached.engine, str(image), subject.serving, subject.model, subject.folder, log=log, console=console
        ) as server,
    ):
        return _measured(order, server, judged, settings, before, work, console, made), path


def _measured(
    order: Order,
    server: Server,
    judged: Bench,
    settings: Settings,
    before: Golden | None,
    work: Path,
    console: Console,
    made: _Made,
) -> Golden:
    """A golden of this server, or `before` with the noise of this one."""
    folder = work / "exchanges"
    for old in folder.glob("*.json"):
        old.unlink()
    with console.step("offers", server.url) as step:
        asked = ask(server, folder)
        judged = replace(judged, offers=server.offers.joined(see(asked)))
        step.result(judged.offers.software or "an unknown server")
    with _recording(server, folder, console) as (sender, step):
        if before is not None:
            golden = record.again(sender, judged, settings, before, step.waiting)
        else:
            info = asked.get(f"{PREFIX}server-info")
            subject = _subject(judged, server, None if info is None else info.response, made)
            encode = _encode(judged, server)
            golden = record.record(sender, judged, settings, subject, order.why, encode, step.waiting)
        worst = max(golden.noise, key=lambda one: one.largest)
        places = sum(len(one.rows) for one in golden.prompts)
        step.result(
            f"{places} places; the noise is at most {worst.largest:.2g} nats ({worst.path}, {worst.bucket} tokens)"
        )
    return golden


@contextmanager
def _recording(server: Server, folder: Path, console: Console) -> Iterator[tuple[Sender, Step]]:
    with console.step("golden", "the same tokens on several paths") as step, Sender(server, folder) as sender:
        yield sender, step


def _settings(judged: Bench) -> Settings:
    found = next((settings for family, settings in judged.families if family.name == GoldenFamily.name), None)
    if not isinstance(found, Settings):
        raise UsageError(
            f"suites/{judged.suite.suite}.yaml has no section `golden`", hint="name one that has: --suite NAME"
        )
    return found


def _place(order: Order, judged: Bench) -> Path:
    if judged.answers.model == benches.ANY:
        raise UsageError("a golden belongs to a model that has answers of its own", hint="name it: --answers MODEL")
    return order.out or document.place(judged.answers.golden_of)


def _subject(judged: Bench, server: Server, info: Any, made: _Made) -> Subject:
    identity = judged.identity
    files = {} if identity is None else {one.path: one.sha256 for one in identity.files}
    lines = server.log.read_text(encoding="utf-8").splitlines() if server.log and server.log.exists() else []
    told = resolved(info, lines, made.tells)
    return Subject(
        model=judged.answers.model,
        revision=None if identity is None else identity.revision,
        tokenizer=files.get(TOKENIZER),
        image=made.image,
        serving=made.serving,
        software=judged.offers.software,
        formats={name: told[name] for name in _FORMATS if name in told} | _config(judged.model),
    )


def _config(folder: Path | None) -> dict[str, str]:
    """The number formats that the model's own config names."""
    path = None if folder is None else folder / "config.json"
    data = json.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else {}
    dtype = data.get("dtype") or data.get("torch_dtype")
    method = (data.get("quantization_config") or {}).get("quant_method")
    return {f"config.{name}": str(value) for name, value in (("dtype", dtype), ("quantization", method)) if value}


def _encode(judged: Bench, server: Server) -> Encode:
    """The server's own tokenizer, asked; else that of the model folder."""
    path = judged.offers.tokenize_path
    if path is not None:
        return lambda text: _asked(server, path, text)
    file = None if judged.model is None else judged.model / TOKENIZER
    if file is None or not file.is_file():
        raise UsageError(f"{server.url} turns no text into token ids", hint="name the model's folder: --model FOLDER")
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    return lambda text: tuple(tokenizer.encode(text).ids)


def _asked(server: Server, path: str, text: str) -> tuple[int, ...]:
    request = Request(method="POST", path=path, body={"model": server.served, "prompt": text})
    found = send(server, "golden/tokenize", request, _LOOK_S)
    ids = token_ids(found)
    if ids is None:
        raise EnvironmentFailure(f"{path} gives no token ids: {found.error or f'HTTP {found.status}'}")
    return tuple(ids)
