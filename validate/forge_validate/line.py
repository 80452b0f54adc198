"""What goes through the line: the user's wish, a target that was reached and asked, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forge_core.errors import ExitCode
from forge_validate.examine import Tried
from forge_validate.judge import Bench
from forge_validate.receipt import Receipt, ServerSubject, Subject
from forge_validate.target import Target

if TYPE_CHECKING:
    from forge_validate.promote import Promotion


@dataclass(frozen=True)
class Wish:
    """What the user asks for; without `image` and `url` it is what the build record of the profile names."""

    profile: str
    model: Path | None = None
    record: Path | None = None
    image: str | None = None
    """An image by tag or digest."""
    url: str | None = None
    """A server that runs already."""
    served: str | None = None
    """What that server calls the model; needed where it serves several."""
    api_key_env: str | None = None
    """The variable that holds that server's API key."""
    suite: str | None = None
    """Instead of the policy's."""
    answers: str | None = None
    """Instead of those of the serving's model."""
    no_promote: bool = False
    keep: bool = False
    offline: bool = False


@dataclass(frozen=True)
class Walked:
    """A target that was reached, asked and judged."""

    target: Target
    bench: Bench
    tried: Tried
    subject: Subject | ServerSubject
    arguments: tuple[str, ...] = ()
    """Its command line; empty: it ran already."""
    engine: str | None = None
    gpus: tuple[str, ...] = ()
    pull: float = 0.0
    """Seconds."""


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    receipt: Receipt
    promotion: Promotion | None
    exit_code: ExitCode
