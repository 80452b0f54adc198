"""Instructions that must be there: a kernel may hold code for the architecture and still not use what it is for."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from forge_build.manifest import CompileCheck
from forge_build.wheel_check import cubin
from forge_core.model import Finding


def count(path: Path, spec: CompileCheck, folder: Path) -> dict[str, int]:
    """How often each demanded pattern is in an object's machine code for the demanded architectures.

    One cubin at a time: the memory is that of the largest one's text. `folder` must be empty and is empty after it.
    Raises as `cubin.sass` does.
    """
    patterns = {demand.pattern: re.compile(demand.pattern) for demand in spec.instructions}
    counts: Counter[str] = Counter(dict.fromkeys(patterns, 0))
    for architecture in spec.demand:
        target = folder / architecture
        target.mkdir()
        for file in cubin.extracted(path, architecture, target):
            text = cubin.sass(file)
            for name, pattern in patterns.items():
                counts[name] += sum(1 for _ in pattern.finditer(text))
            file.unlink()
        shutil.rmtree(target)
    return dict(counts)


def check(wheel: str, counts: Mapping[str, Mapping[str, int]], spec: CompileCheck) -> Iterator[Finding]:
    """Every demand is met by each object it is for; one that is for no object there is not met."""
    for demand in spec.instructions:
        concerned = sorted(member for member in counts if fnmatch(member, demand.objects))
        architectures = ", ".join(spec.demand)
        if not concerned:
            message = f"no object {demand.objects!r} with code for {architectures}, so no {demand.pattern} in it"
            yield Finding(kind="instruction-missing", where=wheel, message=message)
        for member in concerned:
            found = counts[member].get(demand.pattern, 0)
            if found < demand.at_least:
                message = f"{found} instructions {demand.pattern} for {architectures}, demanded: {demand.at_least}"
                yield Finding(kind="instruction-missing", where=member, message=message)


def wanted(member: str, architectures: Sequence[str], spec: CompileCheck) -> bool:
    """Whether a demand is for this object, and there is code to look into."""
    has_code = any(a in architectures for a in spec.demand)
    return has_code and any(fnmatch(member, demand.objects) for demand in spec.instructions)
