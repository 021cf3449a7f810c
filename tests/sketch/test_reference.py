"""The definition of the sketch does what it says."""

import numpy as np
import pytest

from csattn.sketch import reference
from csattn.sketch.codes import pack_codes, unpack_codes
from tests.sketch.synthetic import make_heads, make_sketch


@pytest.mark.parametrize("num_keys", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("num_coords", [8, 20, 32])
def test_codes_come_back_from_their_words(num_keys, num_coords, rng):
    codes = rng.integers(0, 16, (3, num_keys, num_coords), dtype=np.uint8)
    packed = pack_codes(codes)
    assert packed.dtype == np.uint32 and packed.shape == (3, -(-num_keys // 64), -(-num_coords // 8), 64)
    np.testing.assert_array_equal(unpack_codes(packed, num_keys, num_coords), codes)


def test_a_word_holds_its_coordinates_where_it_says():
    codes = np.zeros((1, 16), np.uint8)
    codes[0, 8:] = np.arange(8)
    word = int(pack_codes(codes)[0, 1, 0])
    assert [word >> 8 * byte & 15 for byte in range(4)] == [0, 1, 2, 3]
    assert [word >> 8 * byte + 4 & 15 for byte in range(4)] == [4, 5, 6, 7]


def test_codes_do_not_depend_on_the_order_of_sums(rng):
    q, k, v = make_heads(rng, 1, 2, 500, 128)
    made = reference.fit(q.reshape(-1, 128), k[0], v[0], 64, 32)
    codes = reference.encode(k[0], made.key_mean, made.key_exponent, made.key_transform)
    order = rng.permutation(128)
    again = reference.encode(k[0][:, order], made.key_mean[order], made.key_exponent, made.key_transform[order])
    np.testing.assert_array_equal(codes, again)
    assert len(np.unique(codes)) == 16


def logits_of(q, index, head):
    base, unit, scores = reference.score_head(q, index, head)
    return base + unit * scores


@pytest.mark.parametrize("segments", [(0,), (0, 1024), (0, 1024, 2048)])
def test_scores_follow_the_dot_products(segments, rng):
    q, k, v = make_heads(rng, 2, 3, 2100, 64)
    index = make_sketch(q, k, v, 32, segments)
    for row in range(6):
        exact = k[row // 3] @ q[row, -1]
        error = logits_of(q[row, -1], index, row // 3) - exact
        assert np.square(error).mean() < 0.05 * exact.var()
        assert abs(error.mean()) < 0.05 * exact.std()


def test_all_coordinates_in_eight_bits_are_nearly_exact(rng, monkeypatch):
    # steps such that nothing is clipped
    monkeypatch.setitem(reference.STEPS, 8, (0.05,))
    q, k, v = make_heads(rng, 1, 1, 1000, 64)
    made = reference.fit(q[0], k[0], v[0], 64, 64, bits=8)
    codes = reference.encode(k[0], made.key_mean, made.key_exponent, made.key_transform, bits=8)
    assert codes.min() > 0 and codes.max() < 255
    logits = q[0, 0] @ made.key_mean + reference.signed(codes, 8) @ (q[0, 0] @ made.query_transform)
    assert np.abs(logits - k[0] @ q[0, 0]).max() < 0.1 * (k[0] @ q[0, 0]).std()


def test_the_rest_is_attention_to_coded_rows(rng):
    q, k, v = make_heads(rng, 2, 2, 700, 32)
    index = make_sketch(q, k, v, 16)
    is_rest = rng.random((2, 700)) < 0.8
    out, lse = reference.attend_rest(q[:, 0], index, is_rest, 0.1)
    for row in range(4):
        rows = is_rest[row // 2]
        weights = np.exp(0.1 * logits_of(q[row, 0], index, row // 2)[rows])
        np.testing.assert_allclose(lse[row], np.log(weights.sum()), rtol=1e-5)
        expected = weights @ reference.coded_values(index, row // 2)[rows] / weights.sum()
        np.testing.assert_allclose(out[row], expected, rtol=1e-4, atol=1e-4)
    # and coded rows are like the rows
    exact = np.exp(0.1 * k[0][is_rest[0]] @ q[0, 0])
    np.testing.assert_allclose(lse[0], np.log(exact.sum()), atol=0.2)


def test_no_rest_has_no_weight(rng):
    q, k, v = make_heads(rng, 1, 2, 100, 32)
    out, lse = reference.attend_rest(q[:, 0], make_sketch(q, k, v, 16), np.zeros((1, 100), bool), 0.1)
    assert not out.any() and (lse == -np.inf).all()


@pytest.mark.parametrize("num_rows", [1, 2, 20])
def test_fewer_rows_than_dimensions(num_rows, rng):
    q, k, v = make_heads(rng, 1, 2, num_rows, 64)
    index = make_sketch(q, k, v, 32)
    assert all(np.isfinite(array).all() for array in (index.query_transform, index.value_transform, index.value_mean))
    _, _, scores = reference.score_head(q[0, 0], index, 0)
    assert len(scores) == num_rows


def test_constant_keys_are_all_alike(rng):
    q, _, v = make_heads(rng, 1, 2, 100, 32)
    k = np.full((1, 100, 32), 2.5, np.float32)
    index = make_sketch(q, k, v, 16)
    base, unit, scores = reference.score_head(q[0, 0], index, 0)
    assert unit == 0 and not scores.any()
    np.testing.assert_allclose(base, k[0, 0] @ q[0, 0], rtol=1e-5)


@pytest.mark.parametrize("fault", [np.nan, np.inf])
def test_a_query_that_is_not_finite_scores_all_keys_alike(fault, rng):
    q, k, v = make_heads(rng, 1, 1, 100, 32)
    index = make_sketch(q, k, v, 16)
    broken = q[0, 0].copy()
    broken[3] = fault
    with np.errstate(invalid="ignore"):
        _, unit, scores = reference.score_head(broken, index, 0)
    assert unit == 0 and not scores.any()


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e4, 1e20])
def test_scores_fit_into_16_bits_whatever_the_query(scale, rng):
    q, k, v = make_heads(rng, 1, 1, 300, 256)
    index = make_sketch(q, k, v, 128)
    _, _, scores = reference.score_head((q[0, 0] * scale).astype(np.float32), index, 0)
    assert 1000 < np.abs(scores.astype(int)).max() <= 32767
