"""Kernels read and write three float formats as torch does; sums over lanes; the exponential."""

import numpy as np
import pytest
import torch

from csattn.cpu.floats import F32x16, exp_lanes, load_float, load_floats, store_float, sum_of
from csattn.cpu.jit import exact_kernel
from csattn.cpu.lanes import largest_lane
from csattn.cpu.simd import LANES, load, store

DTYPES = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.int16}


@exact_kernel
def widen(stored, one_by_one, at_once):  # type: ignore[no-untyped-def]
    for i in range(len(stored)):
        one_by_one[i] = load_float(stored, i)
    for i in range(0, len(stored), 16):
        store(at_once, i, load_floats(stored, i))


@exact_kernel
def narrow(values, stored):  # type: ignore[no-untyped-def]
    for i in range(len(values)):
        store_float(stored, i, values[i])


@exact_kernel
def exponentials(x, out):  # type: ignore[no-untyped-def]
    for i in range(0, len(x), 16):
        store(out, i, exp_lanes(load(F32x16, x, i)))


@exact_kernel
def sum_and_largest(x):  # type: ignore[no-untyped-def]
    return sum_of(load(F32x16, x, 0)), largest_lane(load(F32x16, x, 0))


def as_stored(values: torch.Tensor) -> np.ndarray:
    """Return a tensor's bits in the form that kernels take."""
    if values.dtype == torch.float32:
        return values.numpy()
    return values.view(torch.int16).numpy().view(DTYPES[str(values.dtype).removeprefix("torch.")])


@pytest.mark.parametrize("dtype", DTYPES)
def test_floats_are_read_and_written_as_torch_does(dtype: str) -> None:
    kind = getattr(torch, dtype)
    values = torch.cat([torch.randn(1000) * 10.0 ** torch.randint(-6, 4, (1000,)), torch.tensor([0.0, -0.0, 1, -2])])
    values = torch.cat([values, 1 + torch.arange(20) * 2.0**-9, torch.zeros(-len(values) % LANES + 12)])[:1024]
    stored = np.empty(1024, DTYPES[dtype])
    narrow(values.numpy(), stored)
    np.testing.assert_array_equal(stored, as_stored(values.to(kind)))
    one_by_one, at_once = np.empty(1024, np.float32), np.empty(1024, np.float32)
    widen(stored, one_by_one, at_once)
    np.testing.assert_array_equal(one_by_one, values.to(kind).float().numpy())
    np.testing.assert_array_equal(at_once, one_by_one)


def test_the_exponential_is_accurate_to_two_units_in_the_last_place() -> None:
    x = np.linspace(-87, 88, 160_000, dtype=np.float32)
    got = np.empty_like(x)
    exponentials(x, got)
    want = np.exp(x.astype(np.float64))
    assert (np.abs(got - want) <= 2.01 * np.spacing(want.astype(np.float32))).all()
    far = np.array([-np.inf, -1e30, np.nan, 0.0] * 4, np.float32)
    got = np.empty_like(far)
    exponentials(far, got)
    assert (got[0::4] < 1e-37).all() and (got[1::4] < 1e-37).all() and (got[3::4] == 1).all()
    assert np.isnan(got[2::4]).all()


def test_sum_and_maximum_over_lanes_are_exact(rng: np.random.Generator) -> None:
    for _ in range(20):
        x = rng.integers(-1000, 1000, LANES).astype(np.float32)  # sums of integers are exact in any order
        assert sum_and_largest(x) == (x.sum(), x.max())
