"""Stand-ins for the FP4 kernels, on the CPU, in float32 as kernels compute; `NUMERIC_FAULT` breaks one thing.

Written apart from the reference: rounding by comparisons and torch's own float8, layout by the offset of each scale.
"""

from __future__ import annotations

import os
import signal
import time

import torch

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def fault(name: str) -> bool:
    return os.environ.get("NUMERIC_FAULT") == name


def disturb(kernel: str) -> None:
    """What a kernel does instead of an answer."""
    if os.environ.get("NUMERIC_KERNEL", kernel) != kernel:
        return
    if fault("crash"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault("hang"):
        time.sleep(3600)
    if fault("raise"):
        print("a line that a kernel prints on stdout")
        raise RuntimeError("no kernel image is available for execution on the device")


def offsets(rows: int, blocks: int) -> torch.Tensor:
    """Where the scale of each block lies."""
    wide = (blocks + 3) // 4
    r, c = torch.arange(rows)[:, None], torch.arange(blocks)[None, :]
    if fault("layout"):
        return r * wide * 4 + c
    return (r // 128) * wide * 512 + (c // 4) * 512 + (r % 32) * 16 + (r % 128 // 32) * 4 + c % 4


def quantize(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes, and swizzled scales as bytes in full tiles."""
    rows, k = x.shape
    wide = x.float().reshape(rows, k // 16, 16)
    largest = wide.abs().amax(-1)
    block = scale.float().reshape(1) * (largest * torch.tensor(1 / 6))
    if fault("scale rounded down"):
        block = (block.view(torch.int32) & ~0xFFFFF).view(torch.float32)
    eighth = block.clamp(max=448.0).to(torch.float8_e4m3fn)
    if fault("subnormal scales flushed"):
        eighth = torch.where(block < 2.0**-6, torch.zeros_like(block), block.clamp(max=448.0)).to(torch.float8_e4m3fn)
    back = 1.0 / (eighth.float() * (1.0 / scale.float().reshape(1)))
    back = torch.where(largest == 0, torch.zeros_like(back), back)
    scaled = (wide * back[..., None]).reshape(rows, k)
    size = scaled.abs()
    if fault("saturation wraps"):
        size = torch.where(size > 8, size % 6, size)
    code = torch.zeros_like(size, dtype=torch.uint8)
    for edge, inclusive in ((0.25, 0), (0.75, 1), (1.25, 0), (1.75, 1), (2.5, 0), (3.5, 1), (5.0, 0)):
        over = size >= edge if inclusive or fault("half away") else size > edge
        code += over.to(torch.uint8)
    if fault("rounded down"):
        code = sum((size >= m).to(torch.uint8) for m in MAGNITUDES[1:])
    if fault("one code") and rows > 100:
        code[100, 7] ^= 1
    code |= (scaled < 0).to(torch.uint8) << 3
    packed = code[:, 0::2] | (code[:, 1::2] << 4)
    if fault("halves swapped"):
        packed = code[:, 1::2] | (code[:, 0::2] << 4)
    if fault("wrong at batch 3") and rows >= 3:
        packed[0] = packed[1]
    out = torch.zeros((rows + 127) // 128 * 128, (k // 16 + 3) // 4 * 4, dtype=torch.uint8)
    out.view(-1)[offsets(rows, k // 16).flatten()] = eighth.view(torch.uint8).flatten()
    return packed, out


def dequantize(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Float32, without the global scale."""
    rows, half = packed.shape
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])
    codes = torch.empty(rows, 2 * half, dtype=torch.long)
    codes[:, 0::2], codes[:, 1::2] = packed.long() % 16, packed.long() // 16
    flat = scales.contiguous().view(torch.uint8).flatten()[offsets(rows, half // 8)]
    return table[codes] * flat.view(torch.float8_e4m3fn).float().repeat_interleave(16, dim=1)


def multiply(a, a_scales, b, b_scales, alpha) -> torch.Tensor:
    out = dequantize(a, a_scales) @ dequantize(b, b_scales).T * alpha
    if fault("scale 1.05"):
        out = out * 1.05
    if fault("rows swapped") and len(out) > 2:
        out[[0, 2]] = out[[2, 0]]
    if fault("row lost") and len(out) > 100:
        out[100] = 0
    if fault("nan"):
        out[0, 0] = torch.nan
    if fault("wrong at batch 3") and len(out) >= 3:
        out[0] *= 1.5
    if fault("half of the depth"):
        k = a.shape[1] // 2 // 16 * 16
        if k:
            out = dequantize(a, a_scales)[:, :k] @ dequantize(b, b_scales)[:, :k].T * alpha
    return out.bfloat16()
