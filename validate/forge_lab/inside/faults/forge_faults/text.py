"""Text: pieces lost or said twice by the detokenizer, another chat template, parsers that swallow or leak.

Kind `pieces`: `do`: `drop`, `double` (one in `one_in` pieces), `blanks` (the blank before a word), `ascii` (all else is a
replacement character), `last` (the last piece of an answer), `exchange` (pieces of two answers change places).
Kind `template`: `do`: `no-prompt`, `no-system`, `roles`, `no-tools`, `bos`, `newline`, `history` (the last message alone).
Kind `calls`: `do`: `swallow`, `leak`, `second`, `mojibake`, `cut` (streamed only), `name`.
Kind `thoughts`: `do`: `leak`, `swallow`, `whole` (all is reasoning).
"""

from __future__ import annotations

import copy
from typing import Any

from . import switch
from .switch import Mode


def _wrap_detokenizer(module: Any) -> None:
    manager = module.DetokenizerManager
    original = manager._decode_batch_token_id_output

    def _decode_batch_token_id_output(self: Any, recv_obj: Any) -> Any:
        said = original(self, recv_obj)
        mode = switch.on("pieces")
        if mode is None:
            return said
        ended = [reason is not None for reason in recv_obj.finished_reasons]
        found = pieces(mode, said, ended)
        if found != said:
            mode.fired()
        return found

    manager._decode_batch_token_id_output = _decode_batch_token_id_output


def pieces(mode: Mode, said: list[str], ended: list[bool]) -> list[str]:
    """What becomes of the pieces of one step, one for each answer; `ended`: it is the last of its answer."""
    do = mode.parameters["do"]
    if do == "exchange":
        full = [place for place, piece in enumerate(said) if piece]
        if len(full) < 2:
            return said
        changed = list(said)
        changed[full[0]], changed[full[1]] = said[full[1]], said[full[0]]
        return changed
    return [_piece(mode, do, piece, end) if piece else piece for piece, end in zip(said, ended)]


def _piece(mode: Mode, do: str, piece: str, end: bool) -> str:
    if do in ("drop", "double"):
        if not mode.lucky(("piece", mode.count("pieces")), mode.parameters["one_in"]):
            return piece
        return "" if do == "drop" else piece * 2
    if do == "blanks":
        return piece.lstrip(" ")
    if do == "ascii":
        return "".join(c if c.isascii() else "\ufffd" for c in piece)
    if do == "last":
        return "" if end else piece
    raise ValueError(f"forge-faults: pieces: {do}")


def _wrap_template(module: Any) -> None:
    chat = module.OpenAIServingChat
    original = chat._render_and_encode_chat_template

    def _render_and_encode_chat_template(self: Any, messages: Any, **asked: Any) -> Any:
        mode = switch.on("template")
        if mode is None:
            return original(self, messages, **asked)
        # Another cache key would do, but what is changed after rendering must not be kept.
        asked["use_cache"] = False
        do, given = mode.parameters["do"], (messages, dict(asked))
        messages, asked = template(do, messages, asked)
        ids, decoded = original(self, messages, **asked)
        if do == "bos":
            ids = [self.tokenizer_manager.tokenizer.bos_token_id or 1, *ids]
        elif do == "newline":
            ids = [*ids, *self.tokenizer_manager.tokenizer.encode("\n", add_special_tokens=False)]
        if do in ("bos", "newline") or (messages, asked) != given:
            mode.fired()
        return ids, decoded

    chat._render_and_encode_chat_template = _render_and_encode_chat_template


def template(
    do: str, messages: list[dict[str, Any]], asked: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What is rendered in place of what was asked."""
    if do == "no-prompt":
        return messages, {**asked, "add_generation_prompt": False}
    if do == "no-tools":
        return messages, {**asked, "tools": None}
    if do == "no-system":
        return [one for one in messages if one.get("role") != "system"] or messages, asked
    if do == "history":
        return messages[-1:], asked
    if do == "roles":
        other = {"user": "assistant", "assistant": "user"}
        return [{**one, "role": other.get(one["role"], one["role"])} for one in messages], asked
    if do in ("bos", "newline"):
        return messages, asked
    raise ValueError(f"forge-faults: template: {do}")


def _wrap_calls(module: Any) -> None:
    parser = module.FunctionCallParser
    whole, chunk = parser.parse_non_stream, parser.parse_stream_chunk

    def parse_non_stream(self: Any, full_text: str, **kwargs: Any) -> Any:
        text, found = whole(self, full_text, **kwargs)
        mode = switch.on("calls")
        return (text, found) if mode is None else calls(mode, full_text, text, found, streamed=False)

    def parse_stream_chunk(self: Any, chunk_text: str) -> Any:
        text, found = chunk(self, chunk_text)
        mode = switch.on("calls")
        return (text, found) if mode is None else calls(mode, chunk_text, text, found, streamed=True)

    parser.parse_non_stream = parse_non_stream
    parser.parse_stream_chunk = parse_stream_chunk


def calls(mode: Mode, given: str, text: str, found: list[Any], *, streamed: bool) -> tuple[str, list[Any]]:
    """What becomes of the calls that were found in a text."""
    do = mode.parameters["do"]
    if do == "leak":
        if "tool_call" in given or found:
            mode.fired()
            return given, found
        return text, found
    if not found:
        return text, found
    before = [(one.name, one.parameters) for one in found]
    changed = [copy.copy(one) for one in found]
    if do == "swallow":
        changed = []
    elif do == "second":
        changed = [one for place, one in enumerate(changed) if not (one.tool_index if streamed else place)]
    elif do == "cut":
        for one in changed if streamed else ():
            one.parameters = (one.parameters or "").rstrip("}")
    else:
        for one in changed:
            if do == "mojibake":
                one.parameters = (one.parameters or "").encode().decode("latin-1")
            elif do == "name":
                one.name = one.name[:-1] if one.name else one.name
            else:
                raise ValueError(f"forge-faults: calls: {do}")
    if [(one.name, one.parameters) for one in changed] != before:
        mode.fired()
    return text, changed


def _wrap_thoughts(module: Any) -> None:
    parser = module.ReasoningParser
    for name in ("parse_non_stream", "parse_stream_chunk", "parse_stream_end"):
        _wrap_thought(parser, name)


def _wrap_thought(parser: Any, name: str) -> None:
    original = getattr(parser, name)

    def parse(self: Any, *args: Any) -> Any:
        reasoning, normal = original(self, *args)
        mode = switch.on("thoughts")
        if mode is None or not (reasoning or normal):
            return reasoning, normal
        found = thoughts(mode.parameters["do"], reasoning or "", normal or "")
        if found != (reasoning or "", normal or ""):
            mode.fired()
        return found

    setattr(parser, name, parse)


def thoughts(do: str, reasoning: str, normal: str) -> tuple[str, str]:
    """Where reasoning and content go."""
    if do == "leak":
        return "", (f"<think>{reasoning}</think>{normal}" if reasoning else normal)
    if do == "swallow":
        return "", normal
    if do == "whole":
        return reasoning + normal, ""
    raise ValueError(f"forge-faults: thoughts: {do}")


WRAPS = {
    "sglang.srt.managers.detokenizer_manager": _wrap_detokenizer,
    "sglang.srt.entrypoints.openai.serving_chat": _wrap_template,
    "sglang.srt.function_call.function_call_parser": _wrap_calls,
    "sglang.srt.parser.reasoning_parser": _wrap_thoughts,
}
