"""What units need: peak memory and CPU time by source name, architecture and compiler.

Committed in `sizes.yaml` for units that were measured; what this machine has measured itself lies in the store and counts more.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from forge_build.manifest import read_yaml
from forge_core.model import Frozen
from forge_core.store import Store

_KIND, _KEY = "unit-sizes", "learned"
_LEAST_CPU_S = 0.2
"""What took less was not compiled but came out of a compiler cache: it says nothing about the compiler."""


class Size(Frozen):
    """One unit, as it was measured."""

    name: str
    """Folder and file, for example `gemm/fp8_gemm_kernel.cu`; a linked thing has no folder."""
    architecture: str
    """`sm_120a`, several joined by `+`; empty where there is none."""
    compiler: str
    """Name and version, for example `nvcc 13.0.88`."""
    peak: Annotated[int, Field(gt=0)]
    """Bytes of resident memory that all of its processes had together at most."""
    cpu: Annotated[float, Field(ge=0)]
    """CPU seconds."""

    @property
    def key(self) -> str:
        """As the scheduler looks it up."""
        return f"{self.name}|{self.architecture}|{self.compiler}"


@cache
def committed() -> tuple[Size, ...]:
    """Those of `sizes.yaml`."""
    data = read_yaml(Path(__file__).with_name("sizes.yaml"))
    return TypeAdapter(tuple[Size, ...]).validate_python(data)


def learned(store: Store) -> tuple[Size, ...]:
    """Those that builds with this store have measured; what cannot be read is as good as not there."""
    found = []
    for facts in (store.note_get(_KIND, _KEY) or {}).get("units", []):
        try:
            found.append(Size.model_validate(facts))
        except ValidationError:
            continue
    return tuple(found)


def known(store: Store) -> dict[str, int]:
    """Key -> peak (bytes) of every unit that was ever measured; this machine's word counts more."""
    return {size.key: size.peak for size in (*committed(), *learned(store))}


def learn(store: Store, measured: Iterable[Size]) -> None:
    """Add what was measured. A peak that rises counts at once, one that falls by half."""
    fresh = [size for size in measured if size.cpu >= _LEAST_CPU_S]
    if not fresh:
        return
    with store.lock(_KIND):
        merged = {size.key: size for size in learned(store)}
        for size in fresh:
            before = merged.get(size.key, size)
            peak = max(size.peak, (before.peak + size.peak) // 2)
            merged[size.key] = size.model_copy(update={"peak": peak})
        rows = [merged[key].model_dump(mode="json") for key in sorted(merged)]
        store.note_put(_KIND, _KEY, {"units": rows})
