"""The parts of a search, each against its definition in a line or two of numpy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csattn.jit import exact_kernel, readonly
from csattn.search import lists, rows, worth
from csattn.search.simd import F32x16, fill, load, store
from csattn.search.weights import MAX_SCORE, integer_weights, weight_room
from csattn.table.rows import pack_codes


@given(
    st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=128),
    st.sampled_from([7, 127]),
)
@settings(deadline=None)
def test_integer_weights_never_overflow_and_keep_proportions(scaled: list[float], largest_code: int) -> None:
    values = np.array(scaled, np.float64)
    unit, multipliers = integer_weights(values, largest_code)
    assert weight_room(len(values), largest_code) > 0
    assert (multipliers >= 0).all()
    assert multipliers.sum() * largest_code <= MAX_SCORE
    np.testing.assert_allclose(unit * multipliers, values, atol=unit * 0.5000001)
    assert (unit == 0) == (values.sum() == 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_of_a_broken_query_are_zero(bad: float) -> None:
    unit, multipliers = integer_weights(np.array([1.0, bad]), 7)
    assert unit == 0 and not multipliers.any()


@pytest.mark.parametrize("score_bits", [4, 8])
@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 16, 33])
@pytest.mark.parametrize("num_keys", [128, 256, 8192, 8320, 20_096])
def test_sums_of_rows_wrap_around_as_int16_does(score_bits: int, num_rows: int, num_keys: int) -> None:
    rng = np.random.default_rng(0)
    largest = 127 if score_bits == 8 else 7
    codes = rng.integers(-largest, largest + 1, (num_rows, num_keys)).astype(np.int8)
    packed = readonly(pack_codes(codes, score_bits).view(np.uint8))
    weights = rng.integers(-3000, 3000, num_rows)
    scores = np.full(num_keys + 10, -777, np.int16)
    starts = np.arange(num_rows) * packed.shape[1]
    if score_bits == 8:
        rows.add_rows8(packed.reshape(-1), starts, weights, num_keys, scores, 5)
    else:
        sums = np.full(rows.SUM_BYTES // 2, 0xFFFF, np.uint16)
        rows.add_rows4(packed.reshape(-1), starts, weights, num_keys // 2, scores, 5, sums)
    want = (weights @ codes.astype(np.int64)).astype(np.int16)
    np.testing.assert_array_equal(scores[5:-5], want)
    assert (scores[:5] == -777).all() and (scores[-5:] == -777).all()


@exact_kernel
def _exp2(x, floor, rounder, out):  # type: ignore[no-untyped-def]
    for i in range(0, len(x), 16):
        store(out, i, worth.exp2_lanes(load(F32x16, x, i), fill(F32x16, floor), fill(F32x16, rounder)))


@pytest.mark.parametrize("offset", [-20, 0, 94])
def test_exp2_is_accurate_and_stops_at_its_floor(offset: int) -> None:
    x = np.linspace(-126 - offset, 94 - offset, 16 * 5000).astype(np.float32)
    out = np.empty_like(x)
    _exp2(x, np.float32(-126 - offset), worth.ROUNDER + offset, out)
    np.testing.assert_allclose(out, np.exp2(x.astype(np.float64) + offset), rtol=4.2e-6)
    low = np.full(16, -1e30, np.float32)
    _exp2(low, np.float32(-50.5 - offset), worth.ROUNDER + offset, out[:16])
    np.testing.assert_allclose(out[:16], 2.0**-50.5, rtol=1e-5)


@pytest.mark.parametrize("length", [0, 1, 255, 256, 257, 1000])
def test_lists_add_to_their_keys_only(length: int) -> None:
    rng = np.random.default_rng(length)
    indices = rng.permutation(2000)[:length].astype(np.int32)
    halves = rng.normal(0, 1, length).astype(np.float16)
    halves[: length // 3] = 0.0
    scores = np.full(2016, np.nan, np.float32)
    lists.clear_scores(scores, 0, 2000)
    step = np.full(lists.KEYS_PER_STEP, np.nan, np.float32)
    bits = readonly(halves.view(np.uint16))
    lists.add_list(scores, 0, readonly(indices), bits, 0, length, 0.3, step)
    lists.add_list(scores, 0, readonly(indices), bits, 0, length, -0.3, step)  # cancels: a sum of 0.0 stays listed
    unlisted = np.setdiff1d(np.arange(2000), indices)
    assert (scores[unlisted].view(np.int32) == worth.NOT_SCORED).all()
    assert (scores[indices].view(np.int32) != worth.NOT_SCORED).all()
    assert (scores[indices] == 0).all()


def test_a_weight_of_zero_still_lists_its_keys() -> None:
    scores = np.empty(16, np.float32)
    lists.clear_scores(scores, 0, 16)
    halves = readonly(np.array([-1.5], np.float16).view(np.uint16))
    lists.add_list(scores, 0, readonly(np.array([3], np.int32)), halves, 0, 1, 0.0, np.empty(256, np.float32))
    assert scores[3].view(np.int32) == 0


def test_every_finite_float16_is_read_as_it_is() -> None:
    bits = np.arange(2**16, dtype=np.uint32).astype(np.uint16)
    halves = bits.view(np.float16)
    finite = np.isfinite(halves)
    bits, halves = bits[finite], halves[finite]
    scores = np.empty(len(bits) + 16, np.float32)
    lists.clear_scores(scores, 0, len(bits))
    order = readonly(np.arange(len(bits), dtype=np.int32))
    lists.add_list(scores, 0, order, readonly(bits), 0, len(bits), 1.0, np.empty(256, np.float32))
    np.testing.assert_array_equal(scores[: len(bits)], halves.astype(np.float32))
