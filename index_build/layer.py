"""Make the index of one layer from its captured queries and keys."""

from concurrent.futures import Executor

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from csattn.config import IndexConfig, ListConfig, SketchConfig
from csattn.sketch.build import sketch_arrays
from csattn.table.lists import CHUNK_KEYS, LARGEST_SCORE, list_shapes, lists_of, ordinals, score_room
from csattn.torch_threads import on_one_thread, preserve_num_threads
from index_build.codebooks import make_codebooks

_TYPES = {"listed": torch.uint32, "starts": torch.int32, "scores": torch.float16, "least": torch.float16}
_SUMS, _SUMS_ON_GPU = 1 << 17, 1 << 25  # partial sums held at a time: on a CPU they stay in the cache


@torch.inference_mode()
def index_arrays(
    q: Tensor,  # [num_q_heads, context_len, head_dim], after RoPE
    kv: Tensor,  # [num_kv_heads, context_len, 2, head_dim]
    config: IndexConfig,
    threads: Executor,  # for what runs on the CPU
) -> dict[str, Tensor]:
    """Make a layer's index: its arrays by name (`csattn.artifact.layout.index_from_arrays`), on q's and kv's device."""
    if isinstance(config, SketchConfig):
        return sketch_arrays(q, kv, config, threads.map)
    return _list_arrays(q, kv, config, threads)


def _list_arrays(q: Tensor, kv: Tensor, config: ListConfig, threads: Executor) -> dict[str, Tensor]:
    """Cluster the queries in each subspace, score all keys by the centroids, and keep the best ones of each."""
    num_q_heads, _, head_dim = q.shape
    num_kv_heads, context_len = kv.shape[:2]
    num_heads = num_kv_heads if config.share_group else num_q_heads
    keys = kv[:, :, 0].float()
    means = keys.mean(dim=1, dtype=torch.float64).float() if config.center_keys else torch.zeros_like(keys[:, 0])
    keys = keys - means[:, None]
    if num_heads != num_kv_heads:  # every query head has an index of its own
        keys, means = (array.repeat_interleave(num_heads // num_kv_heads, dim=0) for array in (keys, means))
    codebooks = make_codebooks(q.reshape(num_heads, -1, head_dim), config, threads)
    keys = keys.mT.contiguous()  # [num_heads, head_dim, context_len]: a subspace is contiguous
    lists = make_list_table(codebooks, keys, config.list_entries(context_len), threads)
    return lists | {"codebooks": codebooks, "key_mean": means}


def make_list_table(
    codebooks: Tensor,  # [num_index_heads, num_subspaces, num_centroids, subspace_dim] float32
    keys: Tensor,  # [num_index_heads, head_dim, context_len] float32, centred
    list_len: int,
    threads: Executor,  # for tensors on the CPU
) -> dict[str, Tensor]:
    """List the `list_len` best keys of every centroid, the first ones on ties: the arrays of a `ListTable` by name."""
    lists, of_list = codebooks.shape[:3], list_shapes(list_len, keys.shape[2])
    table = {name: keys.new_empty(*lists, *shape, dtype=_TYPES[name]) for name, shape in of_list.items()}

    def make(codebook: Tensor, keys: Tensor, *parts: Tensor) -> None:
        rows = centroid_scores(codebook, keys)
        best = best_on_gpu(rows, list_len) if rows.is_cuda else best_of_rows(rows, list_len)
        for name, part in zip(table, parts, strict=True):
            part.copy_(best[name])

    by_part = keys.reshape(*lists[:2], -1, keys.shape[2])
    parts = [array.flatten(0, 1) for array in (codebooks, by_part, *table.values())]
    with preserve_num_threads():
        for _ in map(make, *parts) if keys.is_cuda else threads.map(on_one_thread(make), *parts):
            pass
    return table


def centroid_scores(
    codebook: Tensor,  # [num_centroids, subspace_dim] float32
    keys: Tensor,  # [subspace_dim, context_len] float32
) -> Tensor:
    """Return c_j . k_i for all pairs: [num_centroids, context_len] float32, rounded once.

    Bit-identical on every machine, device and number of threads: the product of two float32 is exact in float64, so
    fused multiply-add makes no difference, and sums are taken in the order of the dimensions.
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


def best_of_rows(rows: Tensor, list_len: int) -> dict[str, Tensor]:
    """Make each row's list from scores [num_rows, num_keys] float32 on the CPU: the arrays of a `ListTable` by name."""
    scores = rows.clamp(-LARGEST_SCORE, LARGEST_SCORE).half().numpy()
    bits = scores.view(np.int16)
    bits[bits == np.iinfo(np.int16).min] = 0  # -0.0
    order = ordinals(bits)
    least = np.partition(order, -list_len, axis=1)[:, -list_len, None]
    listed = order >= least
    for row in np.flatnonzero(np.count_nonzero(listed, axis=1) > list_len):
        equal = np.flatnonzero(order[row] == least[row])
        listed[row, equal[list_len - np.count_nonzero(listed[row]) :]] = False
    return {name: torch.from_numpy(array) for name, array in lists_of(listed, scores).arrays.items()}


def best_on_gpu(rows: Tensor, list_len: int) -> dict[str, Tensor]:
    """Do `best_of_rows` in torch."""
    num_rows, num_keys = rows.shape
    scores = rows.clamp(-LARGEST_SCORE, LARGEST_SCORE).half() + 0.0  # no -0.0
    order = ordinals(scores.view(torch.int16))
    least = order.kthvalue(num_keys - list_len + 1, dim=1, keepdim=True).values
    above, equal = order > least, order == least
    listed = above | equal & (equal.cumsum(1, dtype=torch.int32) <= list_len - above.sum(1, keepdim=True))
    words = pad(listed, (0, -num_keys % CHUNK_KEYS)).view(num_rows, -1, CHUNK_KEYS // 32, 32)
    counts = words.sum((2, 3), dtype=torch.int32)
    shifts = torch.arange(32, dtype=torch.int32, device=rows.device)
    held = scores[listed].view(num_rows, list_len)
    return {
        "listed": (words.int() << shifts).sum(3, dtype=torch.int32).view(torch.uint32),
        "starts": counts.cumsum(1, dtype=torch.int32) - counts,
        "scores": pad(held, (0, score_room(list_len) - list_len)),
        "least": held.amin(1),
    }
