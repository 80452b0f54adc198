"""What the script in the container tells: one measured value for each case of each kernel."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationError

from forge_core.model import Frozen


class Measured(Frozen):
    """One case of one kernel."""

    kernel: str
    case: str
    shape: tuple[int, ...]
    metric: str
    """What `value` and `bound` are of."""
    value: float | None
    """None: there is no number, and `reason` says why."""
    bound: float
    """The largest value that a right kernel gives."""
    outcome: Literal["passed", "failed", "unmeasured"]
    """The script's own view; judging rests on `value` and `bound`."""
    reason: str | None
    seconds: float


class Told(Frozen):
    """The GPU, as the script sees it."""

    name: str
    capability: str
    driver: str


class Document(Frozen):
    """The script's answer."""

    schema_version: Literal[1] = Field(alias="schema")
    device: Literal["cuda", "cpu"]
    """`cpu`: with stand-ins for the kernels, which proves nothing about an image."""
    gpu: Told | None
    absent: str | None
    """Why there is no GPU."""
    versions: dict[str, str]
    """Of Python, CUDA and the packages that hold kernels, as the container has them."""
    seed: int
    cases: tuple[Measured, ...]
    seconds: float


def parse(text: str) -> Document:
    """Read a document; raises ValueError that says what is wrong with it."""
    try:
        return Document.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "(top level)"
        raise ValueError(f"{place}: {first['msg']}") from error
