"""Cases for products: of two matrices, and of each expert's rows with that expert's matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .bounds import Interval, product, rounded, worst_ratio
from .cases import RATIO, Case, Matrix, alpha_of, finite, matrix, random
from .formats import BLOCK, Quantised, Tensor
from .kernels import Groups, Operand

Multiply = Callable[[Operand, Operand, Tensor], Tensor]
MultiplyGroups = Callable[[Operand, Operand, Tensor, Groups], Tensor]
Make = Callable[[str, int, int, int, str], tuple[Matrix, Matrix]]

_SHAPES = (
    (1, 256, 512), (3, 256, 512), (7, 192, 576), (33, 128, 192), (128, 256, 512), (150, 512, 4096), (4096, 256, 512),
)  # fmt: skip
_COUNTS = [1, 0, 3, 7, 128, 130, 0, 2, 5, 64, 1, 31, 32, 33, 0, 9]


def cases(kernel: Multiply) -> Iterator[Case]:
    """Random shapes (rows, columns, depth), then range, zeros and batching."""
    for m, n, k in _SHAPES:
        yield _case(kernel, f"random {m}x{n}x{k}", _random, m, n, k)
    yield _case(kernel, "rows of zeros", _zeros, 9, 128, 512)
    yield _case(kernel, "large times small magnitudes", _magnitudes, 16, 128, 512)
    yield _case(kernel, "block scales from 2^-9 to 448", _spread, 32, 128, 512)
    yield _case(kernel, "largest codes and scales", _largest, 16, 128, 512)
    yield Case("a row in a batch as alone", (128, 256, 512), RATIO, lambda device: _alone(kernel, device))


def group_cases(kernel: MultiplyGroups) -> Iterator[Case]:
    """Experts with many rows, few, one and none."""
    for n, k in ((256, 512), (512, 256)):
        shape = (sum(_COUNTS), n, k)
        yield Case(f"16 experts, {n}x{k}", shape, RATIO, lambda device, n=n, k=k: _groups(kernel, n, k, device))  # type: ignore[misc]


def _case(kernel: Multiply, name: str, make: Make, m: int, n: int, k: int) -> Case:
    def measure(device: str) -> float:
        a, b = make(name, m, n, k, device)
        return finite(worst_ratio(_ask(kernel, a, b), expected(a, b)))

    return Case(name, (m, n, k), RATIO, measure)


def expected(a: Matrix, b: Matrix) -> Interval:
    """The product of two matrices as a right kernel may give it."""
    return rounded(product(a.quantised.values(), b.quantised.values(), alpha_of(a, b)), torch.bfloat16)


def _ask(kernel: Multiply, a: Matrix, b: Matrix) -> Tensor:
    return kernel(Operand.of(a.quantised), Operand.of(b.quantised), alpha_of(a, b))


def _random(name: str, m: int, n: int, k: int, device: str) -> tuple[Matrix, Matrix]:
    return matrix(random(f"{name} a", m, k, device=device)), matrix(random(f"{name} b", n, k, device=device))


def _zeros(name: str, m: int, n: int, k: int, device: str) -> tuple[Matrix, Matrix]:
    x, y = random(f"{name} a", m, k, device=device), random(f"{name} b", n, k, device=device)
    x[1::3] = 0
    y[5] = 0
    return matrix(x), matrix(y)


def _magnitudes(name: str, m: int, n: int, k: int, device: str) -> tuple[Matrix, Matrix]:
    x, y = random(f"{name} a", m, k, device=device), random(f"{name} b", n, k, device=device)
    return matrix(x * 2.0**40), matrix(y * 2.0**-30)


def _spread(name: str, m: int, n: int, k: int, device: str) -> tuple[Matrix, Matrix]:
    """Every scale byte that is a number, in turn, on both sides."""
    made = []
    for side, rows in (("a", m), ("b", n)):
        one = matrix(random(f"{name} {side}", rows, k, device=device))
        scales = torch.arange(rows * k // BLOCK, device=device).reshape(rows, -1) % 127
        made.append(Matrix(Quantised(one.quantised.codes, scales), torch.ones_like(one.scale)))
    return made[0], made[1]


def _largest(_: str, m: int, n: int, k: int, device: str) -> tuple[Matrix, Matrix]:
    """Codes of +6 and -6 under scales of 448: signs alone decide, and sums are large."""
    made = []
    for side, rows in (("a", m), ("b", n)):
        signs = (random(f"largest {side}", rows, k, device=device) < 0).long() * 8
        scales = torch.full((rows, k // BLOCK), 126, device=device)
        made.append(Matrix(Quantised(signs + 7, scales), torch.full((1,), 2.0**10, device=device)))
    return made[0], made[1]


def _alone(kernel: Multiply, device: str) -> float:
    """Tiles differ between batch sizes, so equality is not promised: both may be off, each by its bound."""
    a, b = _random("batch", 128, 256, 512, device)
    whole, bound = _ask(kernel, a, b), expected(a, b)
    worst = 0.0
    for row in (0, 1, 31, 32, 127):
        one = Matrix(Quantised(a.quantised.codes[row : row + 1], a.quantised.scales[row : row + 1]), a.scale)
        allowed = Interval(whole[row].double(), 2 * bound.radius[row])
        worst = max(worst, finite(worst_ratio(_ask(kernel, one, b)[0], allowed)))
    return worst


def _groups(kernel: MultiplyGroups, n: int, k: int, device: str) -> float:
    groups = Groups.of(_COUNTS, device)
    # One global scale for all rows: it is the experts' matrices that have their own.
    whole = matrix(random("groups a", sum(_COUNTS), k, device=device))
    left = [
        Matrix(Quantised(codes, scales), whole.scale)
        for codes, scales in zip(
            whole.quantised.codes.split(_COUNTS), whole.quantised.scales.split(_COUNTS), strict=True
        )
    ]
    right = [matrix(random(f"groups b{e}", n, k, device=device) * (1 + e / 4)) for e in range(len(_COUNTS))]
    scales = torch.cat([one.quantised.swizzled() for one in left if len(one.quantised.codes)])
    out = kernel(
        Operand(whole.quantised.packed(), scales),
        Operand.of(*(one.quantised for one in right)),
        torch.cat([alpha_of(a, b) for a, b in zip(left, right, strict=True)]),
        groups,
    )
    ratios = [
        finite(worst_ratio(part, expected(a, b)))
        for part, a, b in zip(out.split(_COUNTS), left, right, strict=True)
        if len(part)
    ]
    return max(ratios)
