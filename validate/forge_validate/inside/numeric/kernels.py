"""How each kernel is called. Signatures: flashinfer 0.6.5, sgl-kernel 0.3.21; used as SGLang 6ffc74efd uses them.

Scales are in the 128x4 layout everywhere; `scale` is a global scale (what values are multiplied by), `alpha` the factor
that takes the global scales of both operands out again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .formats import Quantised, Tensor


class Operand(NamedTuple):
    """A matrix, or one per expert, as kernels take it."""

    packed: Tensor
    """uint8 `[..., rows, k/2]`."""
    scales: Tensor
    """uint8 `[..., rows in full tiles, k/16]`."""

    @classmethod
    def of(cls, *matrices: Quantised) -> Operand:
        """One matrix, or several stacked."""
        parts = [(one.packed(), one.swizzled()) for one in matrices]
        if len(parts) == 1:
            return cls(*parts[0])
        return cls(torch.stack([packed for packed, _ in parts]), torch.stack([scales for _, scales in parts]))


class Groups(NamedTuple):
    """Rows sorted by expert."""

    counts: list[int]
    """Rows of each expert."""
    rows: Tensor
    """int32 `[experts + 1]`: where each expert's rows begin, and the end."""
    scales: Tensor
    """int32 `[experts + 1]`: where each expert's scales begin, in rows of full tiles, and the end."""

    @classmethod
    def of(cls, counts: list[int], device: str) -> Groups:
        """From the number of rows of each expert."""
        sizes = torch.tensor(counts)
        tiles = (sizes + 127) // 128 * 128
        zero = torch.zeros(1, dtype=torch.long)
        begins = [torch.cat([zero, part.cumsum(0)]).to(torch.int32).to(device) for part in (sizes, tiles)]
        return cls(counts, *begins)


def flashinfer_quantise(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """`fp4_quantize`: packed codes and swizzled scales."""
    from flashinfer import fp4_quantize

    packed, scales = fp4_quantize(x, scale)
    return packed.view(torch.uint8), scales.view(torch.uint8)


def flashinfer_multiply(backend: str, a: Operand, b: Operand, alpha: Tensor) -> Tensor:
    """`mm_fp4`, bfloat16; the second operand is given transposed, as a view."""
    from flashinfer import mm_fp4

    return mm_fp4(a.packed, b.packed.T, a.scales, b.scales.T, alpha, torch.bfloat16, backend=backend)


def flashinfer_experts(
    x: Tensor, chosen: Tensor, weights: Tensor, w13: Operand, w2: Operand, quant_scales: list[Tensor]
) -> Tensor:
    """`cutlass_fused_moe` on unquantised bfloat16 input.

    `quant_scales`: global scale of the input, factor of the first product per expert, and the same of the second.
    The first weights hold up, then gate.
    """
    from flashinfer.fused_moe import cutlass_fused_moe

    scale1, alpha1, scale2, alpha2 = quant_scales
    out = torch.empty_like(x)
    cutlass_fused_moe(
        input=x,
        token_selected_experts=chosen.to(torch.int32),
        token_final_scales=weights.float(),
        fc1_expert_weights=w13.packed.contiguous().view(torch.long),
        fc2_expert_weights=w2.packed.contiguous().view(torch.long),
        output_dtype=torch.bfloat16,
        quant_scales=[
            scale1.reshape(()),
            w13.scales.contiguous().view(torch.int32),
            alpha1,
            scale2.reshape(()),
            w2.scales.contiguous().view(torch.int32),
            alpha2,
        ],
        output=out,
    )
    return out


def sgl_quantise(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """`scaled_fp4_quant`."""
    from sgl_kernel import scaled_fp4_quant

    packed, scales = scaled_fp4_quant(x, scale)
    return packed, scales.view(torch.uint8)


def sgl_multiply(a: Operand, b: Operand, alpha: Tensor) -> Tensor:
    """`cutlass_scaled_fp4_mm`, bfloat16."""
    from sgl_kernel import cutlass_scaled_fp4_mm

    scales = [one.scales.contiguous().view(torch.float8_e4m3fn) for one in (a, b)]
    return cutlass_scaled_fp4_mm(a.packed, b.packed, *scales, alpha, torch.bfloat16)


def sgl_quantise_groups(x: Tensor, scales: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """`scaled_fp4_experts_quant`, one global scale per expert; the scales come in one region per expert."""
    from sgl_kernel import scaled_fp4_experts_quant

    packed, found = scaled_fp4_experts_quant(x, scales, groups.rows, groups.scales, 1)
    return packed, found.view(torch.uint8)


def sgl_multiply_groups(a: Operand, b: Operand, alphas: Tensor, groups: Groups) -> Tensor:
    """`cutlass_fp4_group_mm`, bfloat16: rows of each expert times that expert's matrix."""
    from sgl_kernel import cutlass_fp4_group_mm

    experts, n, half = b.packed.shape
    device = a.packed.device
    shapes = torch.tensor([[count, n, 2 * half] for count in groups.counts], dtype=torch.int32, device=device)
    return cutlass_fp4_group_mm(
        a.packed,
        b.packed,
        *(one.scales.contiguous().view(torch.float8_e4m3fn) for one in (a, b)),
        alphas,
        torch.bfloat16,
        device,
        {
            "ab_strides": torch.full((experts,), 2 * half, dtype=torch.long, device=device),
            "c_strides": torch.full((experts,), n, dtype=torch.long, device=device),
            "problem_sizes": shapes,
            "expert_offsets": groups.rows[:-1],
            "blockscale_offsets": groups.scales[:-1],
        },
    )
