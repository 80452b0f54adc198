"""How far a right kernel may be from exact arithmetic. Derived in docs/numeric.md; nothing here was fitted to a kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .formats import (
    BLOCK,
    E2M1_MAX,
    Quantised,
    Tensor,
    e2m1_codes,
    e2m1_values,
    e4m3_table,
    e4m3_values,
    nearest,
    scaled,
)

APPROXIMATE = 2.0**-21
"""Relative error of a scaled value: two `rcp.approx.ftz.f32` (1 ulp each) and two to three roundings, doubled."""
ACCUMULATION = 2.0**-13
"""Of the sum of magnitudes: tensor cores align products and cut them off; 13 fraction bits is the least reported."""
ACTIVATION = 2.0**-10
"""Relative error of an approximate SiLU (`tanh.approx.f32` has 2^-11)."""
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Unit roundoff of an output format."""
SILU_SLOPE = 1.1
"""Largest slope of SiLU, rounded up from 1.0998."""
SIGMAS = 6.0


class Interval(NamedTuple):
    """A value, and how far from it a right kernel's may be; both float64."""

    middle: Tensor
    radius: Tensor


def stray_codes(values: Tensor, scale: Tensor, found: Quantised, slack: float = APPROXIMATE) -> tuple[int, float]:
    """Count codes and scales that no right kernel gives; and the share of codes for which there are two right ones.

    The block scale must be one of those within `slack` of the exact one, each code one of those within `slack` of the
    value in units of the scale that was found. +0 and -0 are one. Under a zero scale any code means zero, but
    a block of zeros must have zeros.
    """
    exact, factor = values.double(), scale.double()
    ideal = exact.unflatten(-1, (-1, BLOCK)).abs().amax(-1) / E2M1_MAX * factor
    table = e4m3_table(exact.device)
    low, high = nearest(ideal * (1 - slack), table), nearest(ideal * (1 + slack), table)
    stray = ((found.scales < low) | (found.scales > high)).sum()
    target = scaled(exact, found.scales, factor)
    least, most = _rank(e2m1_codes(target - target.abs() * slack)), _rank(e2m1_codes(target + target.abs() * slack))
    rank = _rank(found.codes)
    free = ((found.scales == 0) & (ideal != 0)).repeat_interleave(BLOCK, dim=-1)
    stray += (((rank < least) | (rank > most)) & ~free).sum()
    return int(stray), float((least != most).double().mean())


def _rank(codes: Tensor) -> Tensor:
    """Codes in the order of their values."""
    return torch.where(codes >= 8, -(codes & 7), codes)


def product(a: Tensor, b: Tensor, alpha: Tensor) -> Interval:
    """`alpha a b^T` before it is rounded to an output format; a, b float64 `[m, k]`, `[n, k]`."""
    factor = alpha.double()
    return Interval(factor * (a @ b.T), ACCUMULATION * factor.abs() * (a.abs() @ b.abs().T))


def rounded(exact: Interval, dtype: torch.dtype) -> Interval:
    """The same after a rounding to `dtype`, to nearest."""
    unit = UNIT[dtype]
    smallest = unit * torch.finfo(dtype).tiny
    grown = exact.radius + unit * (exact.middle.abs() + exact.radius)
    # An exact zero stays one; anything else may fall among the subnormals.
    return Interval(exact.middle, torch.where(grown > 0, grown + smallest, grown))


def requantised(values: Interval, scale: Tensor) -> Interval:
    """What quantising makes of values that are known up to a radius, dequantised again.

    Every scale that the block's largest magnitude allows is tried, and with each the codes at both ends.
    """
    factor, table = scale.double(), e4m3_table(values.middle.device)
    magnitude = values.middle.abs().unflatten(-1, (-1, BLOCK))
    spread = values.radius.unflatten(-1, (-1, BLOCK))
    largest = (magnitude + spread).amax(-1) * (1 + APPROXIMATE)
    least = (magnitude - spread).clamp(min=0).amax(-1) * (1 - APPROXIMATE)
    first, last = (nearest(amax / E2M1_MAX * factor, table) for amax in (least, largest))
    low = torch.full_like(values.middle, torch.inf)
    high = -low
    for step in range(int((last - first).max()) + 1):
        scales = torch.minimum(first + step, last)
        unit = (e4m3_values(scales) / factor).repeat_interleave(BLOCK, dim=-1)
        for end in (-1, 1):
            target = scaled(values.middle + end * values.radius, scales, factor)
            code = e2m1_codes(target + end * target.abs() * APPROXIMATE)
            low, high = torch.minimum(low, e2m1_values(code) * unit), torch.maximum(high, e2m1_values(code) * unit)
    return Interval((low + high) / 2, (high - low) / 2)


