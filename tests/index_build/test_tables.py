"""Lists against their definition: of every centroid the keys that it scores highest."""

import numpy as np
import pytest
import torch

from index_build.tables import top_l, top_l_sorted
from tests.index_build.tables import centroids_and_keys, list_table, scores_by_definition


@pytest.mark.parametrize(("num_keys", "list_len"), [(1, 1), (7, 7), (64, 16), (257, 64)])
def test_top_l_is_sorted_by_score_then_index(num_keys: int, list_len: int, rng: np.random.Generator) -> None:
    rows = rng.integers(-4, 5, (6, num_keys)).astype(np.float32)  # many ties
    indices, scores = top_l(rows, list_len)
    for row, got, got_scores in zip(rows, indices, scores, strict=True):
        want = sorted(range(num_keys), key=lambda i: (-row[i], i))[:list_len]
        assert got.tolist() == want
        assert got_scores.tolist() == row[want].tolist()


@pytest.mark.parametrize(("num_keys", "list_len"), [(1, 1), (7, 7), (64, 16), (257, 64)])
def test_top_l_in_torch_is_top_l(num_keys: int, list_len: int, rng: np.random.Generator) -> None:
    rows = rng.standard_normal((6, num_keys)).astype(np.float32)
    rows[0], rows[1, ::2], rows[2, ::3] = 0.0, -0.0, 1e9
    rows[3] = rng.integers(-4, 5, num_keys)
    rows[4] *= 1e-7
    for got, want in zip(top_l_sorted(torch.from_numpy(rows), list_len), top_l(rows, list_len), strict=True):
        assert got.numpy().dtype == want.dtype
        assert got.numpy().tobytes() == want.tobytes()


def test_top_l_stores_no_negative_zero_and_no_infinity() -> None:
    _, scores = top_l(np.array([[-0.0, 1e-9, -1e-9, 1e9, -1e9]], dtype=np.float32), 5)
    assert np.isfinite(scores).all()
    assert not (scores.view(np.uint16) == 0x8000).any()


@pytest.mark.parametrize("context_len", [40, 1023, 1025])
def test_lists_hold_the_best_keys_of_each_centroid(context_len: int, rng: np.random.Generator) -> None:
    codebooks, keys = centroids_and_keys(rng, 2, 2, 5, 4, context_len)
    indices, scores = list_table(codebooks, keys, 25)
    wanted = scores_by_definition(codebooks, keys)
    for head in range(2):
        for b in range(2):
            want_indices, want_scores = top_l(wanted[head, b].numpy(), 25)
            np.testing.assert_array_equal(indices[head, b].numpy(), want_indices)
            np.testing.assert_array_equal(scores[head, b].numpy(), want_scores)
