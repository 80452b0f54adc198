"""Cases for a whole mixture of experts: quantise, product, SwiGLU, quantise again, product, weighted sum."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from .bounds import Interval, Output, expert, gain_error, halves, requantised, rounded, swiglu, worst_ratio
from .cases import GAIN, RATIO, Case, Matrix, finite, matrix, random
from .formats import Tensor, global_scale
from .kernels import Operand

Experts = Callable[[Tensor, Tensor, Tensor, Operand, Operand, list[Tensor]], Tensor]

EXPERTS, HIDDEN, INNER = 8, 512, 256


class Layer(NamedTuple):
    """The weights of a layer, one matrix per expert, and what its activations are scaled by."""

    w13: list[Matrix]
    """Up, then gate."""
    w2: list[Matrix]
    scale1: Tensor
    scale2: Tensor

    def alphas(self) -> tuple[Tensor, Tensor]:
        """The factors of both products, float32 `[experts]`."""
        first = torch.cat([1 / (self.scale1.double() * one.scale.double()) for one in self.w13])
        second = torch.cat([1 / (self.scale2.double() * one.scale.double()) for one in self.w2])
        return first.float(), second.float()


class Routed(NamedTuple):
    """Tokens, and the experts of each."""

    x: Tensor
    chosen: Tensor
    """int32 `[tokens, k]`."""
    weights: Tensor
    """float32 `[tokens, k]`, each row sums to 1."""


def cases(kernel: Experts) -> Iterator[Case]:
    """Batch sizes, then routing, zeros, the size of each expert's output, and batching."""
    for tokens in (1, 3, 7, 128, 512):
        yield _case(kernel, f"{tokens} tokens, 2 of 8 experts", lambda device, n=tokens: _routed(n, 2, device), tokens)  # type: ignore[misc]
    yield _case(kernel, "two experts for all, six idle", _crowded, 64)
    yield _case(kernel, "tokens of zeros", _zeros, 9)
    yield Case("each expert alone", (512, HIDDEN, INNER), GAIN, lambda device: _sizes(kernel, device))
    yield Case("a token in a batch as alone", (128, HIDDEN, INNER), RATIO, lambda device: _alone(kernel, device))


def _case(kernel: Experts, name: str, make: Callable[[str], Routed], tokens: int) -> Case:
    def measure(device: str) -> float:
        layer, routed = _layer(device), make(device)
        return finite(worst_ratio(ask(kernel, layer, routed), expected(layer, routed)))

    return Case(name, (tokens, HIDDEN, INNER), RATIO, measure)


def ask(kernel: Experts, layer: Layer, routed: Routed) -> Tensor:
    """What the kernel makes of tokens."""
    first, second = layer.alphas()
    w13, w2 = (Operand.of(*(one.quantised for one in side)) for side in (layer.w13, layer.w2))
    scales = [layer.scale1, first, layer.scale2, second]
    return kernel(routed.x, routed.chosen, routed.weights, w13, w2, scales)


def expected(layer: Layer, routed: Routed) -> Interval:
    """What a right kernel may make of them."""
    x, (first, second) = _quantised_input(layer, routed.x), layer.alphas()
    middle = torch.zeros_like(routed.x, dtype=torch.float64)
    radius = torch.zeros_like(middle)
    for number in range(len(layer.w13)):
        tokens, places = torch.where(routed.chosen == number)
        if len(tokens):
            out = _expert(layer, number, Interval(x.middle[tokens], x.radius[tokens]), first, second).out
            weight = routed.weights[tokens, places].double()[:, None]
            middle.index_add_(0, tokens, out.middle * weight)
            radius.index_add_(0, tokens, out.radius * weight)
    return rounded(Interval(middle, radius), torch.bfloat16)


def _quantised_input(layer: Layer, x: Tensor) -> Interval:
    """In units of the global scale, as the first product's factor has it."""
    values = requantised(Interval(x.double(), torch.zeros_like(x, dtype=torch.float64)), layer.scale1)
    return Interval(values.middle * layer.scale1.double(), values.radius * layer.scale1.double())


def _expert(layer: Layer, number: int, x: Interval, first: Tensor, second: Tensor) -> Output:
    w13, w2 = layer.w13[number].quantised.values(), layer.w2[number].quantised.values()
    return expert(x, w13, first[number], layer.scale2, w2, second[number])


@functools.lru_cache(maxsize=1)
def _layer(device: str) -> Layer:
    """Gates of about 1, and a different size for each expert, so that one's scale is not another's."""
    w13 = [matrix(random(f"w13 {e}", 2 * INNER, HIDDEN, device=device) * 0.05 * (1 + e / 8)) for e in range(EXPERTS)]
    w2 = [matrix(random(f"w2 {e}", HIDDEN, INNER, device=device) * 0.05 * (2 - e / 8)) for e in range(EXPERTS)]
    scale1 = global_scale(random("tokens", 512, HIDDEN, device=device))
    # As a calibration would find it: from what the layer makes of such tokens.
    x = random("calibration", 64, HIDDEN, device=device).double()
    both = [x @ (one.quantised.values() / one.scale.double()).T for one in w13]
    largest = [swiglu(*halves(Interval(one, torch.zeros_like(one)))).middle for one in both]
    return Layer(w13, w2, scale1, global_scale(torch.stack(largest)))


def _routed(tokens: int, k: int, device: str) -> Routed:
    scores = random("router", tokens, EXPERTS, dtype=torch.float32)
    best = scores.topk(k, dim=-1)
    return Routed(
        random("tokens", tokens, HIDDEN, device=device),
        best.indices.to(torch.int32).to(device),
        best.values.softmax(-1).to(device),
    )


def _crowded(device: str) -> Routed:
    routed = _routed(64, 2, device)
    return routed._replace(chosen=torch.tensor([0, 5], dtype=torch.int32, device=device).repeat(64, 1))


def _zeros(device: str) -> Routed:
    routed = _routed(9, 2, device)
    routed.x[1::3] = 0
    return routed


def _sizes(kernel: Experts, device: str) -> float:
    """One expert per token, so that each expert's output is seen alone: a scale that is a little off shows here."""
    layer, routed = _layer(device), _routed(512, 1, device)
    turns = torch.arange(512, dtype=torch.int32, device=device) % EXPERTS
    routed = Routed(routed.x, turns[:, None], torch.ones_like(routed.weights))
    out = ask(kernel, layer, routed)
    if not bool(torch.isfinite(out).all()):
        return finite(None)
    x, (first, second) = _quantised_input(layer, routed.x), layer.alphas()
    worst = 0.0
    for number in range(EXPERTS):
        mine = turns == number
        made = _expert(layer, number, Interval(x.middle[mine], x.radius[mine]), first, second)
        worst = max(worst, gain_error(out[mine], made))
    return worst


def _alone(kernel: Experts, device: str) -> float:
    layer, routed = _layer(device), _routed(128, 2, device)
    whole, bound = ask(kernel, layer, routed), expected(layer, routed)
    worst = 0.0
    for row in (0, 1, 31, 32, 127):
        one = Routed(*(part[row : row + 1].contiguous() for part in routed))
        allowed = Interval(whole[row].double(), 2 * bound.radius[row])
        worst = max(worst, finite(worst_ratio(ask(kernel, layer, one)[0], allowed)))
    return worst
