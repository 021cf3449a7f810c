"""The reference implementation of the sketch has the properties that its definition claims."""

import numpy as np
import pytest

from csattn.config import SketchConfig
from csattn.sketch import reference
from csattn.sketch.codes import coord_bits, pack_codes, unpack_codes
from csattn.sketch.index import min_top_k_for_marks, num_marked
from tests.sketch.synthetic import make_heads, make_sketch


@pytest.mark.parametrize("num_keys", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize(("num_fine", "num_coarse"), [(1, 0), (2, 2), (3, 1), (0, 2)])
def test_unpacking_returns_the_packed_codes(num_keys, num_fine, num_coarse, rng):
    bits = coord_bits(num_fine, num_coarse)
    codes = rng.integers(0, 2**bits, (3, num_keys, len(bits)), dtype=np.uint8)
    packed = pack_codes(codes, num_fine, num_coarse)
    assert packed.dtype == np.uint32 and packed.shape == (3, -(-num_keys // 64), num_fine + num_coarse, 64)
    np.testing.assert_array_equal(unpack_codes(packed, num_keys, num_fine), codes)


def test_coordinates_are_at_their_documented_bits_of_a_word():
    codes = np.zeros((1, 24), np.uint8)
    codes[0, :8], codes[0, 8:] = np.arange(8), np.arange(16) % 4
    fine, coarse = (int(word) for word in pack_codes(codes, 1, 1)[0, :, 0])
    assert [fine >> 8 * byte + shift & 15 for shift in (0, 4) for byte in range(4)] == list(range(8))
    assert [coarse >> 8 * byte + shift & 3 for shift in (0, 2, 4, 6) for byte in range(4)] == [0, 1, 2, 3] * 4


@pytest.mark.parametrize(
    ("head_dim", "words"), [(8, (1, 0)), (16, (1, 0)), (32, (1, 1)), (64, (2, 2)), (80, (2, 2)), (128, (4, 4))]
)
def test_the_number_of_words_per_key(head_dim, words):
    assert SketchConfig().words(head_dim) == words


@pytest.mark.parametrize(
    ("context_len", "starts"),
    [(1, [0]), (8192, [0]), (12287, [0]), (12289, [0, 6144]), (32768, [0, 8192, 16384, 24576])],
)
def test_segment_starts_of_a_context(context_len, starts):
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


def logits_of(q, index, head, scale):
    """Return a query's logits in octaves."""
    bases, exponent, scores = reference.score_group(q[None], index, head, scale)
    return bases[0] + 2.0**exponent * scores[0]


@pytest.mark.parametrize("segments", [(0,), (0, 1024), (0, 1024, 2048)])
def test_scores_follow_the_dot_products(segments, rng):
    q, k, v = make_heads(rng, 2, 3, 2100, 64)
    index = make_sketch(q, k, v, 2, 2, segments)
    for row in range(6):
        exact = k[row // 3] @ q[row, -1]
        error = logits_of(q[row, -1], index, row // 3, 0.1) / (0.1 * reference.LOG2_E) - exact
        assert np.square(error).mean() < 0.05 * exact.var()
        assert abs(error.mean()) < 0.05 * exact.std()


def test_all_coordinates_in_eight_bits_are_nearly_exact(rng, monkeypatch):
    # steps so large that no code is clipped
    monkeypatch.setitem(reference.NORMAL_STEP, 8, 0.05)
    monkeypatch.setattr(reference, "STEP_MULTIPLES", (1.0,))
    q, k, v = make_heads(rng, 1, 1, 1000, 64)
    bits = np.full(64, 8)
    made, codes = fit_all(q, k[0], v[0], bits)
    assert codes.min() > 0 and codes.max() < 255
    logits = q[0, 0] @ made.key_mean + (codes - 127.5) @ (q[0, 0] @ made.query_transform)
    assert np.abs(logits - k[0] @ q[0, 0]).max() < 0.1 * (k[0] @ q[0, 0]).std()


@pytest.mark.parametrize("segments", [(0,), (0, 1024)])
def test_attend_rest_is_attention_to_coded_rows(segments, rng):
    q, k, v = make_heads(rng, 2, 2, 1200, 64)
    index = make_sketch(q, k, v, 2, 2, segments)
    is_rest = rng.random((2, 1200)) < 0.8
    scale = 0.02
    out, lse = reference.attend_rest(q[:, 0], index, is_rest, scale)
    for row in range(4):
        rows = is_rest[row // 2]
        coded = np.exp2(logits_of(q[row, 0], index, row // 2, scale)[rows])
        np.testing.assert_allclose(lse[row], np.log(coded.sum()), atol=1e-3)
        weights = np.exp(scale * k[row // 2][rows] @ q[row, 0])
        np.testing.assert_allclose(lse[row], np.log(weights.sum()), atol=0.05)
        exact = weights @ v[row // 2][rows] / weights.sum()
        unweighted = v[row // 2][rows].mean(0)
        assert np.square(out[row] - exact).sum() < 0.1 * np.square(unweighted - exact).sum()


def test_an_empty_rest_has_no_weight(rng):
    q, k, v = make_heads(rng, 1, 2, 100, 32)
    out, lse = reference.attend_rest(q[:, 0], make_sketch(q, k, v, 1, 1), np.zeros((1, 100), bool), 0.1)
    assert not out.any() and (lse == -np.inf).all()


@pytest.mark.parametrize("num_rows", [1, 2, 20])
def test_fewer_rows_than_dimensions_give_a_finite_sketch(num_rows, rng):
    q, k, v = make_heads(rng, 1, 2, num_rows, 64)
    index = make_sketch(q, k, v, 2, 2)
    assert all(np.isfinite(array).all() for array in (index.query_transform, index.value_transform, index.value_mean))
    _, _, scores = reference.score_group(q[:, 0], index, 0, 0.1)
    assert scores.shape == (2, num_rows)


def test_constant_keys_have_equal_scores(rng):
    q, _, v = make_heads(rng, 1, 2, 100, 32)
    k = np.full((1, 100, 32), 2.5, np.float32)
    bases, _, scores = reference.score_group(q[:, 0], make_sketch(q, k, v, 1, 1), 0, 1.0)
    assert not scores.any()
    np.testing.assert_allclose(bases / reference.LOG2_E, q[:, 0] @ k[0, 0], rtol=1e-5)


@pytest.mark.parametrize("fault", [np.nan, np.inf, 1e38])
def test_a_query_that_is_not_finite_scores_all_keys_alike_without_affecting_others(fault, rng):
    q, k, v = make_heads(rng, 1, 3, 100, 32)
    index = make_sketch(q, k, v, 1, 1)
    group = q[:, 0].copy()
    group[1, 3] = fault
    with np.errstate(invalid="ignore", over="ignore"):
        _, exponent, scores = reference.score_group(group, index, 0, 0.1)
    assert not scores[1].any()
    _, alone, others = reference.score_group(group[[0, 2]], index, 0, 0.1)
    np.testing.assert_array_equal(scores[[0, 2]], others)
    assert exponent == alone


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e3, 1e20])
def test_scores_fit_into_16_bits_whatever_the_queries(scale, rng):
    q, k, v = make_heads(rng, 1, 2, 300, 256)
    index = make_sketch(q, k, v, 8, 8)
    _, exponent, scores = reference.score_group((q[:, 0] * [[scale], [scale / 7]]).astype(np.float32), index, 0, 0.1)
    assert np.abs(scores.astype(int)).max() <= 32767
    if -15 < exponent < 15:
        assert np.abs(scores[0].astype(int)).max() > 300


@pytest.mark.parametrize("exponent", [-12, -8, -4, 0, 2])
def test_normalisers_approximate_the_logarithms_of_sums(exponent, rng):
    for size in (1, 5.0, 30.0, 900.0):
        octaves = size * rng.standard_normal(500)
        scores = np.rint(octaves / 2.0**exponent).clip(-32767, 32767).astype(np.int16)
        x = 2.0**exponent * np.pad(scores.astype(np.float64), (0, 4), constant_values=-1e9).reshape(-1, 8).max(axis=1)
        exact = x.max() + np.log2(np.exp2(x - x.max()).sum())
        assert -1.1 - 2.0**exponent <= reference.normaliser(scores, exponent) * 2.0**exponent - exact <= 0.1


def test_normalisers_do_not_overflow():
    for exponent in (-15, -1, 0, 1, 15):
        for score in (-32767, 0, 32767):
            found = reference.normaliser(np.full(2**20, score, np.int16), exponent)
            assert abs(found) < 2**31


def test_the_greatest_attention_shares_have_the_greatest_group_scores(rng):
    scores = rng.integers(-9000, 9000, (3, 800)).astype(np.int16)
    scores[1] //= 5
    shares = np.exp2(scores / 256.0)
    shares /= shares.sum(axis=1, keepdims=True)
    ordered = np.argsort(-reference.group_scores(scores, -8), kind="stable")[:25]
    assert np.sort(shares.max(axis=0))[-25:].sum() < 1.1 * shares.max(axis=0)[ordered].sum()


def test_a_query_with_a_wide_range_of_logits_does_not_dominate_its_group(rng):
    """As in Qwen2.5, where RoPE rotates the keys' biases with position: many rows are near the largest logit."""
    scores = np.stack([32000 * np.sin(np.arange(800) / 20.0), 1000 * rng.standard_normal(800)]).astype(np.int16)
    group_scores = reference.group_scores(scores, -7)  # logits to 250 octaves, and to some 25
    chosen = np.argsort(-group_scores, kind="stable")[:30]
    for of_query in scores:
        shares = np.exp2((of_query.astype(int) - of_query.max()) / 128.0)
        assert shares[chosen].sum() > 0.6 * shares.sum()


def test_a_single_querys_group_score_is_its_score_and_marked_rows_score_highest(rng):
    scores = rng.integers(-30000, 30000, (1, 100)).astype(np.int16)
    np.testing.assert_array_equal(reference.group_scores(scores, -8), scores[0])
    marks = rng.random(100) < 0.1
    assert (reference.group_scores(scores, -8, marks)[marks] == 32767).all()


def test_rows_that_codes_reconstruct_worst_are_marked(rng):
    q, k, v = make_heads(rng, 1, 2, 1200, 64)
    k[0, [7, 1100]] *= 12.0
    index = make_sketch(q, k, v, 2, 2, (0, 1024))
    marked = np.flatnonzero(index.marked_rows(0))
    assert 7 in marked and len(marked) == 2 == num_marked(1200, (0, 1024))
    assert index.uses_marks(4) and not index.uses_marks(3)


def test_a_mean_common_to_all_segments_does_not_coarsen_the_unit(rng):
    coordinates, bits = rng.standard_normal((2, 8)).astype(np.float32), np.array([2] * 6 + [4] * 2)
    units = [reference.required_unit(np.full(2, mean, np.float32), coordinates, bits) for mean in (0.0, 5000.0)]
    assert units[0] == units[1]
    assert reference.required_unit(np.array([0.0, 5000.0], np.float32), coordinates, bits) > units[0]


def test_queries_of_one_direction_give_an_invertible_metric():
    q = np.outer([1.0, -2.0, 3.0], np.eye(4)[1])
    root, inverse = reference._query_metric(q)
    least = np.sqrt(reference.LEAST_QUERY_ENERGY)
    np.testing.assert_allclose(root, np.diag([least, 1.0, least, least]))
    np.testing.assert_allclose(root @ inverse, np.eye(4), atol=1e-12)


def test_the_regression_is_least_squares_with_a_ridge(rng):
    u, v = rng.standard_normal((5, 3)), rng.standard_normal((5, 2))
    x = u - u.mean(0)
    ridge = reference.RIDGE * (np.square(x).sum() / 3 + 5)
    np.testing.assert_allclose((x.T @ x + ridge * np.eye(3)) @ reference._regression(u, v), x.T @ (v - v.mean(0)))


def test_marks_are_used_if_they_take_at_most_half_of_the_choice():
    starts, context_len = [0, 4096], 8000
    count = num_marked(context_len, starts)
    assert count > 2
    assert min_top_k_for_marks(context_len, starts) == 2 * count
