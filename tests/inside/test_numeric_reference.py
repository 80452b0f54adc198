"""The reference of the numeric test, against cases worked out by hand and properties that define the formats.

Needs torch, which is no dependency of ours: `tests/integration/test_numeric.py` runs this inside the rehearsal image.
Where torch is installed: `PYTHONPATH=validate/forge_validate/inside pytest tests/inside`.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numeric import bounds, experts_cases, formats
from numeric.bounds import Interval
from numeric.cases import matrix
from numeric.formats import Quantised

QUICK = settings(max_examples=60, deadline=None, database=None)
ONE = torch.ones(1)


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# --- formats ----------------------------------------------------------------------------------------------------------


def test_the_magnitudes_of_e2m1() -> None:
    assert formats.e2m1_table().tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_the_magnitudes_of_e4m3_are_torchs() -> None:
    theirs = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    assert formats.e4m3_table().tolist() == theirs.tolist()
    assert (theirs[1].item(), theirs[8].item(), theirs[126].item()) == (2.0**-9, 2.0**-6, 448.0)


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (0.0, 0), (0.25, 0), (0.2500001, 1), (0.5, 1), (0.75, 2), (0.7499999, 1), (1.25, 2), (1.2500001, 3), (1.75, 4),
        (1.7499999, 3), (2.5, 4), (2.5000001, 5), (3.5, 6), (3.4999999, 5), (5.0, 6), (5.0000001, 7), (6.0, 7), (1e30, 7),
        (-0.25, 8), (-0.75, 10), (-2.5, 12), (-5.0, 14), (-7.0, 15),
    ],
)  # fmt: skip
def test_rounding_goes_to_the_nearest_and_ties_to_even(value: float, code: int) -> None:
    assert formats.e2m1_codes(f64(value)).item() == code


@QUICK
@given(st.floats(-1e4, 1e4, allow_nan=False))
def test_rounding_is_nearest(value: float) -> None:
    code = formats.e2m1_codes(f64(value))
    chosen = abs(formats.e2m1_values(code).item() - value)
    others = [abs(math.copysign(m, value) - value) for m in formats.e2m1_table().tolist()]
    assert chosen == min(others)
    if others.count(chosen) == 2:
        assert code.item() % 2 == 0


@QUICK
@given(st.floats(0, 480))
def test_scales_round_as_torchs_float8_does(value: float) -> None:
    exact = torch.tensor([value], dtype=torch.float32)
    theirs = exact.clamp(max=448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert formats.nearest(exact.double(), formats.e4m3_table()).item() == theirs.item()


@QUICK
@given(st.lists(st.integers(0, 15), min_size=2, max_size=64).filter(lambda codes: len(codes) % 2 == 0))
def test_packing(codes: list[int]) -> None:
    packed = formats.pack(torch.tensor([codes]))
    assert packed.dtype == torch.uint8 and formats.unpack(packed)[0].tolist() == codes
    assert packed[0, 0].item() == codes[0] + 16 * codes[1]


@QUICK
@given(st.integers(1, 300), st.integers(1, 20))
def test_the_layout_is_a_bijection_onto_the_offsets_that_the_kernels_use(rows: int, blocks: int) -> None:
    """Offset of (row, block): tile of 128 rows and 4 blocks, in it 16 (r mod 32) + 4 (r div 32) + c."""
    scales = (torch.arange(rows * blocks) + 1).reshape(rows, blocks)
    laid = formats.swizzle(scales)
    flat, tiles = laid.flatten().tolist(), -(-blocks // 4)
    for row in {0, rows // 3, rows // 2, rows - 1}:
        for block in range(blocks):
            offset = (row // 128 * tiles + block // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4
            assert flat[offset] == scales[row, block]
    assert sorted(value for value in flat if value) == scales.flatten().tolist()
    assert laid.shape[0] % 128 == 0 and laid.shape[1] % 4 == 0
    assert torch.equal(formats.unswizzle(laid, rows, blocks), scales)


# --- quantising -------------------------------------------------------------------------------------------------------


def test_a_block_by_hand() -> None:
    """Largest magnitude 12 under a global scale of 2: block scale 12 / 6 x 2 = 4, so a unit is worth 2."""
    x = torch.tensor([[12.0, -12, 6, 1, -1, 0.5, 0.4, 3, 2.5, 2.6, 5, 7, 8, 10, 0, -0.1]])
    made = formats.quantise(x, 2 * ONE)
    assert formats.e4m3_values(made.scales).tolist() == [[4.0]]
    expected = [6, -6, 3, 0.5, -0.5, 0, 0, 1.5, 1, 1.5, 2, 4, 4, 4, 0, 0]
    assert formats.e2m1_values(made.codes)[0].tolist() == expected
    assert (made.values() / 2)[0].tolist() == [2 * value for value in expected]


@QUICK
@given(
    st.integers(1, 126),
    st.lists(st.integers(0, 15), min_size=15, max_size=15),
    st.integers(-20, 20),
    st.sampled_from([7, 15]),
)
def test_what_is_representable_survives(scale: int, codes: list[int], power: int, largest: int) -> None:
    """Every scale, every code: with a largest code in the block its scale is found again, and so is all else."""
    once = Quantised(torch.tensor([[largest, *codes]]), torch.tensor([[scale]]))
    factor = torch.tensor([2.0**power])
    again = formats.quantise(once.values() / factor.double(), factor)
    assert again.scales.tolist() == once.scales.tolist()
    assert torch.equal(again.values(), once.values())
    assert bounds.stray_codes(once.values() / factor.double(), factor, once) == (0, 0.0)


def test_saturation_and_zeros() -> None:
    x = torch.zeros(3, 16)
    x[1], x[2] = 1e6, torch.tensor([1e-9] * 16)
    made = formats.quantise(x, ONE)
    assert made.scales[:, 0].tolist() == [0, 126, 0]
    assert made.codes[0].tolist() == [0] * 16 and made.codes[1].tolist() == [7] * 16


def test_stray_codes_are_counted() -> None:
    x = torch.tensor([[6.0, 0.2, 0.3, 0.25, -0.3, *[1.0] * 11]])
    right = formats.quantise(x, ONE)
    assert bounds.stray_codes(x, ONE, right)[0] == 0
    for place, code in ((0, 6), (1, 1), (2, 0), (4, 1)):
        codes = right.codes.clone()
        codes[0, place] = code
        assert bounds.stray_codes(x, ONE, Quantised(codes, right.scales))[0] == 1
    # 0.25 is a tie: within the slack of a reciprocal both neighbours are right, without slack only the even one.
    codes = right.codes.clone()
    codes[0, 3] = 1
    assert bounds.stray_codes(x, ONE, Quantised(codes, right.scales)) == (0, 1 / 16)
    assert bounds.stray_codes(x, ONE, Quantised(codes, right.scales), slack=0.0)[0] == 1
    # -0 is 0; a scale that is NaN or negative is no scale.
    codes = right.codes.clone()
    codes[0, 1] = 8
    assert bounds.stray_codes(x, ONE, Quantised(codes, right.scales))[0] == 0
    for scale in (127, 128, 255, 57, 55):
        assert bounds.stray_codes(x, ONE, Quantised(right.codes, torch.tensor([[scale]])))[0] >= 1


def test_under_a_zero_scale_codes_mean_nothing_but_zeros_are_zeros() -> None:
    tiny = torch.full((1, 16), 2.0**-20)
    any_codes = Quantised(torch.full((1, 16), 7), torch.zeros(1, 1, dtype=torch.long))
    assert bounds.stray_codes(tiny, ONE, any_codes)[0] == 0
    assert bounds.stray_codes(torch.zeros(1, 16), ONE, any_codes)[0] == 16


# --- products ---------------------------------------------------------------------------------------------------------


def test_a_product_by_hand() -> None:
    a, b = torch.zeros(1, 16, dtype=torch.float64), torch.zeros(2, 16, dtype=torch.float64)
    a[0, :3], b[0, :3], b[1, 0] = f64(1, 2, -3), f64(4, 0.5, 2), f64(8)
    exact = bounds.product(a, b, torch.tensor([0.5]))
    assert exact.middle.tolist() == [[-0.5, 4.0]]
    assert exact.radius.tolist() == [[5.5 * 2.0**-13, 4.0 * 2.0**-13]]
    done = bounds.rounded(exact, torch.bfloat16)
    assert done.radius[0, 1].item() == pytest.approx(4 * 2**-13 + 4 * 2**-8, rel=2e-3)


def test_bounds_hold_the_roundings_they_are_for_and_nothing_five_percent_off() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (matrix(torch.randn(64, 512, generator=generator)).quantised.values() for _ in range(2))
    expected = bounds.rounded(bounds.product(a, b, 0.001 * ONE), torch.bfloat16)
    right = ((a.float() @ b.float().T) * 0.001).bfloat16()
    ratio = bounds.worst_ratio(right, expected)
    assert ratio is not None and 0.3 < ratio <= 1
    assert (bounds.worst_ratio(right * 1.05, expected) or 0) > 5
    assert (bounds.worst_ratio(right.flip(0), expected) or 0) > 100
    right[3, 3] = torch.nan
    assert bounds.worst_ratio(right, expected) is None


def test_an_exact_zero_has_no_room_for_error() -> None:
    nothing = torch.zeros(2, 16, dtype=torch.float64)
    expected = bounds.rounded(bounds.product(nothing, nothing, ONE), torch.bfloat16)
    assert bounds.worst_ratio(torch.zeros(2, 2), expected) == 0
    assert bounds.worst_ratio(torch.full((2, 2), 1e-30), expected) == 1e9


# --- mixture of experts -----------------------------------------------------------------------------------------------


@QUICK
@given(st.integers(0, 2**31), st.floats(0, 0.02))
def test_the_interval_holds_what_quantising_makes_of_anything_inside(seed: int, relative: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 64, generator=generator, dtype=torch.float64)
    radius = x.abs() * relative
    inside = x + radius * (2 * torch.rand(2, 64, generator=generator, dtype=torch.float64) - 1)
    factor = formats.global_scale(x)
    bound = bounds.requantised(Interval(x, radius), factor)
    found = formats.quantise(inside, factor).values() / factor.double()
    assert bool(((found - bound.middle).abs() <= bound.radius * (1 + 1e-12) + 1e-15).all())


def test_the_interval_of_an_exact_value_is_that_value() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    factor = formats.global_scale(x)
    made = bounds.requantised(Interval(x, torch.zeros_like(x)), factor)
    exact = formats.quantise(x, factor).values() / factor.double()
    assert torch.allclose(made.middle, exact, rtol=1e-15, atol=0)
    assert not made.radius.any()


def test_the_slope_of_silu() -> None:
    x = torch.linspace(-20, 20, 400_001, dtype=torch.float64, requires_grad=True)
    torch.nn.functional.silu(x).sum().backward()
    assert x.grad is not None and 1.0997 < x.grad.abs().max().item() < bounds.SILU_SLOPE


def test_a_layer_against_plain_arithmetic() -> None:
    """Two tokens, written out: up is the first half of the weights, gate the second; weights multiply, experts add."""
    layer, routed = experts_cases._layer("cpu"), experts_cases._routed(2, 2, "cpu")
    expected = experts_cases.expected(layer, routed)
    for token in range(2):
        total = torch.zeros(experts_cases.HIDDEN, dtype=torch.float64)
        x = formats.quantise(routed.x[token : token + 1], layer.scale1).values() / layer.scale1.double()
        for place in range(2):
            e = int(routed.chosen[token, place])
            w13 = layer.w13[e].quantised.values() / layer.w13[e].scale.double()
            w2 = layer.w2[e].quantised.values() / layer.w2[e].scale.double()
            up, gate = w13[: experts_cases.INNER] @ x[0], w13[experts_cases.INNER :] @ x[0]
            hidden = gate / (1 + torch.exp(-gate)) * up
            fed = formats.quantise(hidden[None], layer.scale2).values()[0] / layer.scale2.double()
            total += routed.weights[token, place].double() * (w2 @ fed)
        assert bool(((total - expected.middle[token]).abs() <= expected.radius[token]).all())
        # Worst cases added up: about as large as the output (docs/numeric.md), which `gain_error` is there for.
        assert expected.radius[token].mean() < 1.5 * total.abs().mean()


def test_the_gain_sees_four_percent_and_forgives_roundings() -> None:
    layer = experts_cases._layer("cpu")
    x = experts_cases._quantised_input(layer, experts_cases._routed(64, 1, "cpu").x)
    first, second = layer.alphas()
    made = experts_cases._expert(layer, 2, x, first, second)
    right = made.out.middle.bfloat16()
    assert bounds.gain_error(right, made) < 0.1
    assert bounds.gain_error((right.double() * 1.04).bfloat16(), made) > 1
    assert bounds.gain_error((right.double() * 0.96).bfloat16(), made) > 1
