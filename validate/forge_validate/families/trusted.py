"""Whether a golden file is about this model and this tokenizer at all: another one is no matter of numbers."""

from __future__ import annotations

from collections.abc import Mapping

from forge_core.model import ModelRef
from forge_validate.checks.result import CheckResult
from forge_validate.exchange import Exchange
from forge_validate.families.family import result
from forge_validate.golden.document import Golden, Prompt

TOKENIZER = "tokenizer.json"


def other_files(golden: Golden, folder: ModelRef | None) -> str | None:
    """Why a model folder is not the golden's; none if it is, or is not at hand."""
    if folder is None:
        return None
    then = golden.subject
    now = next((one.sha256 for one in folder.files if one.path == TOKENIZER), None)
    if None not in (then.tokenizer, now) and now != then.tokenizer:
        return f"{TOKENIZER} is {str(now)[:16]}, the golden's was {str(then.tokenizer)[:16]}"
    if then.revision is not None and folder.revision != then.revision:
        return f"the model is of revision {folder.revision[:16]}, the golden of {then.revision[:16]}"
    return None


def other_ids(prompt: Prompt, told: Exchange) -> str | None:
    """Why a server's tokenizer is not the golden's; none if it is, or does not tell."""
    ids, expected = _ids(told), list(prompt.ids[: prompt.prompt])
    if ids is None or ids == expected:
        return None
    differ = (at for at, (one, other) in enumerate(zip(ids, expected, strict=False)) if one != other)
    place = next(differ, min(len(ids), len(expected)))
    return f"the server makes {len(ids)} tokens of a text of {len(expected)}, others from number {place} on"


def subject(golden: Golden, folder: ModelRef | None, exchanges: Mapping[str, Exchange]) -> CheckResult:
    """The check: what can be looked at must be the golden's, and something must be."""
    check = "golden/subject"
    if (why := other_files(golden, folder)) is not None:
        return result(check, "failed", f"the golden file is of another model: {why}", value="files")
    shown = ["the model's files are the golden's"] if folder is not None and golden.subject.revision else []
    for prompt in golden.prompts:
        told = exchanges.get(f"golden/tokenize/{prompt.bucket}")
        # Only the first prompt of a bucket is asked.
        if told is None or told.request.body.get("prompt") != prompt.text:
            continue
        if (why := other_ids(prompt, told)) is not None:
            return result(check, "failed", f"the golden file is of another tokenizer: {why}", value="tokenizer")
        if _ids(told) is not None:
            shown.append(f"a text of {prompt.prompt} tokens has the golden's")
    if not shown:
        return result(check, "unmeasured", "neither the model's files nor the server's tokenizer can be looked at")
    return result(check, "passed", "; ".join(shown), value=golden.subject.model)


def _ids(told: Exchange) -> list[int] | None:
    body = told.response if told.status == 200 else None
    found = body.get("tokens") if isinstance(body, dict) else None
    return found if isinstance(found, list) else None
