"""Lists against their definition: of every centroid the keys that it scores highest."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from csattn.torch_threads import threads_kept
from index_build import layer
from index_build.layer import centroid_scores, top_l, top_l_sorted
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


@pytest.mark.parametrize("context_len", [40, 2047, 2049])
def test_lists_hold_the_best_keys_of_each_centroid(
    context_len: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "_SUMS", 5 * 1024)
    codebooks, keys = centroids_and_keys(rng, 2, 2, 5, 4, context_len)
    indices, scores = list_table(codebooks, keys, 25)
    wanted = scores_by_definition(codebooks, keys)
    for head in range(2):
        for b in range(2):
            want_indices, want_scores = top_l(wanted[head, b].numpy(), 25)
            np.testing.assert_array_equal(indices[head, b], want_indices)
            np.testing.assert_array_equal(scores[head, b], want_scores)


def test_sums_are_in_float64_and_in_the_order_of_the_dimensions() -> None:
    keys = torch.tensor([[1.0, 1.0], [2.0**60, 2.0**30], [-(2.0**60), -(2.0**30)]])
    assert centroid_scores(torch.ones(1, 3), keys).tolist() == [[0.0, 1.0]]


def test_threads_that_begin_later_have_as_many_of_torch_as_before(rng: np.random.Generator) -> None:
    made_of = centroids_and_keys(rng, 4, 4, 8, 4, 200)
    with threads_kept():
        torch.set_num_threads(2)
        for _ in range(20):
            list_table(*made_of, 20)
            with ThreadPoolExecutor(1) as later:
                assert later.submit(torch.get_num_threads).result() == 2


@pytest.mark.gpu
@pytest.mark.parametrize(("context_len", "list_len"), [(1, 1), (257, 257), (1000, 250), (4097, 1), (70_001, 17_500)])
def test_lists_of_the_gpu_are_lists_of_the_cpu(context_len: int, list_len: int, rng: np.random.Generator) -> None:
    codebooks, keys = centroids_and_keys(rng, 2, 2, 130, 8, context_len)
    keys = (keys * 8).round() / 8  # many ties
    indices, scores = list_table(codebooks.cuda(), keys.cuda(), list_len)
    want_indices, want_scores = list_table(codebooks, keys, list_len)
    assert torch.equal(indices.cpu(), want_indices)
    assert torch.equal(scores.cpu(), want_scores)
