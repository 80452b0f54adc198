"""NVFP4 as numbers: the two formats decoded from their bits, rounding, packing, and the layout of the scales.

A value is E2M1 code x E4M3 scale of its block of 16 / global scale. All arithmetic here is float64: every product of two
values is exact in it, and so is nearly every sum. Format: OCP Microscaling v1.0 (E2M1, E4M3); PTX ISA (`cvt.e2m1x2`,
scale factor layout 4X).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

BLOCK = 16
"""Elements that share one scale."""
E2M1_MAX = 6.0
E4M3_MAX = 448.0
ROWS, COLUMNS = 128, 4
"""The tile of the swizzled layout: rows, and scales of a row."""

Tensor = Any  # torch is not among what types are checked with


def e2m1_table(device: str = "cpu") -> Tensor:
    """The 8 magnitudes by code: one sign, two exponent bits (bias 1), one mantissa bit."""
    values = [mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
              for exponent in range(4) for mantissa in range(2)]  # fmt: skip
    return torch.tensor(values, dtype=torch.float64, device=device)


def e4m3_table(device: str = "cpu") -> Tensor:
    """The 127 magnitudes by code: four exponent bits (bias 7), three mantissa bits; code 127 is NaN."""
    values = [mantissa * 2.0**-9 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8)
              for exponent in range(16) for mantissa in range(8)]  # fmt: skip
    return torch.tensor(values[:127], dtype=torch.float64, device=device)


def nearest(values: Tensor, table: Tensor) -> Tensor:
    """Index of the nearest magnitude; a tie goes to the even code, what is too large to the last (saturation)."""
    middles = (table[1:] + table[:-1]) / 2
    index = torch.searchsorted(middles, values.contiguous())
    tie = middles[index.clamp(max=len(middles) - 1)] == values
    return index + (tie & (index % 2 == 1)).long()


def e2m1_codes(values: Tensor) -> Tensor:
    """Codes (0 to 15) of signed values."""
    return torch.signbit(values).long() * 8 + nearest(values.abs(), e2m1_table(values.device))


def e2m1_values(codes: Tensor) -> Tensor:
    """Values of codes (0 to 15)."""
    magnitudes = e2m1_table(codes.device)[codes.long() & 7]
    return torch.where(codes >= 8, -magnitudes, magnitudes)


def e4m3_values(scales: Tensor) -> Tensor:
    """Values of scale bytes; the sign bit is no part of a scale: what has it, or is NaN, becomes NaN."""
    table = torch.cat([e4m3_table(scales.device), torch.full((129,), torch.nan, device=scales.device)])
    return table[scales.long()]


def pack(codes: Tensor) -> Tensor:
    """Two codes to a byte, the first in the low half: `[rows, k]` to `[rows, k/2]` of uint8."""
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """The inverse of `pack`, as int64."""
    wide = packed.long()
    return torch.stack((wide & 15, wide >> 4), dim=-1).flatten(-2)


def swizzle(scales: Tensor) -> Tensor:
    """Scales `[rows, blocks]` to the kernels' 128x4 layout, padded with zeros to full tiles.

    Within a tile of 512 bytes, row r and column c lie at 16 x (r mod 32) + 4 x (r div 32) + c; tiles go along the row.
    """
    rows, blocks = scales.shape
    high, wide = -(-rows // ROWS), -(-blocks // COLUMNS)
    padded = scales.new_zeros(high * ROWS, wide * COLUMNS)
    padded[:rows, :blocks] = scales
    return padded.view(high, 4, 32, wide, COLUMNS).permute(0, 3, 2, 1, 4).reshape(high * ROWS, wide * COLUMNS)


def unswizzle(swizzled: Tensor, rows: int, blocks: int) -> Tensor:
    """The inverse of `swizzle`; takes any shape with the bytes in order."""
    high, wide = -(-rows // ROWS), -(-blocks // COLUMNS)
    tiles = swizzled.reshape(high, wide, 32, 4, COLUMNS).permute(0, 3, 2, 1, 4)
    return tiles.reshape(high * ROWS, wide * COLUMNS)[:rows, :blocks]


class Quantised(NamedTuple):
    """A matrix in NVFP4, without its global scale."""

    codes: Tensor
    """`[rows, k]`, 0 to 15."""
    scales: Tensor
    """`[rows, k/16]`, E4M3 bytes, in order."""

    def values(self) -> Tensor:
        """Code x block scale, float64; the global scale is still to be divided by."""
        return e2m1_values(self.codes) * e4m3_values(self.scales).repeat_interleave(BLOCK, dim=-1)

    def packed(self) -> Tensor:
        """The codes as kernels take them."""
        return pack(self.codes)

    def swizzled(self) -> Tensor:
        """The scales as kernels take them, uint8, in full tiles."""
        return swizzle(self.scales.to(torch.uint8))


def global_scale(values: Tensor) -> Tensor:
    """The usual one, float32 `[1]`: the largest magnitude becomes the largest code x the largest scale."""
    return (E2M1_MAX * E4M3_MAX / values.double().abs().max()).float().reshape(1)


def quantise(values: Tensor, scale: Tensor) -> Quantised:
    """What exact arithmetic makes of `values` `[rows, k]` under a global scale; k is a multiple of 16."""
    exact, factor = values.double(), scale.double()
    blocks = exact.unflatten(-1, (-1, BLOCK))
    scales = nearest(blocks.abs().amax(-1) / E2M1_MAX * factor, e4m3_table(values.device))
    return Quantised(e2m1_codes(scaled(exact, scales, factor)), scales)


def scaled(exact: Tensor, scales: Tensor, factor: Tensor) -> Tensor:
    """Values in units of their block's scale; a block whose scale is zero gives zeros."""
    unit = (e4m3_values(scales) / factor).repeat_interleave(BLOCK, dim=-1)
    return torch.where(unit == 0, torch.zeros_like(exact), exact / unit)
