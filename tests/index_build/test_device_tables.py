"""Lists made on a GPU are those made on the CPU, to the bit. Without a GPU the kernel runs as Python."""

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton, whose interpreter runs these kernels on a CPU, is not installed")

from index_build import device_kernels
from tests.index_build.tables import centroids_and_keys, list_table, scores_by_definition

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def by_part(codebooks: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    centroids = codebooks.flatten(0, 1)
    return centroids.to(DEVICE), keys.view(len(centroids), -1, keys.shape[2]).to(DEVICE)


@pytest.mark.parametrize(
    ("num_centroids", "subspace_dim", "context_len"), [(1, 1, 1), (5, 4, 65), (64, 8, 257), (65, 3, 1000)]
)
def test_scores_are_their_definition(
    num_centroids: int, subspace_dim: int, context_len: int, rng: np.random.Generator
) -> None:
    codebooks, keys = centroids_and_keys(rng, 1, 2, num_centroids, subspace_dim, context_len)
    centroids, parts = by_part(codebooks, keys)
    want = scores_by_definition(codebooks, keys)
    assert torch.equal(device_kernels.score_keys(centroids, parts).cpu(), want[0])


def test_keys_may_lie_further_apart_than_32_bits_count() -> None:
    """Dimensions do, of a long context in wide subspaces. All but the first keys are zeros that nobody reads."""
    context_len, dims = 1 << 30, 3
    keys = torch.from_numpy(np.zeros((dims, context_len), np.int8)).to(DEVICE)
    keys[:, :3] = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    codebook = torch.tensor([[1.0, 10.0, 100.0]], dtype=torch.float64, device=DEVICE)
    scores = torch.zeros(512, device=DEVICE)  # of one program
    sizes = {"SUBSPACE_DIM": dims, "NUM_ROWS": 1, "TILE": 64, "NUM_TILES": 8}
    device_kernels._score_kernel[(1, 1, 1)](codebook, keys, scores, context_len, 1, **sizes)
    assert scores[:4].tolist() == [741.0, 852.0, 963.0, 0.0]


@pytest.mark.gpu
@pytest.mark.parametrize(("context_len", "list_len"), [(1, 1), (257, 257), (1000, 250), (4097, 1), (70_001, 17_500)])
def test_lists_of_the_gpu_are_lists_of_the_cpu(context_len: int, list_len: int, rng: np.random.Generator) -> None:
    codebooks, keys = centroids_and_keys(rng, 2, 2, 130, 8, context_len)
    keys = (keys * 8).round() / 8  # many ties
    indices, scores = list_table(codebooks.cuda(), keys.cuda(), list_len)
    want_indices, want_scores = list_table(codebooks, keys, list_len)
    assert torch.equal(indices.cpu(), want_indices)
    assert torch.equal(scores.cpu(), want_scores)
