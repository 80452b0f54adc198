"""The bootstrap rule: one named subject without a golden file, until it was promoted once. Whether it holds, and that it is spent.

It is spent when the release tag names the image, when this checkout has the note of such a promotion, or when there is a golden
file: then there is a trusted run, and every later image is held to it.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from forge_core import registry
from forge_core.errors import IntegrityError, Refused
from forge_core.files import write_text
from forge_core.model import Frozen, ImageRef, Sha256
from forge_validate.policy import Bootstrap, Policy
from forge_validate.receipt import Receipt, Subject

FILE_NAME = "bootstrap.json"


class Spent(Frozen):
    """The one promotion under a bootstrap rule."""

    schema_version: Literal[1] = 1
    moved: datetime
    image: ImageRef
    model: str
    receipt: Sha256
    """Seal of the receipt that was promoted."""
    reason: str
    approved_by: str


def holding(rules: Policy, image: ImageRef, model: str, *, golden: bool, folder: Path) -> Bootstrap | None:
    """The policy's rule, if it is about this image and model and not spent; `golden`: there is a golden file.

    Asks the registry for the release tag where all else allows it. Raises as `registry.digest_of`, and IntegrityError (5)
    for a note in `folder` that cannot be read.
    """
    rule = rules.bootstrap
    if rule is None or golden or (rule.image, rule.model) != (image.digest, model):
        return None
    if (spent := read(folder)) is not None and spent.model == model:
        return None
    tags = rules.promotion
    if tags is not None and registry.digest_of(image.repository, tags.release_tag) == image.digest:
        return None
    return rule


def demand_unspent(receipt: Receipt, rules: Policy, folder: Path) -> None:
    """Raise Refused (1) for a receipt that rests on a rule which another promotion has spent, or on one of another subject."""
    if not _rests(receipt):
        return
    rule, subject = rules.bootstrap, receipt.subject
    if (
        rule is None
        or not isinstance(subject, Subject)
        or (rule.image, rule.model) != (subject.image.digest, subject.model)
    ):
        raise Refused("not promoted: the policy's bootstrap rule is about another image or model")
    spent = read(folder)
    if spent is not None and spent.model == subject.model and spent.receipt != receipt.sha256:
        raise Refused(
            f"not promoted: the bootstrap rule was spent on {spent.image} at {spent.moved:%Y-%m-%d %H:%M}",
            hint="record a golden from the promoted image: `python -m forge_validate golden`",
        )


def spend(receipt: Receipt, rules: Policy, folder: Path) -> None:
    """Note that a receipt was promoted under the rule; nothing for one that did not need it."""
    rule, subject = rules.bootstrap, receipt.subject
    if not _rests(receipt) or rule is None or not isinstance(subject, Subject):
        return
    note = Spent(
        moved=datetime.now(UTC),
        image=subject.image,
        model=subject.model,
        receipt=receipt.sha256,
        reason=rule.reason,
        approved_by=rule.approved_by,
    )
    write_text(folder / FILE_NAME, json.dumps(note.model_dump(mode="json"), indent=2) + "\n")


def read(folder: Path) -> Spent | None:
    """The note of a promotion under the rule; none without one. Raises IntegrityError (5) for what is no such note."""
    path = folder / FILE_NAME
    try:
        return Spent.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValidationError, UnicodeDecodeError) as error:
        raise IntegrityError(f"{path}: not the note of a promotion: {error}") from error


def _rests(receipt: Receipt) -> bool:
    return any(deviation.kind == "bootstrap" for deviation in receipt.deviations)
