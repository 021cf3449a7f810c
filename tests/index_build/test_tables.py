"""Tables against their definition: every centroid's score of every key, quantised or cut to the best."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from csattn.table.rows import unpack_codes
from index_build.tables import make_list_table, make_row_table, quantise_rows, top_l


def scores_of(codebook: NDArray[np.float32], keys: NDArray[np.float32]) -> NDArray[np.float64]:
    return codebook.astype(np.float64) @ keys.astype(np.float64).T


@pytest.mark.parametrize("score_bits", [4, 8])
@pytest.mark.parametrize("context_len", [1, 63, 64, 65, 331])
def test_rows_hold_every_score_to_half_a_step(score_bits: int, context_len: int, rng: np.random.Generator) -> None:
    codebooks = rng.standard_normal((2, 3, 5, 4)).astype(np.float32)
    keys = rng.standard_normal((2, context_len, 12)).astype(np.float32)
    table = make_row_table(codebooks, [torch.from_numpy(k) for k in keys], score_bits)
    codes = unpack_codes(table.codes, context_len)
    for head in range(2):
        for b in range(3):
            want = scores_of(codebooks[head, b], keys[head][:, 4 * b : 4 * b + 4])
            scales = table.scales[head, b][:, None].astype(np.float64)
            inside = np.abs(want) <= scales * table.largest_code
            got = codes[head, b] * scales
            assert (np.abs(got - want)[inside] <= 0.5 * np.broadcast_to(scales, want.shape)[inside] * 1.0001).all()
            assert (np.abs(codes[head, b])[~inside] == table.largest_code).all()


def test_outliers_are_clipped_with_4_bits_only() -> None:
    scores = torch.randn(1, 10_000)
    scores[0, 0] = 1000.0
    _, fine = quantise_rows(scores, 8)
    codes, coarse = quantise_rows(scores, 4)
    assert fine * 127 == pytest.approx(1000.0)
    assert coarse * 7 < 100.0
    assert codes[0, 0] == 7


def test_a_row_of_zeros_has_scale_zero_and_no_nan() -> None:
    codes, scales = quantise_rows(torch.zeros(2, 50), 4)
    assert not scales.any()
    assert not codes.any()


@pytest.mark.parametrize(("num_keys", "list_len"), [(1, 1), (7, 7), (64, 16), (257, 64)])
def test_top_l_is_sorted_by_score_then_index(num_keys: int, list_len: int, rng: np.random.Generator) -> None:
    rows = rng.integers(-4, 5, (6, num_keys)).astype(np.float32)  # many ties
    indices, scores = top_l(rows, list_len)
    for row, got, got_scores in zip(rows, indices, scores, strict=True):
        want = sorted(range(num_keys), key=lambda i: (-row[i], i))[:list_len]
        assert got.tolist() == want
        assert got_scores.tolist() == row[want].tolist()


def test_top_l_stores_no_negative_zero_and_no_infinity() -> None:
    _, scores = top_l(np.array([[-0.0, 1e-9, -1e-9, 1e9, -1e9]], dtype=np.float32), 5)
    assert np.isfinite(scores).all()
    assert not (scores.view(np.uint16) == 0x8000).any()


def test_lists_hold_the_best_keys_of_each_centroid(rng: np.random.Generator) -> None:
    codebooks = rng.standard_normal((1, 2, 5, 4)).astype(np.float32)
    keys = rng.standard_normal((1, 100, 8)).astype(np.float32)
    table = make_list_table(codebooks, [torch.from_numpy(keys[0])], 25)
    for b in range(2):
        want = scores_of(codebooks[0, b], keys[0][:, 4 * b : 4 * b + 4])
        for centroid in range(5):
            worst_listed = want[centroid, table.indices[0, b, centroid]].min()
            unlisted = np.setdiff1d(np.arange(100), table.indices[0, b, centroid])
            assert worst_listed >= want[centroid, unlisted].max() - 2e-3  # float16 ties
