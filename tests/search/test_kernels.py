"""The parts of a search, each against its definition in a line or two of numpy."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import types
from numpy.typing import NDArray

from csattn.index import LayerIndex
from csattn.jit import exact_kernel, readonly
from csattn.search import lanes, lists, match, reference, rows, worth
from csattn.search.simd import F32x16, I16x32, I32x16, U16x32, Vector, fill, load, store
from csattn.search.weights import MAX_SCORE, integer_weights, weight_room
from csattn.table.rows import RowTable, pack_codes

I32x8 = Vector(types.int32, 8)


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
@pytest.mark.parametrize("num_rows", [2, 8, 10, 16, 34])
@pytest.mark.parametrize("num_keys", [128, 256, 1024, 1152, 8192, 20_096])
def test_sums_of_rows_wrap_around_as_int16_does(score_bits: int, num_rows: int, num_keys: int) -> None:
    rng = np.random.default_rng(0)
    largest = 127 if score_bits == 8 else 7
    codes = rng.integers(-largest, largest + 1, (num_rows, 128 + num_keys)).astype(np.int8)
    packed = readonly(pack_codes(codes, score_bits).view(np.uint8))
    flat, starts = packed.reshape(-1), np.arange(-1, num_rows + 1) * packed.shape[1]
    starts[[0, -1]] = -(2**40)  # rows of others
    weights = rng.integers(-3000, 3000, num_rows + 2)
    scores = np.full(num_keys + 10, -777, np.int16)
    skipped, num_bytes = 128 * score_bits // 8, num_keys * score_bits // 8
    if score_bits == 8:
        rows.add_rows8(flat, starts, weights, 1, num_rows, skipped, num_bytes, scores, 5)
    else:
        rows.add_rows4(flat, starts, weights, 1, num_rows, skipped, num_bytes, scores, 5, 2, 0)
    want = (weights[1:-1] @ codes[:, 128:].astype(np.int64)).astype(np.int16)
    np.testing.assert_array_equal(scores[5:-5], want)
    assert (scores[:5] == -777).all() and (scores[-5:] == -777).all()


@exact_kernel
def _zips(a, b, low, high, fours):  # type: ignore[no-untyped-def]
    store(low, 0, lanes.zip_low(load(U16x32, a, 0), load(U16x32, b, 0)))
    store(high, 0, lanes.zip_high(load(U16x32, a, 0), load(U16x32, b, 0)))
    store(fours, 0, lanes.zip_fours(load(U16x32, a, 0), load(U16x32, b, 0)))


def test_zips_take_from_both_in_turn() -> None:
    a, b = np.arange(32, dtype=np.uint16), np.arange(100, 132, dtype=np.uint16)
    low, high, fours = np.zeros(32, np.uint16), np.zeros(32, np.uint16), np.zeros(64, np.uint16)
    _zips(a, b, low, high, fours)
    pairs = np.stack([a, b], axis=1).reshape(4, 8, 2)
    np.testing.assert_array_equal(low, pairs[:, :4].reshape(-1))
    np.testing.assert_array_equal(high, pairs[:, 4:].reshape(-1))
    np.testing.assert_array_equal(fours, np.stack([a.reshape(8, 4), b.reshape(8, 4)], axis=1).reshape(-1))


@exact_kernel
def _pack(vector, values, bits, count, packed, stored):  # type: ignore[no-untyped-def]
    lanes_packed = lanes.pack_lanes(load(vector, values, 0), bits)
    store(packed, 0, lanes_packed)
    lanes.store_first(stored, 1, lanes_packed, count)


@pytest.mark.parametrize("vector", [I32x8, I32x16])
@pytest.mark.parametrize("bits", [0, 1, 0b1010_0110, 0b1000_0000, 0xFF, 0xFFFF, 0x8001])
def test_lanes_are_packed_in_their_order(vector: Vector, bits: int) -> None:
    """A machine has an instruction for sixteen, or does both lane by lane."""
    values, stored = np.arange(100, 100 + vector.lanes, dtype=np.int32), np.full(20, -777, np.int32)
    want = [value for lane, value in enumerate(values) if bits >> lane & 1]
    packed = np.zeros(vector.lanes, np.int32)
    _pack(vector, values, np.uint64(bits), len(want), packed, stored)
    assert packed[: len(want)].tolist() == want
    assert stored.tolist() == [-777, *want, *[-777] * (19 - len(want))]


@exact_kernel
def _dots(sums, a, b):  # type: ignore[no-untyped-def]
    store(sums, 0, lanes.add_dots(load(I32x16, sums, 0), load(I16x32, a, 0), load(I16x32, b, 0)))


def test_dots_of_pairs_wrap_around_as_int32_does(rng: np.random.Generator) -> None:
    a, b = (rng.integers(-(2**15), 2**15, 32).astype(np.int16) for _ in range(2))
    a[:4] = b[:4] = -(2**15)
    sums = rng.integers(-(2**31), 2**31, 16).astype(np.int32)
    want = (sums + (a.astype(np.int64) * b).reshape(16, 2).sum(axis=1)).astype(np.int32)
    _dots(sums, a, b)
    np.testing.assert_array_equal(sums, want)


@pytest.mark.parametrize("num_subspaces, num_centroids, subspace_dim", [(1, 1, 1), (5, 17, 3), (4, 64, 8), (3, 16, 32)])
@pytest.mark.parametrize("group_size", [1, 3])
def test_matching_is_the_definition_to_the_bit(num_subspaces, num_centroids, subspace_dim, group_size, rng) -> None:
    head_dim = num_subspaces * subspace_dim
    q = rng.standard_normal((group_size, head_dim), dtype=np.float32)
    basis = rng.standard_normal((1, head_dim, head_dim), dtype=np.float32)
    codebooks = rng.standard_normal((1, num_subspaces, num_centroids, subspace_dim), dtype=np.float32)
    codebooks[..., num_centroids // 2, :] = codebooks[..., 0, :]  # of equals the lowest
    table = RowTable(np.zeros((1, num_subspaces, num_centroids, 0), np.int8), np.ones(codebooks.shape[:3], "f4"), 0)
    index = LayerIndex(basis, codebooks, basis, np.zeros((1, head_dim), np.float32), table, True)
    ids, weights = np.full((2, group_size, num_subspaces + 2), -777)
    weights = weights.astype(np.float64)
    for first in range(0, num_subspaces, 2):
        last = min(first + 2, num_subspaces)
        rotated = match.rotate(
            match.widen(q.reshape(-1)), basis.reshape(-1), head_dim, first * subspace_dim, last * subspace_dim
        )
        columns = index.codebook_columns[0, first:last].reshape(-1)
        sizes = first, last, num_centroids, subspace_dim, True
        match.match_centroids(rotated, columns, *sizes, ids.reshape(-1), weights.reshape(-1), num_subspaces + 2)
    for row in range(group_size):
        want_ids, want_weights = reference.match_centroids(q[row], index, 0)
        np.testing.assert_array_equal(ids[row, :-2], want_ids)
        np.testing.assert_array_equal(weights[row, :-2], want_weights)
    assert (ids[:, -2:] == -777).all()


@exact_kernel
def _exp2(x, slope, rounder, out):  # type: ignore[no-untyped-def]
    for i in range(0, len(x), 16):
        store(out, i, worth.exp2_lanes(load(F32x16, x, i), fill(F32x16, slope), fill(F32x16, rounder)))


@pytest.mark.parametrize("offset", [-20, 0, 94])
@pytest.mark.parametrize("slope", [1.0, 0.25])
def test_exp2_is_accurate(offset: int, slope: float) -> None:
    x = (np.linspace(-126 - offset, 94 - offset, 16 * 5000) / slope).astype(np.float32)
    out = np.empty_like(x)
    _exp2(x, np.float32(slope), worth.ROUNDER + offset, out)
    np.testing.assert_allclose(out, np.exp2(slope * x.astype(np.float64) + offset), rtol=4.2e-6)


def scores_of(kind: str, num_keys: int, rng: np.random.Generator) -> NDArray[Any]:
    """Scores of the two kinds; of the float ones some keys have none."""
    values = np.rint(rng.normal(0, 3000, num_keys))
    if kind == "int16":
        return values.astype(np.int16)
    scores = values.astype(np.float32)
    scores[rng.random(num_keys) < 0.3] = -0.0
    scores[0] = 0.0  # scored
    return scores


@pytest.mark.parametrize("kind", ["int16", "float32"])
@pytest.mark.parametrize("num_keys", [1, 15, 16, 33, 1000, 40_000])
@pytest.mark.parametrize("slope", [0.0, 0.001, 0.02, 3.0])
def test_powers_of_a_range(kind: str, num_keys: int, slope: float, rng: np.random.Generator) -> None:
    padded = np.full(num_keys + 32, 32_000, np.int16 if kind == "int16" else np.float32)  # tempting neighbours
    padded[5 : 5 + num_keys] = scores = scores_of(kind, num_keys, rng)
    powers = np.full(num_keys + 32, np.nan, np.float32)
    shift, total, lowest = worth.keep_powers(padded, powers, 5, num_keys, np.float32(slope))
    scored = np.ones(num_keys, bool) if kind == "int16" else scores.view(np.int32) != worth.NOT_SCORED
    exponents = np.float64(np.float32(slope)) * scores[scored].astype(np.float64)
    assert shift % 2 == 0 and abs(shift - exponents.max()) <= 1
    assert lowest == pytest.approx(exponents.min(), rel=1e-6, abs=1e-6)
    want = np.exp2(np.maximum(exponents - shift, -140))
    assert total == pytest.approx(want.sum(), rel=5e-6)
    if not worth.too_wide(shift, lowest):
        got = powers[5 : 5 + num_keys]
        np.testing.assert_allclose(got[scored], want, rtol=5e-6)
        assert (got[~scored] == 0).all()
    assert np.isnan(powers[:5]).all()


def test_a_range_without_scores_has_no_powers() -> None:
    scores, powers = np.full(64, -0.0, np.float32), np.full(64, np.nan, np.float32)
    assert worth.keep_powers(scores, powers, 0, 48, np.float32(1)) == (worth.NO_SHIFT, 0.0, np.inf)
    assert (powers[:48] == 0).all()


@exact_kernel
def _both_worths(scores, powers, stride, factors, terms, by_power, by_share):  # type: ignore[no-untyped-def]
    for at in range(0, len(by_power), 16):
        store(by_power, at, worth.worth_of_powers(powers, stride, at, factors, 0, len(factors)))
        store(by_share, at, worth.worth_of_shares(scores, stride, at, terms))


@pytest.mark.parametrize("kind", ["int16", "float32"])
@pytest.mark.parametrize("shifted", [-38, 0, 22])
def test_worth_is_the_same_whether_from_powers_or_from_scores(kind: str, shifted: int, rng) -> None:
    """To the bit, and whatever the range's own shift is: a tie across ranges is a tie."""
    slopes, num_keys = (0.003, 0.0011, 0.0047), 800
    scores = np.stack([scores_of(kind, num_keys, rng) for _ in slopes])
    powers, factors = np.empty((3, num_keys), np.float32), np.empty(3, np.float32)
    terms = np.empty((3, 4), np.float32)
    for row, slope in enumerate(slopes):
        shift, total, _ = worth.keep_powers(scores[row], powers[row], 0, num_keys, np.float32(slope))
        terms[row] = worth.share_terms(np.float64(np.float32(slope)), shift + shifted, total * 2.0**-shifted)
        factors[row] = np.ldexp(1.0 / (total * 2.0**-shifted), worth.HEADROOM - shifted)
    by_power, by_share = np.full((2, num_keys), -777, np.int32)
    _both_worths(scores.reshape(-1), powers.reshape(-1), num_keys, factors, terms.reshape(-1), by_power, by_share)
    np.testing.assert_array_equal(by_power, by_share)
    scored = np.ones((3, num_keys), bool) if kind == "int16" else scores.view(np.int32) != worth.NOT_SCORED
    exponents = np.array(slopes)[:, None] * scores.astype(np.float64)
    shares = np.where(scored, np.exp2(exponents - exponents.max(axis=1, keepdims=True)), 0)
    want = (shares / shares.sum(axis=1, keepdims=True)).sum(axis=0)
    np.testing.assert_allclose(by_power.view(np.float32), want * 2.0**worth.HEADROOM, rtol=1e-4)


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
