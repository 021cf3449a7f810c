"""The definition of the sketch does what it says."""

import numpy as np
import pytest

from csattn.config import SketchConfig
from csattn.sketch import reference
from csattn.sketch.codes import coord_bits, pack_codes, unpack_codes
from tests.sketch.synthetic import make_heads, make_sketch


@pytest.mark.parametrize("num_keys", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize(("num_fine", "num_coarse"), [(1, 0), (2, 2), (3, 1), (0, 2)])
def test_codes_come_back_from_their_words(num_keys, num_fine, num_coarse, rng):
    bits = coord_bits(num_fine, num_coarse)
    codes = rng.integers(0, 2**bits, (3, num_keys, len(bits)), dtype=np.uint8)
    packed = pack_codes(codes, num_fine, num_coarse)
    assert packed.dtype == np.uint32 and packed.shape == (3, -(-num_keys // 64), num_fine + num_coarse, 64)
    np.testing.assert_array_equal(unpack_codes(packed, num_keys, num_fine), codes)


def test_a_word_holds_its_coordinates_where_it_says():
    codes = np.zeros((1, 24), np.uint8)
    codes[0, :8], codes[0, 8:] = np.arange(8), np.arange(16) % 4
    fine, coarse = (int(word) for word in pack_codes(codes, 1, 1)[0, :, 0])
    assert [fine >> 8 * byte + shift & 15 for shift in (0, 4) for byte in range(4)] == list(range(8))
    assert [coarse >> 8 * byte + shift & 3 for shift in (0, 2, 4, 6) for byte in range(4)] == [0, 1, 2, 3] * 4


@pytest.mark.parametrize(
    ("head_dim", "words"), [(8, (1, 0)), (16, (1, 0)), (32, (1, 1)), (64, (2, 2)), (80, (2, 2)), (128, (4, 4))]
)
def test_words_of_a_key(head_dim, words):
    assert SketchConfig().words(head_dim) == words


@pytest.mark.parametrize(
    ("context_len", "starts"),
    [(1, [0]), (8192, [0]), (12287, [0]), (12289, [0, 6144]), (32768, [0, 8192, 16384, 24576])],
)
def test_segments(context_len, starts):
    assert SketchConfig().segment_starts(context_len) == starts


def fit_all(q, k, v, bits):
    made = reference.fit(q.reshape(-1, q.shape[-1]), k, v, bits)
    return made, reference.encode(k, made.key_mean, made.key_exponent, made.key_transform, bits)


def test_codes_do_not_depend_on_the_order_of_sums(rng):
    q, k, v = make_heads(rng, 1, 2, 500, 128)
    bits = coord_bits(4, 4)
    made, codes = fit_all(q, k[0], v[0], bits)
    order = rng.permutation(128)
    again = reference.encode(k[0][:, order], made.key_mean[order], made.key_exponent, made.key_transform[order], bits)
    np.testing.assert_array_equal(codes, again)
    assert len(np.unique(codes[:, :32])) == 16 and len(np.unique(codes[:, 32:])) == 4


def logits_of(q, index, head):
    base, unit, scores = reference.score_head(q, index, head)
    return base + unit * scores


@pytest.mark.parametrize("segments", [(0,), (0, 1024), (0, 1024, 2048)])
def test_scores_follow_the_dot_products(segments, rng):
    q, k, v = make_heads(rng, 2, 3, 2100, 64)
    index = make_sketch(q, k, v, 2, 2, segments)
    for row in range(6):
        exact = k[row // 3] @ q[row, -1]
        error = logits_of(q[row, -1], index, row // 3) - exact
        assert np.square(error).mean() < 0.05 * exact.var()
        assert abs(error.mean()) < 0.05 * exact.std()


def test_all_coordinates_in_eight_bits_are_nearly_exact(rng, monkeypatch):
    # steps such that nothing is clipped
    monkeypatch.setitem(reference.NORMAL_STEP, 8, 0.05)
    monkeypatch.setattr(reference, "STEP_MULTIPLES", (1.0,))
    q, k, v = make_heads(rng, 1, 1, 1000, 64)
    bits = np.full(64, 8)
    made, codes = fit_all(q, k[0], v[0], bits)
    assert codes.min() > 0 and codes.max() < 255
    logits = q[0, 0] @ made.key_mean + reference.signed(codes, bits) @ (q[0, 0] @ made.query_transform)
    assert np.abs(logits - k[0] @ q[0, 0]).max() < 0.1 * (k[0] @ q[0, 0]).std()


@pytest.mark.parametrize("segments", [(0,), (0, 1024)])
def test_the_rest_is_attention_to_coded_rows(segments, rng):
    q, k, v = make_heads(rng, 2, 2, 1200, 64)
    index = make_sketch(q, k, v, 2, 2, segments)
    is_rest = rng.random((2, 1200)) < 0.8
    scale = 0.02
    out, lse = reference.attend_rest(q[:, 0], index, is_rest, scale)
    for row in range(4):
        rows = is_rest[row // 2]
        coded = np.exp(scale * logits_of(q[row, 0], index, row // 2)[rows])
        np.testing.assert_allclose(lse[row], np.log(coded.sum()), rtol=1e-5)
        weights = np.exp(scale * k[row // 2][rows] @ q[row, 0])
        np.testing.assert_allclose(lse[row], np.log(weights.sum()), atol=0.05)
        exact = weights @ v[row // 2][rows] / weights.sum()
        unweighted = v[row // 2][rows].mean(0)
        assert np.square(out[row] - exact).sum() < 0.1 * np.square(unweighted - exact).sum()


def test_no_rest_has_no_weight(rng):
    q, k, v = make_heads(rng, 1, 2, 100, 32)
    out, lse = reference.attend_rest(q[:, 0], make_sketch(q, k, v, 1, 1), np.zeros((1, 100), bool), 0.1)
    assert not out.any() and (lse == -np.inf).all()


@pytest.mark.parametrize("num_rows", [1, 2, 20])
def test_fewer_rows_than_dimensions(num_rows, rng):
    q, k, v = make_heads(rng, 1, 2, num_rows, 64)
    index = make_sketch(q, k, v, 2, 2)
    assert all(np.isfinite(array).all() for array in (index.query_transform, index.value_transform, index.value_mean))
    _, _, scores = reference.score_head(q[0, 0], index, 0)
    assert len(scores) == num_rows


def test_constant_keys_are_all_alike(rng):
    q, _, v = make_heads(rng, 1, 2, 100, 32)
    k = np.full((1, 100, 32), 2.5, np.float32)
    index = make_sketch(q, k, v, 1, 1)
    base, unit, scores = reference.score_head(q[0, 0], index, 0)
    assert unit == 0 and not scores.any()
    np.testing.assert_allclose(base, k[0, 0] @ q[0, 0], rtol=1e-5)


@pytest.mark.parametrize("fault", [np.nan, np.inf])
def test_a_query_that_is_not_finite_scores_all_keys_alike(fault, rng):
    q, k, v = make_heads(rng, 1, 1, 100, 32)
    index = make_sketch(q, k, v, 1, 1)
    broken = q[0, 0].copy()
    broken[3] = fault
    with np.errstate(invalid="ignore"):
        _, unit, scores = reference.score_head(broken, index, 0)
    assert unit == 0 and not scores.any()


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e4, 1e20])
def test_scores_fit_into_16_bits_whatever_the_query(scale, rng):
    q, k, v = make_heads(rng, 1, 1, 300, 256)
    index = make_sketch(q, k, v, 8, 8)
    _, _, scores = reference.score_head((q[0, 0] * scale).astype(np.float32), index, 0)
    assert 1000 < np.abs(scores.astype(int)).max() <= 32767
