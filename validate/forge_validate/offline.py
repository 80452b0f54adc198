"""Any recorded exchanges, judged file by file without a suite: whoever recorded them, from whatever server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from forge_core.console import Console
from forge_core.errors import ExitCode, UsageError
from forge_core.model import Frozen
from forge_validate import policy, single
from forge_validate.exchange import Exchange

_THRESHOLDS = "rehearsal"
"""Whose thresholds on text are taken; they are about text, not about a model."""

# What tells a bare response body from any other JSON.
_BODIES = {
    "choices": ("POST", "/v1/chat/completions"),
    "meta_info": ("POST", "/generate"),
    "data": ("GET", "/v1/models"),
    "model_path": ("GET", "/model_info"),
    "error": ("POST", "/v1/chat/completions"),
    "message": ("POST", "/v1/chat/completions"),
}


class FileJudgement(Frozen):
    """One file."""

    file: str
    kind: single.Class = Field(serialization_alias="class")
    """`ok`, or what kind of wrong."""
    reason: str


class Judgements(Frozen):
    """All files, in the order they were given."""

    outcome: Literal["passed", "failed"]
    """`passed` when every file is `ok`."""
    files: tuple[FileJudgement, ...]


def judge(places: Sequence[Path], console: Console) -> Judgements:
    """Judge files, or folders of them; shows one line each.

    What one file of a folder says about the server (`/v1/models`) counts for the other files of that folder. Raises
    UsageError for what is no recorded exchange and no body of a response.
    """
    limits = policy.load(_THRESHOLDS).text
    found = [(path, load(path)) for path in _files(places)]
    listed: dict[Path, frozenset[str]] = {}
    for path, exchange in found:
        listed[path.parent] = listed.get(path.parent, frozenset()) | single.listed_models(exchange)
    judged = []
    for path, exchange in found:
        kind, reason = single.judge(exchange, limits, listed[path.parent])
        judged.append(FileJudgement(file=str(path), kind=kind, reason=reason))
        console.say(f"  {kind:<13}  {path}  {reason}", "" if kind == "ok" else "red")
    wrong = sum(one.kind != "ok" for one in judged)
    console.say(f"{len(judged)} files, {wrong} not ok" if wrong else f"{len(judged)} files, all ok", "bold")
    return Judgements(outcome="failed" if wrong else "passed", files=tuple(judged))


def exit_code(found: Judgements) -> ExitCode:
    """0 when every file is ok, 1 otherwise."""
    return ExitCode.PASSED if found.outcome == "passed" else ExitCode.REFUSED


def dumps(found: Judgements) -> str:
    """As JSON, with a line end."""
    return found.model_dump_json(indent=2, by_alias=True) + "\n"


def load(path: Path) -> Exchange:
    """Read an exchange whoever recorded it: a request and a response, or the body of a response alone.

    Unknown fields are left out; a status that is not told is 200 where there is a response. Raises UsageError.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(f"no exchange at {path}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path}: not a recorded exchange: {type(data).__name__}, not an object")
    if "request" in data:
        values = _recorded(data, path)
    elif (body := next((one for name, one in _BODIES.items() if name in data), None)) is not None:
        values = {"request": {"method": body[0], "path": body[1]}, "status": 200, "seconds": 0.0, "response": data}
    else:
        raise UsageError(
            f"{path}: not a recorded exchange",
            hint='an object with "request" and "response" (or "text", or "error"), or the body of a response alone',
        )
    try:
        return Exchange.model_validate({"name": path.stem} | values)
    except ValidationError as error:
        raise UsageError(f"{path}: not a recorded exchange: {error}") from error


def _recorded(data: dict[str, Any], path: Path) -> dict[str, Any]:
    values = {name: value for name, value in data.items() if name in Exchange.model_fields}
    request = data["request"] if isinstance(data["request"], dict) else {}
    if not any(data.get(name) is not None for name in ("response", "text", "error", "status")):
        raise UsageError(f"{path}: a request without a response, a text, a status or an error")
    if isinstance(values.get("response"), str):
        # A stream, or a body that the recorder did not parse.
        values["text"] = values.pop("response")
    # A request without a path is the body itself.
    body = request.get("body") if "path" in request else request.get("body", request)
    values["request"] = {
        "method": request.get("method") or "POST",
        "path": request.get("path") or _path(body),
        "body": body,
    }
    answered = values.get("response") is not None or values.get("text") is not None
    values.setdefault("status", 200 if answered else None)
    values.setdefault("seconds", 0.0)
    return values


def _path(body: Any) -> str:
    if isinstance(body, dict) and "messages" not in body:
        if "prompt" in body:
            return "/v1/completions"
        if "sampling_params" in body or "text" in body:
            return "/generate"
    return "/v1/chat/completions"


def _files(places: Sequence[Path]) -> Iterator[Path]:
    for place in places:
        if not place.is_dir():
            yield place
        elif inside := sorted(place.rglob("*.json")):
            yield from inside
        else:
            raise UsageError(f"{place} holds no JSON file")
