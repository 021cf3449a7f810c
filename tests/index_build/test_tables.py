"""Lists agree with their definition: each centroid lists the keys with its highest scores."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.table.lists import LARGEST_SCORE, ListTable
from csattn.torch_threads import preserve_num_threads
from index_build import layer
from index_build.layer import best_of_rows, best_on_gpu, centroid_scores
from tests.index_build.tables import centroids_and_keys, list_table, scores_by_definition
from tests.table.invariants import check


def table_of(arrays: dict[str, Tensor], list_len: int, context_len: int) -> ListTable:
    """Return a table of lists [num_index_heads, num_subspaces, num_centroids], or [num_centroids] for one subspace."""
    own = {name: array.numpy() for name, array in arrays.items()}
    if own["least"].ndim == 1:
        own = {name: array[None, None] for name, array in own.items()}
    table = ListTable(**own, list_len=list_len, context_len=context_len)
    check(table)
    return table


def best_keys(scores: NDArray[np.float16], list_len: int) -> list[int]:
    """Return the best keys by definition: in ascending order; among equal scores, the first keys."""
    return sorted(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:list_len])


def awkward_rows(kind: str, num_keys: int, rng: np.random.Generator) -> NDArray[np.float32]:
    rows = rng.standard_normal((6, num_keys)).astype(np.float32)
    if kind == "ties":
        rows = rng.integers(-4, 5, rows.shape).astype(np.float32)
    elif kind == "ends":
        rows[0], rows[1, ::2], rows[2, ::3], rows[3, ::3] = 0.0, -0.0, 1e9, -1e9
        rows[4] *= 1e-7
    return rows


@pytest.mark.parametrize(("num_keys", "list_len"), [(1, 1), (7, 7), (64, 16), (257, 64), (1024, 1024), (2600, 1000)])
@pytest.mark.parametrize("kind", ["random", "ties", "ends"])
def test_a_list_holds_the_best_keys_and_breaks_ties_by_position(kind, num_keys, list_len, rng) -> None:
    rows = awkward_rows(kind, num_keys, rng)
    table = table_of(best_of_rows(torch.from_numpy(rows), list_len), list_len, num_keys)
    for centroid, row in enumerate(rows.clip(-LARGEST_SCORE, LARGEST_SCORE).astype(np.float16)):
        keys, scores = table.entries(0, 0, centroid)
        assert keys.tolist() == best_keys(row, list_len)
        np.testing.assert_array_equal(scores, row[keys])


@pytest.mark.parametrize(("num_keys", "list_len"), [(1, 1), (7, 7), (64, 16), (257, 64), (1024, 1024), (2600, 1000)])
@pytest.mark.parametrize("kind", ["random", "ties", "ends"])
def test_lists_of_the_gpu_algorithm_equal_those_of_the_cpu_algorithm(kind, num_keys, list_len, rng) -> None:
    rows = torch.from_numpy(awkward_rows(kind, num_keys, rng))
    assert_same(best_on_gpu(rows, list_len), best_of_rows(rows, list_len))


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert list(got) == list(want)
    for name in want:
        assert got[name].dtype == want[name].dtype and got[name].shape == want[name].shape
        assert got[name].cpu().numpy().tobytes() == want[name].numpy().tobytes()


@pytest.mark.parametrize("context_len", [40, 2047, 2049])
def test_lists_hold_the_best_keys_of_each_centroid(
    context_len: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer, "_SUMS", 5 * 1024)
    codebooks, keys = centroids_and_keys(rng, 2, 2, 5, 4, context_len)
    table = table_of(list_table(codebooks, keys, 25), 25, context_len)
    for head, b, centroid in np.ndindex(2, 2, 5):
        scores = scores_by_definition(codebooks, keys)[head, b, centroid].half().numpy()
        listed, held = table.entries(head, b, centroid)
        assert listed.tolist() == best_keys(scores, 25)
        np.testing.assert_array_equal(held, scores[listed])


def test_scores_are_summed_in_float64_in_the_order_of_the_dimensions() -> None:
    keys = torch.tensor([[1.0, 1.0], [2.0**60, 2.0**30], [-(2.0**60), -(2.0**30)]])
    assert centroid_scores(torch.ones(1, 3), keys).tolist() == [[0.0, 1.0]]


def test_building_lists_leaves_torchs_number_of_threads_unchanged(rng: np.random.Generator) -> None:
    made_of = centroids_and_keys(rng, 4, 4, 8, 4, 200)
    with preserve_num_threads():
        torch.set_num_threads(2)
        for _ in range(20):
            list_table(*made_of, 20)
            with ThreadPoolExecutor(1) as later:
                assert later.submit(torch.get_num_threads).result() == 2


@pytest.mark.gpu
@pytest.mark.parametrize(("context_len", "list_len"), [(1, 1), (257, 257), (1000, 250), (4097, 1), (70_001, 17_500)])
def test_gpu_lists_equal_cpu_lists(context_len: int, list_len: int, rng: np.random.Generator) -> None:
    codebooks, keys = centroids_and_keys(rng, 2, 2, 130, 8, context_len)
    keys = (keys * 8).round() / 8  # many ties
    assert_same(list_table(codebooks.cuda(), keys.cuda(), list_len), list_table(codebooks, keys, list_len))
