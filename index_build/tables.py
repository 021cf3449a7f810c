"""Score every centroid against every key and keep the L best of each.

The same centroids and keys give the same lists to the bit on a CPU and on a GPU, see `reference.py`.
"""

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from index_build import cpu_kernels

_LARGEST_HALF = 65504.0


def make_list_table(
    codebooks: Tensor,  # [num_index_heads, num_subspaces, num_centroids, subspace_dim] float32
    keys: Tensor,  # [num_index_heads, head_dim, context_len] float32, centred
    list_len: int,
    threads: Executor,  # for tensors on the CPU
) -> tuple[Tensor, Tensor]:
    """The `list_len` best keys of every centroid, ordered by (stored score descending, index ascending).

    Indices int32 and scores float16 [num_index_heads, num_subspaces, num_centroids, list_len].
    """
    lists = codebooks.shape[:3]
    centroids, parts = _by_part(codebooks, keys)
    indices = torch.empty(*centroids.shape[:2], list_len, dtype=torch.int32, device=keys.device)
    scores = torch.empty(*centroids.shape[:2], list_len, dtype=torch.float16, device=keys.device)
    if keys.is_cuda:
        from index_build import device_kernels  # Triton is only where a GPU is

        for part in range(len(parts)):
            rows = device_kernels.score_keys(centroids[part : part + 1], parts[part : part + 1])[0]
            indices[part], scores[part] = top_l_sorted(rows, list_len)
    else:
        _each_part(threads, _list_part, centroids, parts, indices, scores)
    return indices.view(*lists, -1), scores.view(*lists, -1)


def top_l(rows: NDArray[np.float32], list_len: int) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    """Indices and float16 scores [num_rows, list_len] of each row's best entries, in the lists' order."""
    halves = np.clip(rows, -_LARGEST_HALF, _LARGEST_HALF).astype(np.float16) + np.float16(0)  # no -0.0
    bits = halves.view(np.int16).astype(np.int64)
    ordinals = np.where(bits < 0, -(bits & 0x7FFF), bits)  # ordered as the scores are
    # One integer holds score and index, so that a plain sort gives the total order.
    keyed = (-ordinals << 32) + np.arange(rows.shape[1])
    best = np.sort(np.partition(keyed, list_len - 1, axis=1)[:, :list_len], axis=1)
    indices = (best & 0xFFFFFFFF).astype(np.int32)
    return indices, np.take_along_axis(halves, indices.astype(np.int64), axis=1)


def top_l_sorted(rows: Tensor, list_len: int) -> tuple[Tensor, Tensor]:
    """`top_l` in torch, for rows [num_rows, num_keys] float32 on a GPU."""
    halves = rows.clamp(-_LARGEST_HALF, _LARGEST_HALF).half() + 0.0
    bits = halves.view(torch.int16).long()
    ordinals = torch.where(bits < 0, -(bits & 0x7FFF), bits)
    keyed = (-ordinals << 32) + torch.arange(rows.shape[1], device=rows.device)
    best = keyed.topk(list_len, dim=1, largest=False, sorted=True).values & 0xFFFFFFFF
    return best.int(), halves.gather(1, best)


def _by_part(codebooks: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Centroids [num_parts, num_centroids, subspace_dim] and keys [num_parts, subspace_dim, context_len]."""
    centroids = codebooks.flatten(0, 1).contiguous()
    return centroids, keys.reshape(len(centroids), -1, keys.shape[2])


def _each_part(threads: Executor, function: Callable[..., None], *arrays: Tensor) -> None:
    """Call the function for the arrays of each part."""
    views: list[Any] = [array.numpy() for array in arrays]
    for _ in threads.map(function, *views):
        pass


def _list_part(
    codebook: NDArray[np.float32],
    keys: NDArray[np.float32],
    indices: NDArray[np.int32],
    scores: NDArray[np.float16],
) -> None:
    rows = np.empty((len(codebook), keys.shape[1]), np.float32)
    cpu_kernels.score_keys(codebook, keys, rows)
    indices[:], scores[:] = top_l(rows, len(indices[0]))
