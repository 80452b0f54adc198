"""Promotion: the release tag moves to the digest that passed, and to nothing else; every move is read back."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from forge_core import registry
from forge_core.errors import IntegrityError, Refused, UsageError
from forge_core.files import write_text
from forge_core.model import Digest, Frozen, ImageRef, Sha256
from forge_validate import bootstrap
from forge_validate.policy import Policy
from forge_validate.policy import Promotion as Tags
from forge_validate.receipt import Receipt, Subject
from forge_validate.verdict import unaccepted

FILE_NAME = "promotion.json"


class Promotion(Frozen):
    """One move of a release tag."""

    schema_version: Literal[1] = 1
    moved: datetime
    receipt: Sha256
    """Seal of the receipt that allowed it."""
    image: ImageRef
    candidate_tag: str
    release_tag: str
    previous: Digest | None
    """What the release tag named before; none: there was no such tag."""

    @property
    def reference(self) -> str:
        """What a user pulls."""
        return f"{self.image.repository}:{self.release_tag}"


def demand_allowed(receipt: Receipt, policy: Policy) -> tuple[ImageRef, Tags]:
    """The image to promote and the tags to move; raises Refused (1) for anything but a pass of a recorded image
    without deviations the policy does not name, under a policy that names tags.

    Raises UsageError (2) for a registry the policy or the kind of build forbids, and for another policy than the
    receipt was judged under.
    """
    if receipt.target != "recorded" or not isinstance(receipt.subject, Subject):
        raise Refused(
            f"not promoted: {receipt.subject.name} has no build record of ours",
            hint="what was not built by `nox -s build` is judged, never promoted",
        )
    if policy.promotion is None:
        raise Refused(f"not promoted: the policy {policy.profile} names no tags", hint="`promotion` in the policy")
    if receipt.subject.policy != policy.content_sha256():
        raise UsageError("the policy is not the one the receipt was judged under", hint="validate again")
    if receipt.verdict.outcome != "passed":
        raise Refused(f"not promoted: {receipt.verdict.cause}")
    if faults := [d for d in receipt.deviations if d.kind == "injected-fault"]:
        raise Refused(f"not promoted: the server was made wrong on purpose: {faults[0].subject}: {faults[0].detail}")
    if open_ones := unaccepted(receipt.deviations, policy):
        raise Refused(
            f"not promoted: {len(open_ones)} deviation(s) that the policy does not accept",
            details=tuple(f"{d.kind}: {d.subject}: {d.detail}" for d in open_ones),
            hint="remove the cause, or name it with a reason in `accepts` of the policy",
        )
    image = receipt.subject.image
    loopback_only = receipt.kind == "rehearsal" or policy.promotion.registries == "loopback"
    if loopback_only and not registry.is_loopback(image.repository):
        raise UsageError(
            f"a {receipt.kind} is promoted on a loopback registry only, not on {image.registry}",
            hint="build with staging on this machine, or validate with --no-promote",
        )
    return image, policy.promotion


def promote(receipt: Receipt, policy: Policy, *, log: Path, record: Path) -> Promotion:
    """Move the candidate tag, then the release tag, by digest; each is read back. Writes `record` last, and beside it
    the note that a bootstrap rule is spent.

    Raises as `demand_allowed` and `bootstrap.demand_unspent`, EnvironmentFailure (3) when the registry does not
    answer, IntegrityError (5) when a tag names something else afterwards.
    """
    image, tags = demand_allowed(receipt, policy)
    bootstrap.demand_unspent(receipt, policy, record.parent)
    previous = registry.digest_of(image.repository, tags.release_tag)
    for tag in (tags.candidate_tag, tags.release_tag):
        registry.tag(image, tag, log)
        if (found := registry.digest_of(image.repository, tag)) != image.digest:
            raise IntegrityError(f"{image.repository}:{tag} names {found} after it was moved to {image.digest}")
    moved = Promotion(
        moved=datetime.now(UTC),
        receipt=receipt.sha256,
        image=image,
        candidate_tag=tags.candidate_tag,
        release_tag=tags.release_tag,
        previous=previous,
    )
    bootstrap.spend(receipt, policy, record.parent)
    write_text(record, json.dumps(moved.model_dump(mode="json"), indent=2) + "\n")
    return moved
