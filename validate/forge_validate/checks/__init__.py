"""Checks: pure functions from the evidence of one case to a result that explains itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from forge_validate.checks import finite, known, same, server, template, tokens, tools
from forge_validate.checks.result import CheckResult, Evidence

Check = Callable[[Evidence], CheckResult]

CHECKS: Mapping[str, Check] = {
    "served-model": server.served_model,
    "listed": server.listed,
    "model-info": server.model_info,
    "flags": server.flags,
    "token-ids": template.token_ids,
    "prompt-tokens": template.prompt_tokens,
    "tool-call": tools.tool_call,
    "refused": server.unknown_model,
    "text": tokens.text,
    "known": known.known,
    "thinking": known.thinking,
    "finite": finite.finite,
    "same": same.same,
}
"""What a suite may name."""

__all__ = ["CHECKS", "Check", "CheckResult", "Evidence"]
