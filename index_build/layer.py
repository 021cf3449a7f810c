"""From one layer's captured queries and keys to its index."""

from concurrent.futures import Executor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.config import IndexConfig, ListConfig, SketchConfig
from csattn.sketch.build import sketch_arrays
from csattn.table.lists import LARGEST_SCORE
from csattn.torch_threads import alone, threads_kept
from index_build.codebooks import make_codebooks

_SUMS, _SUMS_ON_GPU = 1 << 17, 1 << 25  # under way at a time: on a CPU they stay in the cache


@torch.inference_mode()
def index_arrays(
    q: Tensor,  # [num_q_heads, context_len, head_dim], after RoPE
    kv: Tensor,  # [num_kv_heads, context_len, 2, head_dim]
    config: IndexConfig,
    threads: Executor,  # for what runs on the CPU
) -> dict[str, Tensor]:
    """The arrays of a layer's index by name (`csattn.artifact.layout.index_from_arrays`), on the device of q and kv."""
    if isinstance(config, SketchConfig):
        return sketch_arrays(q, kv, config, threads.map)
    return _list_arrays(q, kv, config, threads)


def _list_arrays(q: Tensor, kv: Tensor, config: ListConfig, threads: Executor) -> dict[str, Tensor]:
    """Split, cluster, score, keep."""
    num_q_heads, _, head_dim = q.shape
    num_kv_heads, context_len = kv.shape[:2]
    num_heads = num_kv_heads if config.share_group else num_q_heads
    keys = kv[:, :, 0].float()
    means = keys.mean(dim=1, dtype=torch.float64).float() if config.center_keys else torch.zeros_like(keys[:, 0])
    keys = keys - means[:, None]
    if num_heads != num_kv_heads:  # every query head has an index of its own
        keys, means = (array.repeat_interleave(num_heads // num_kv_heads, dim=0) for array in (keys, means))
    codebooks = make_codebooks(q.reshape(num_heads, -1, head_dim), config, threads)
    keys = keys.mT.contiguous()  # [num_heads, head_dim, context_len]: a subspace's keys lie together
    indices, scores = make_list_table(codebooks, keys, config.list_entries(context_len), threads)
    return {"indices": indices, "scores": scores, "codebooks": codebooks, "key_mean": means}


def make_list_table(
    codebooks: Tensor,  # [num_index_heads, num_subspaces, num_centroids, subspace_dim] float32
    keys: Tensor,  # [num_index_heads, head_dim, context_len] float32, centred
    list_len: int,
    threads: Executor,  # for tensors on the CPU
) -> tuple[Tensor, Tensor]:
    """The `list_len` best keys of every centroid, ordered by (stored score descending, index ascending).

    Indices int32 and scores float16 [num_index_heads, num_subspaces, num_centroids, list_len].
    """
    lists = *codebooks.shape[:3], list_len
    indices = torch.empty(lists, dtype=torch.int32, device=keys.device)
    scores = torch.empty(lists, dtype=torch.float16, device=keys.device)

    def make(codebook: Tensor, keys: Tensor, indices: Tensor, scores: Tensor) -> None:
        rows = centroid_scores(codebook, keys)
        if rows.is_cuda:
            indices[:], scores[:] = top_l_sorted(rows, list_len)
        else:
            indices.numpy()[:], scores.numpy()[:] = top_l(rows.numpy(), list_len)

    by_part = keys.reshape(*lists[:2], -1, keys.shape[2])
    parts = [array.flatten(0, 1) for array in (codebooks, by_part, indices, scores)]
    with threads_kept():
        for _ in map(make, *parts) if keys.is_cuda else threads.map(alone(make), *parts):
            pass
    return indices, scores


def centroid_scores(
    codebook: Tensor,  # [num_centroids, subspace_dim] float32
    keys: Tensor,  # [subspace_dim, context_len] float32
) -> Tensor:
    """c_j . k_i for all pairs: [num_centroids, context_len] float32, rounded once.

    To the bit the same on every machine, device and number of threads: the product of two float32 is exact in float64,
    and sums are taken in the order of the dimensions, whether or not multiplication and addition are fused.
    """
    at_once = max(1, (_SUMS_ON_GPU if keys.is_cuda else _SUMS) // len(codebook))
    scores, weights = keys.new_empty(len(codebook), keys.shape[1]), codebook.double().mT.contiguous()
    for start in range(0, keys.shape[1], at_once):
        block = keys[:, start : start + at_once].double()
        sums = block.new_zeros(len(codebook), block.shape[1])
        for weight, row in zip(weights, block, strict=True):
            sums.addcmul_(weight[:, None], row)
        scores[:, start : start + at_once] = sums
    return scores


def top_l(rows: NDArray[np.float32], list_len: int) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    """Indices and float16 scores [num_rows, list_len] of each row's best entries, in the lists' order."""
    halves = np.clip(rows, -LARGEST_SCORE, LARGEST_SCORE).astype(np.float16) + np.float16(0)  # no -0.0
    bits = halves.view(np.int16).astype(np.int64)
    ordinals = np.where(bits < 0, -(bits & 0x7FFF), bits)  # ordered as the scores are
    # One integer holds score and index, so that a plain sort gives the total order.
    keyed = (-ordinals << 32) + np.arange(rows.shape[1])
    best = np.sort(np.partition(keyed, list_len - 1, axis=1)[:, :list_len], axis=1)
    indices = (best & 0xFFFFFFFF).astype(np.int32)
    return indices, np.take_along_axis(halves, indices.astype(np.int64), axis=1)


def top_l_sorted(rows: Tensor, list_len: int) -> tuple[Tensor, Tensor]:
    """`top_l` in torch, for rows [num_rows, num_keys] float32 on a GPU."""
    halves = rows.clamp(-LARGEST_SCORE, LARGEST_SCORE).half() + 0.0
    bits = halves.view(torch.int16).long()
    ordinals = torch.where(bits < 0, -(bits & 0x7FFF), bits)
    keyed = (-ordinals << 32) + torch.arange(rows.shape[1], device=rows.device)
    best = keyed.topk(list_len, dim=1, largest=False, sorted=True).values & 0xFFFFFFFF
    return best.int(), halves.gather(1, best)
