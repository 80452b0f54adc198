"""Cases for quantising: `(x, global scale) -> (packed codes, swizzled scales)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .bounds import APPROXIMATE, stray_codes
from .cases import AMBIGUOUS, DIFFERENT, STRAY, Case, Unmeasured, random
from .formats import BLOCK, Quantised, Tensor, global_scale, unpack, unswizzle
from .kernels import Groups

Quantise = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
QuantiseGroups = Callable[[Tensor, Tensor, Groups], tuple[Tensor, Tensor]]

_SHAPES = ((1, 64), (3, 128), (7, 576), (33, 192), (128, 1024), (129, 512), (4096, 512))
_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_COUNTS = [1, 0, 3, 7, 128, 130, 0, 2, 5, 64, 1, 31, 32, 33, 0, 9]


def cases(kernel: Quantise) -> Iterator[Case]:
    """Random shapes, then what rounding, range and batching can get wrong."""
    for rows, k in _SHAPES:
        yield _case(kernel, f"random {rows}x{k}", random, rows, k)
    yield _case(kernel, "random 33x192, float16", _half, 33, 192)
    yield _case(kernel, "ties, to even", _ties, 7, 128, slack=0.0, scale=1.0)
    yield _case(kernel, "rows and blocks of zeros", _zeros, 9, 128)
    yield _case(kernel, "large magnitudes", _large, 16, 256)
    yield _case(kernel, "small magnitudes", _small, 16, 256)
    # From the largest scale down to below the smallest subnormal one.
    yield _case(kernel, "magnitudes from 2^-20 to 1", _spread, 42, 256)
    yield _case(kernel, "saturation", _plain, 16, 256, larger=8.0)
    yield Case("a row in a batch as alone", (128, 512), DIFFERENT, lambda device: _alone(kernel, device))


def group_cases(kernel: QuantiseGroups) -> Iterator[Case]:
    """Rows sorted by expert, experts without rows among them, each expert with a global scale of its own."""
    for k in (128, 576):
        shape = (sum(_COUNTS), k)
        yield Case(f"16 experts, k {k}", shape, STRAY, lambda device, k=k: _groups(kernel, k, device))  # type: ignore[misc]


def _case(
    kernel: Quantise,
    name: str,
    values: Callable[..., Tensor],
    rows: int,
    k: int,
    *,
    slack: float = APPROXIMATE,
    scale: float | None = None,
    larger: float = 1.0,
) -> Case:
    def measure(device: str) -> float:
        x = values(name, rows, k).to(device)
        factor = global_scale(x) * larger if scale is None else torch.tensor([scale], device=device)
        return _stray(x, factor, found(kernel, x, factor), slack)

    return Case(name, (rows, k), STRAY, measure)


def found(kernel: Quantise, x: Tensor, factor: Tensor) -> Quantised:
    """What a kernel makes of a matrix, read from its packing and layout."""
    packed, scales = kernel(x, factor)
    return Quantised(unpack(packed), unswizzle(scales.flatten(), x.shape[0], x.shape[1] // BLOCK).long())


def _stray(x: Tensor, factor: Tensor, quantised: Quantised, slack: float = APPROXIMATE) -> float:
    count, ambiguous = stray_codes(x, factor, quantised, slack)
    if ambiguous > AMBIGUOUS:
        raise Unmeasured(f"{ambiguous:.1%} of the codes have two right values: the inputs prove too little")
    return float(count)


def _half(name: str, rows: int, k: int) -> Tensor:
    return random(name, rows, k, dtype=torch.float16)


def _plain(_: str, rows: int, k: int) -> Tensor:
    return random("plain", rows, k)


def _ties(_: str, rows: int, k: int) -> Tensor:
    """Every tie of both signs in every block; with a global scale of 1 a block's scale is the row's power of two."""
    block = torch.tensor([6.0, *_TIES, *(-tie for tie in _TIES), 0.5])
    powers = 2.0 ** (torch.arange(rows) - rows // 2)
    return (block.repeat(k // BLOCK) * powers[:, None]).bfloat16()


def _zeros(name: str, rows: int, k: int) -> Tensor:
    x = random(name, rows, k)
    x[1::3] = 0
    x[2, :BLOCK] = 0
    return x


def _large(name: str, rows: int, k: int) -> Tensor:
    return random(name, rows, k) * 2.0**60


def _small(name: str, rows: int, k: int) -> Tensor:
    return random(name, rows, k) * 2.0**-60


def _spread(name: str, rows: int, k: int) -> Tensor:
    return random(name, rows, k) * (2.0 ** -(torch.arange(rows) / 2).floor())[:, None].bfloat16()


def _alone(kernel: Quantise, device: str) -> float:
    x = random("batch", 128, 512, device=device)
    factor = global_scale(x)
    whole = found(kernel, x, factor)
    different = 0
    for row in (0, 1, 31, 32, 127):
        one = found(kernel, x[row : row + 1].contiguous(), factor)
        different += int((one.codes[0] != whole.codes[row]).sum() + (one.scales[0] != whole.scales[row]).sum())
    return float(different)


def _groups(kernel: QuantiseGroups, k: int, device: str) -> float:
    groups = Groups.of(_COUNTS, device)
    x = random("groups", sum(_COUNTS), k, device=device)
    parts = x.split(_COUNTS)
    factors = torch.stack([global_scale(part)[0] if len(part) else torch.ones((), device=device) for part in parts])
    packed, scales = kernel(x, factors, groups)
    codes = unpack(packed).split(_COUNTS)
    stray = 0.0
    for number, part in enumerate(parts):
        if len(part):
            region = scales[int(groups.scales[number]) : int(groups.scales[number + 1])]
            read = unswizzle(region.flatten(), len(part), k // BLOCK).long()
            stray += _stray(part, factors[number], Quantised(codes[number], read))
    return stray
