"""Number formats follow their definitions (grids, ties, scales), and FP4 rows are held in FP8 where that is exact."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from csattn.errors import ArrayError
from csattn.lightning.operands.quantise import (
    dequantise_fp8,
    fp4_rows_as_fp8,
    power_of_two,
    quantise_fp8,
    round_to_fp4,
    round_up_to_power_of_two,
)
from csattn.lightning.operands.rotations import hadamard, rope, rope_last, tree_sum

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def nearest_on_the_grid(value: float) -> float:
    """Round to the grid. Ties go to the neighbour with an even code, that is, index in the grid."""
    distance = np.abs(GRID - abs(value))
    nearest = np.flatnonzero(distance == distance.min())
    return float(np.copysign(GRID[nearest[nearest % 2 == 0][0] if len(nearest) > 1 else nearest[0]], value))


@given(st.lists(st.integers(-48, 48), min_size=1, max_size=31), st.integers(-20, 20))
def test_fp4_rounds_to_the_nearest_value_and_ties_to_even(eighths: list[int], exponent: int) -> None:
    values = [x / 8 for x in eighths] + [6.0]
    block = torch.tensor(values + [0.0] * (32 - len(values))) * 2.0**exponent
    got = round_to_fp4(block) / 2.0**exponent
    assert got.tolist() == [nearest_on_the_grid(x) for x in values] + [0.0] * (32 - len(values))


def test_fp4_scales_are_rounded_up_so_that_no_value_is_clipped() -> None:
    x = torch.zeros(3, 32)
    x[:, 0] = torch.tensor([6.0, 6.25, 11.9])
    assert round_to_fp4(x)[:, 0].tolist() == [6.0, 6.0, 12.0]
    assert round_to_fp4(torch.zeros(64)).tolist() == [0.0] * 64
    assert round_to_fp4(x.bfloat16()).dtype == torch.bfloat16


def test_fp4_blocks_have_separate_scales(rng: np.random.Generator) -> None:
    x = torch.from_numpy(rng.standard_normal((5, 3, 128)).astype(np.float32))
    x[..., 32:64] *= 1000
    for block in range(4):
        part = slice(32 * block, 32 * block + 32)
        assert torch.equal(round_to_fp4(x)[..., part], round_to_fp4(x[..., part]))


@pytest.mark.parametrize("power_of_two_scales", [False, True])
def test_fp8_error_is_within_rounding_and_its_scale_is_minimal(
    power_of_two_scales: bool, rng: np.random.Generator
) -> None:
    x = torch.from_numpy(rng.standard_normal((7, 256)).astype(np.float32)) * 3
    values, scales = quantise_fp8(x, power_of_two_scales=power_of_two_scales)
    assert values.dtype == torch.float8_e4m3fn and scales.shape == (7, 2)
    least = x.view(7, 2, 128).abs().amax(-1) / 448
    assert (scales >= least).all() and (scales < 2 * least * (1 + 1e-6)).all()
    if power_of_two_scales:
        assert (scales.frexp().mantissa == 0.5).all()
    step = torch.maximum(x.abs() / 16, scales.repeat_interleave(128, 1) * 2.0**-9)
    assert ((dequantise_fp8(values, scales) - x).abs() <= step * 1.01).all()


def test_fp8_of_zeros_is_zero() -> None:
    values, scales = quantise_fp8(torch.zeros(2, 128))
    assert not values.float().any()
    np.testing.assert_allclose(scales.numpy(), 1e-4 / 448)


@pytest.mark.parametrize("power_of_two_scales", [False, True])
def test_a_block_with_infinity_dequantises_to_nan(power_of_two_scales: bool) -> None:
    x = torch.ones(2, 128)
    x[0, 5] = torch.inf
    values, scales = quantise_fp8(x, power_of_two_scales=power_of_two_scales)
    assert dequantise_fp8(values, scales)[0].isnan().all()
    assert torch.equal(dequantise_fp8(values, scales)[1], x[1])
    assert round_to_fp4(x)[0, :32].isnan().all()
    assert torch.equal(round_to_fp4(x)[1], x[1])


def test_invalid_block_sizes_and_scale_shapes_are_refused() -> None:
    with pytest.raises(ArrayError, match="blocks of 0"):
        quantise_fp8(torch.zeros(2, 128), block=0)
    for shape in ((1, 1), (2, 0), (2,), ()):
        with pytest.raises(ArrayError, match=r"values have shape \[2, 128\], scales .*; wanted the same rows"):
            dequantise_fp8(torch.zeros(2, 128), torch.zeros(shape))
    with pytest.raises(ArrayError, match="rows of 12 values do not divide into 5 blocks"):
        dequantise_fp8(torch.zeros(2, 12), torch.zeros(2, 5))


@given(st.integers(-126, 126), st.floats(1.0, 2.0, width=32, exclude_max=True))
def test_scales_are_rounded_up_to_powers_of_two(exponent: int, mantissa: float) -> None:
    got = float(round_up_to_power_of_two(torch.tensor([mantissa * 2.0**exponent]))[0])
    assert got == 2.0 ** (exponent + (mantissa > 1))
    assert float(power_of_two(torch.tensor([exponent]))[0]) == 2.0**exponent


@given(st.lists(st.integers(-7, 7), min_size=4, max_size=4), st.integers(-60, 60), st.integers(0, 2**32 - 1))
def test_fp4_rows_convert_to_fp8_exactly(spread: list[int], exponent: int, seed: int) -> None:
    x = torch.randn(3, 128, generator=torch.Generator().manual_seed(seed))
    scales = torch.tensor([2.0 ** (exponent + s) for s in spread])
    grid = round_to_fp4(x / x.view(3, 4, 32).abs().amax(-1).repeat_interleave(32, 1))
    grid = (grid.view(3, 4, 32) * scales[:, None]).flatten(1)
    values, factors, fits = fp4_rows_as_fp8(grid)
    assert fits.all()
    assert torch.equal(values.float() * factors[:, None], grid)
    assert (factors.frexp().mantissa == 0.5).all()


def test_fp4_rows_whose_scales_exceed_the_fp8_range_are_marked() -> None:
    rows = torch.zeros(3, 128)
    rows[:, 0] = 6.0
    rows[:, 40] = torch.tensor([0.5 * 2.0**-14, 0.5 * 2.0**-15, 0.0])
    assert fp4_rows_as_fp8(rows)[2].tolist() == [True, False, True]


def test_hadamard_equals_the_product_with_the_hadamard_matrix(rng: np.random.Generator) -> None:
    matrix = np.array([[1.0]])
    for _ in range(7):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    x = rng.standard_normal((3, 2, 128)).astype(np.float32)
    got = hadamard(torch.from_numpy(x))
    np.testing.assert_allclose(got.numpy(), x @ matrix / np.sqrt(128), atol=1e-5)
    np.testing.assert_allclose(hadamard(got).numpy(), x, atol=1e-5)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rope_rotates_pairs_by_their_angle(interleaved: bool, rng: np.random.Generator) -> None:
    x, positions = torch.from_numpy(rng.standard_normal((5, 3, 8)).astype(np.float32)), torch.tensor([0, 1, 7, 100, 3])
    inv_freq = torch.tensor([1.0, 0.1, 0.01, 0.001])
    got = rope(x, positions, inv_freq, interleaved=interleaved)
    first, second = (range(0, 8, 2), range(1, 8, 2)) if interleaved else (range(4), range(4, 8))
    turned = torch.complex(x[..., first], x[..., second]) * torch.exp(1j * positions[:, None, None] * inv_freq)
    np.testing.assert_allclose(got[..., first].numpy(), turned.real.numpy(), atol=1e-5)
    np.testing.assert_allclose(got[..., second].numpy(), turned.imag.numpy(), atol=1e-5)


@pytest.mark.parametrize(("num_positions", "num_pairs"), [(1, 2), (4, 2), (3, 5)])
def test_rope_of_rows_without_a_position_each_or_enough_channels_is_refused(num_positions: int, num_pairs: int) -> None:
    with pytest.raises(ArrayError, match=r"x has shape \[3, 8\], positions \[\d\] .* wanted \[rows, "):
        rope_last(torch.ones(3, 8), torch.arange(num_positions), torch.ones(num_pairs), interleaved=True)


@pytest.mark.parametrize("width", [1, 2, 3, 8, 100])
def test_tree_sum_equals_the_sum(width: int) -> None:
    x = torch.randn(4, width)
    torch.testing.assert_close(tree_sum(x), x.sum(-1))


def test_widths_without_fp4_blocks_or_hadamard_transform_are_refused() -> None:
    with pytest.raises(ArrayError, match=r"\[3, 100\] does not divide into blocks of 32"):
        round_to_fp4(torch.zeros(3, 100))
    with pytest.raises(ArrayError, match="rows of 96 values have no Hadamard transform"):
        hadamard(torch.zeros(2, 96))
