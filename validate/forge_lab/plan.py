"""Plans: which trials are to be made. A plan is data; the machine that walks it knows no plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from forge_core.model import Frozen
from forge_lab.mutants import Mutant, mutants

SUITE = "cpu-power"
"""The suite that is asked unless another is named."""
POLICY = "power"
RARE = (16, 64, 256)
"""One corrupted request in so many."""

Style = Literal["cold", "warm", "reversed"]
"""How a clean run differs: from an empty prefix cache, with what the run before left in it, the families in reverse order."""
STYLES: tuple[Style, ...] = ("cold", "warm", "reversed")
Dtype = Literal["bfloat16", "float32"]
DTYPES: tuple[Dtype, ...] = ("bfloat16", "float32")
Checks = Literal["first", "all"]


class Trial(Frozen):
    """One suite asked of one server."""

    plan: Literal["power", "clean", "rare"]
    name: str
    """Of one plan only once."""
    mutant: Mutant | None = None
    """None: the server as it is."""
    suite: str = SUITE
    policy: str = POLICY
    checks: Checks = "all"
    """Asked to the end, or until the first required check fails."""
    seed: int | None = None
    """Sent with every question; none: the suite's own."""
    style: Style = "cold"
    dtype: Dtype = "bfloat16"


def power(
    found: Sequence[Mutant] | None = None, *, checks: Checks = "all", sample: bool = False, suite: str = SUITE
) -> tuple[Trial, ...]:
    """Every mutant once, or the sample: the same mutants each time, in the same order."""
    chosen = mutants() if found is None else found
    return tuple(
        Trial(plan="power", name=mutant.name, mutant=mutant, checks=checks, suite=suite)
        for mutant in chosen
        if mutant.sample or not sample
    )


def clean(runs: int, *, suite: str = SUITE, first: int = 0) -> tuple[Trial, ...]:
    """Runs of a healthy server: seeds differ, styles take turns, and the halves differ in the number format.

    One half after the other, since a number format is a server of its own.
    """
    half = (runs + 1) // 2
    found = []
    for number in range(runs):
        dtype = DTYPES[0] if number < half else DTYPES[1]
        style, seed = STYLES[number % len(STYLES)], 1000 + first + number
        name = f"{dtype}-{style}-{seed}"
        found.append(Trial(plan="clean", name=name, seed=seed, style=style, dtype=dtype, suite=suite))
    return tuple(found)


def rare(runs: int, *, suite: str = SUITE) -> tuple[Trial, ...]:
    """Corruption in one of so many requests, `runs` times each with another choice of the requests."""
    found = []
    known = {mutant.name: mutant for mutant in mutants()}
    for one_in in RARE:
        mutant = known[f"rare-{one_in}"]
        for number in range(runs):
            other = mutant.model_copy(update={"seed": 100 + number})
            name = f"{mutant.name}-{number}"
            found.append(Trial(plan="rare", name=name, mutant=other, suite=suite))
    return tuple(found)