def swiglu(up: Interval, gate: Interval) -> Interval:
    """`silu(gate) * up` before it is rounded."""
    silu = torch.nn.functional.silu(gate.middle)
    radius = SILU_SLOPE * gate.radius * (up.middle.abs() + up.radius) + silu.abs() * up.radius
    exact = silu * up.middle
    return Interval(exact, radius + ACTIVATION * exact.abs())


def halves(both: Interval) -> tuple[Interval, Interval]:
    """Up and gate, side by side in the columns of one product."""
    half = both.middle.shape[1] // 2
    up, gate = (Interval(both.middle[:, part], both.radius[:, part]) for part in (slice(half), slice(half, None)))
    return up, gate


class Output(NamedTuple):
    """What one expert gives, and what its errors are made of."""

    out: Interval
    """Rounded to bfloat16."""
    fed: Interval
    """What the second product was fed with: quantised, and dequantised again."""
    fed_bias: Tensor
    """Of the error of `fed` before it was quantised, what need not average out."""
    out_bias: Tensor
    """The same of `out`: what the second product cut off."""


def expert(x: Interval, w13: Tensor, alpha1: Tensor, scale2: Tensor, w2: Tensor, alpha2: Tensor) -> Output:
    """One expert on the rows of `x`, which, like the weights, is in units of its global scale.

    `w13` holds up, then gate; what feeds the second product is quantised under `scale2`.
    """
    first = alpha1.double()
    reach = (x.middle.abs() + x.radius) @ w13.abs().T
    both = Interval(x.middle @ w13.T * first, (x.radius @ w13.abs().T + ACCUMULATION * reach) * first)
    activated = rounded(swiglu(*halves(rounded(both, torch.bfloat16))), torch.bfloat16)
    fed = requantised(activated, scale2)
    # Dequantised already: its global scale must not be divided by a second time.
    second = alpha2.double() * scale2.double()
    cut_off = ACCUMULATION * ((fed.middle.abs() + fed.radius) @ w2.abs().T) * second
    out = Interval(fed.middle @ w2.T * second, fed.radius @ w2.abs().T * second + cut_off)
    return Output(rounded(out, torch.bfloat16), fed, swiglu(*halves(both)).radius, cut_off)


def gain_error(found: Tensor, expected: Output) -> float:
    """How far the overall size of `found` is from the expected one, in units of what roundings alone explain.

    The size is the factor of the least squares fit. Roundings are independent and have no preferred sign, so their effect
    is a standard deviation, `SIGMAS` of which are allowed; what a product cuts off, or an activation is off by, may
    have one sign.
    """
    target, fed = expected.out.middle, expected.fed
    energy, fed_energy = (target * target).sum(), (fed.middle * fed.middle).sum()
    gain = (found.double() * target).sum() / energy
    deviation = ((fed.radius * fed.middle) ** 2).sum().sqrt() / fed_energy + UNIT[
        torch.bfloat16
    ] / target.numel() ** 0.5
    bias = (expected.fed_bias * fed.middle.abs()).sum() / fed_energy + (expected.out_bias * target.abs()).sum() / energy
    return float((gain - 1).abs() / (SIGMAS * deviation + bias))


def worst_ratio(found: Tensor, expected: Interval) -> float | None:
    """Largest error in units of its bound; None when something is not finite."""
    if not bool(torch.isfinite(found).all()):
        return None
    error = (found.double() - expected.middle).abs()
    ratio = torch.where(error == 0, torch.zeros_like(error), error / expected.radius)
    # An error where none is allowed: large, and a number that JSON has.
    return float(ratio.max().clamp(max=1e9))
