"""What a case is, and what the cases of all kernels share: seeded inputs and the words for what is measured."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import NamedTuple

import torch

from .formats import Quantised, Tensor, global_scale, quantise

SEED = 20260307
STRAY = "codes and scales that no right kernel gives"
RATIO = "largest error, in units of its bound"
GAIN = "error of the overall size, in units of its bound"
DIFFERENT = "bytes that differ from the row alone"
BOUNDS = {STRAY: 0.0, RATIO: 1.0, GAIN: 1.0, DIFFERENT: 0.0}
AMBIGUOUS = 0.02
"""Largest share of codes with two right values; with more a case proves too little."""


class Unmeasured(Exception):
    """The case gave no number; the message says why."""


class Case(NamedTuple):
    """One question to one kernel."""

    name: str
    shape: tuple[int, ...]
    metric: str
    measure: Callable[[str], float]
    """From a device to the metric's value; raises Unmeasured, or whatever the kernel raises."""


def finite(value: float | None) -> float:
    """The value of a metric; raises ArithmeticError for an output that is not finite."""
    if value is None:
        raise ArithmeticError("the output has NaN or infinity")
    return value


def random(name: str, *shape: int, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> Tensor:
    """Normal values, the same on every machine for one name and shape: drawn on the CPU."""
    generator = torch.Generator().manual_seed(SEED + zlib.crc32(f"{name} {shape}".encode()))
    return torch.randn(shape, generator=generator).to(dtype).to(device)


class Matrix(NamedTuple):
    """A matrix in NVFP4 with its global scale."""

    quantised: Quantised
    scale: Tensor


def matrix(values: Tensor) -> Matrix:
    """Quantised by the reference, under its usual global scale."""
    scale = global_scale(values)
    return Matrix(quantise(values, scale), scale)


def alpha_of(a: Matrix, b: Matrix) -> Tensor:
    """The factor that takes both global scales out of a product, float32 `[1]`."""
    return (1 / (a.scale.double() * b.scale.double())).float()
