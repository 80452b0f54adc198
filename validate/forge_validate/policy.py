"""Policy: what a verdict demands, with which thresholds, and where a tag may move."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from forge_core.model import Digest, Frozen
from forge_validate import data

Tag = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$")]


class Threshold(Frozen):
    """A number and why it is that number."""

    value: float
    reason: Annotated[str, StringConstraints(min_length=15)]


class Text(Frozen):
    """Thresholds of the garbage detector; every text a model says is held to them."""

    repeat_times: Threshold
    """A unit said at least this often in a row is a repetition."""
    repeat_share: Threshold
    """Largest share of a text that one repetition may be."""
    repeat_length: Threshold
    """Longest repetition allowed that has `repeat_anywhere` times or more, in characters, white space not counted."""
    repeat_anywhere: Threshold
    """Fewer times than this are a refrain, however long."""
    data_times: Threshold
    """`repeat_times` for numbers, literals, cells of a table, and for tokens."""
    data_length: Threshold
    """Longest repetition of those that has `data_times` or more, wherever it stands."""
    rule_length: Threshold
    """Longest line of separators, in characters."""
    blank_length: Threshold
    """Longest run of white space."""
    distinct_window: Threshold
    """Letters per window in which distinct letters are counted."""
    distinct_ratio: Threshold
    """Smallest share of distinct letters in any full window."""
    ngram_window: Threshold
    """Words per window in which repeated n-grams of three are counted."""
    ngram_share: Threshold
    """Largest share of repeated n-grams in any full window of flowing words."""
    strange_characters: Threshold
    """Control, private, unassigned and replacement characters allowed, and format characters out of place."""
    scripts: Threshold
    """Writing systems that may change freely from word to word."""
    script_window: Threshold
    """Words per window in which such changes are counted."""
    script_changes: Threshold
    """Changes per gap between words that more than `scripts` writing systems may have."""
    mixed_words: Threshold
    """Changes of the alphabet inside a word allowed in one window."""


class Optional(Frozen):
    """Checks whose outcome the verdict does not ask for."""

    check: str
    """Shell pattern over `case/check`."""
    reason: Annotated[str, StringConstraints(min_length=15)]


class WaivedCheck(Frozen):
    """Checks that may stay unmeasured, for example because a server does not offer what they need; a fail stays one."""

    check: str
    """Shell pattern over `case/check`."""
    reason: Annotated[str, StringConstraints(min_length=15)]


class Accepted(Frozen):
    """A deviation that promotion accepts."""

    kind: str
    subject: str = "*"
    """Shell pattern over the deviation's subject."""
    reason: Annotated[str, StringConstraints(min_length=15)]


Kernel = Literal[
    "flashinfer.fp4_quantize",
    "flashinfer.mm_fp4.cutlass",
    "flashinfer.mm_fp4.cudnn",
    "flashinfer.cutlass_fused_moe",
    "sgl_kernel.scaled_fp4_quant",
    "sgl_kernel.cutlass_scaled_fp4_mm",
    "sgl_kernel.scaled_fp4_experts_quant",
    "sgl_kernel.cutlass_fp4_group_mm",
]
"""What the numeric test can ask, package first; `mm_fp4` by its backend."""


class Numeric(Frozen):
    """The image's FP4 kernels against exact arithmetic, before the weights are loaded (docs/numeric.md)."""

    kernels: Annotated[tuple[Kernel, ...], Field(min_length=1)]
    """Each must pass; one that the image lacks does not."""
    deadline: Annotated[float, Field(gt=0)]
    """Seconds for all of them."""
    reason: Annotated[str, StringConstraints(min_length=15)]
    """Why these kernels and this deadline."""


class Promotion(Frozen):
    """Which tags move on a pass."""

    candidate_tag: Tag
    """Moves first, and is read back, before the release tag is touched."""
    release_tag: Tag
    registries: Literal["loopback", "any"]


class Bootstrap(Frozen):
    """The one subject that may do without a golden file, because there is no trusted run to record one from yet.

    It excuses checks that are unmeasured for want of a golden, never one that failed, and not after a promotion under it.
    """

    image: Digest
    """Which image; any other is held to a golden."""
    model: str
    """Which model, as the record names it."""
    reason: Annotated[str, StringConstraints(min_length=15)]
    """Why there is no trusted run."""
    approved_by: Annotated[str, StringConstraints(min_length=3)]
    """Who answers for it: a role, or the number of a decision, never a person's name."""
    once: Literal[True]
    """Written out, so that whoever adds the rule has read it."""


class Policy(Frozen):
    """What one profile demands."""

    schema_version: Literal[1] = Field(alias="schema")
    profile: str
    suite: str
    optional: tuple[Optional, ...] = ()
    """All other checks are required."""
    waived: tuple[WaivedCheck, ...] = ()
    """A verdict that needed one passes, says so, and is a deviation (`waived-check`)."""
    text: Text
    numeric: Numeric | None = None
    """None: no kernel is asked."""
    accepts: tuple[Accepted, ...] = ()
    promotion: Promotion | None = None
    """None: nothing is ever promoted under this policy."""
    bootstrap: Bootstrap | None = None
    """None: every golden check needs a golden file."""

    def requires(self, check: str) -> bool:
        """Whether a verdict fails without a pass of this `case/check`."""
        return not any(fnmatchcase(check, some.check) for some in self.optional)

    def waiver(self, check: str) -> WaivedCheck | None:
        """What lets this `case/check` stay unmeasured; none: nothing does."""
        return next((some for some in self.waived if fnmatchcase(check, some.check)), None)


def load(profile: str) -> Policy:
    """The policy of a profile; raises UsageError."""
    return data.load("policies", profile, Policy)
