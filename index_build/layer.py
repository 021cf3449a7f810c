"""From one layer's captured queries and keys to its index."""

from concurrent.futures import Executor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.config import IndexConfig
from csattn.index import LayerIndex
from csattn.table.lists import ListTable
from csattn.table.rows import RowTable
from index_build.basis import make_basis
from index_build.kmeans import spherical_kmeans
from index_build.tables import make_list_table, make_row_table


def build_layer_index(
    q: Tensor,  # [num_q_heads, context_len, head_dim], after RoPE
    kv: Tensor,  # [num_kv_heads, context_len, 2, head_dim]
    config: IndexConfig,
    threads: Executor,  # runs the k-means of the subspaces
    next_query: NDArray[np.float32] | None,  # see `LayerIndex.next_query`
) -> LayerIndex:
    """Split, cluster, score, keep: the index of every head that has one."""
    head_dim, context_len = q.shape[2], q.shape[1]
    num_index_heads = kv.shape[0] if config.share_group else q.shape[0]
    queries = q.float().reshape(num_index_heads, -1, head_dim).numpy()
    kv_head = np.arange(num_index_heads) // (num_index_heads // kv.shape[0])
    all_keys = kv[:, :, 0].float().numpy()
    means = all_keys.mean(axis=1, dtype=np.float64).astype(np.float32) if config.center_keys else 0 * all_keys[:, 0]
    bases, keys, parts = [], [], []
    for head in range(num_index_heads):
        centered = all_keys[kv_head[head]] - means[kv_head[head]]
        query_basis, key_basis = make_basis(config.basis, queries[head], centered, config.num_subspaces)
        bases.append((query_basis, key_basis))
        keys.append(torch.from_numpy(centered @ key_basis))
        parts += np.split(queries[head] @ query_basis, config.num_subspaces, axis=1)
    codebooks = np.stack(list(threads.map(lambda part: _cluster(part, config), parts)))
    codebooks = codebooks.reshape(num_index_heads, config.num_subspaces, config.num_centroids, -1)
    table: RowTable | ListTable
    if config.layout == "rows":
        table = make_row_table(codebooks, keys, config.score_bits)
    else:
        table = make_list_table(codebooks, keys, config.list_entries(context_len))
    return LayerIndex(
        query_basis=np.stack([query_basis for query_basis, _ in bases]),
        codebooks=codebooks,
        key_basis=np.stack([key_basis for _, key_basis in bases]),
        key_mean=means[kv_head],
        table=table,
        weigh_by_norm=config.weigh_by_norm,
        next_query=next_query,
    )


def _cluster(part: NDArray[np.float32], config: IndexConfig) -> NDArray[np.float32]:
    return spherical_kmeans(part, config.num_centroids, config.num_iterations, config.seed)
