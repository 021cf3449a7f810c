"""From one layer's captured queries and keys to its index."""

from collections.abc import Mapping
from concurrent.futures import Executor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.config import IndexConfig
from csattn.index import LayerIndex
from csattn.table.lists import ListTable
from csattn.table.rows import RowTable
from index_build.basis import make_bases
from index_build.codebooks import make_codebooks
from index_build.tables import make_list_table, make_row_table


def build_layer_index(
    q: Tensor,  # [num_q_heads, context_len, head_dim], after RoPE
    kv: Tensor,  # [num_kv_heads, context_len, 2, head_dim]
    config: IndexConfig,
    threads: Executor,  # for what runs on the CPU
    next_query: NDArray[np.float32] | None,  # see `LayerIndex.next_query`
) -> LayerIndex:
    """Split, cluster, score, keep: the index of every head that has one."""
    arrays = {name: array.cpu() for name, array in index_arrays(q, kv, config, threads).items()}
    return as_layer_index(arrays, config, kv.shape[1], next_query)


@torch.inference_mode()
def index_arrays(q: Tensor, kv: Tensor, config: IndexConfig, threads: Executor) -> dict[str, Tensor]:
    """The arrays of `LayerIndex` and its table by name, on the device of q and kv."""
    num_q_heads, context_len, head_dim = q.shape
    num_kv_heads = kv.shape[0]
    num_heads = num_kv_heads if config.share_group else num_q_heads
    queries = _pooled(q, num_kv_heads) if config.pool_group else q.reshape(num_heads, -1, head_dim)
    keys = kv[:, :, 0].float()
    means = keys.mean(dim=1, dtype=torch.float64).float() if config.center_keys else torch.zeros_like(keys[:, 0])
    keys = keys - means[:, None]
    if num_heads != num_kv_heads:  # every query head has an index of its own
        keys, means = (array.repeat_interleave(num_heads // num_kv_heads, dim=0) for array in (keys, means))
    query_basis, key_basis = make_bases(config.basis, queries, keys, config.num_subspaces, threads)
    codebooks = make_codebooks(queries, query_basis, config, threads)
    keys = key_basis.mT @ keys.mT  # [num_heads, head_dim, context_len]: a subspace's keys lie together
    if config.layout == "rows":
        table = dict(zip(("codes", "scales"), make_row_table(codebooks, keys, config.score_bits, threads), strict=True))
    else:
        lists = make_list_table(codebooks, keys, config.list_entries(context_len), threads)
        table = dict(zip(("indices", "scores"), lists, strict=True))
    return {
        "query_basis": query_basis,
        "codebooks": codebooks,
        "key_basis": key_basis,
        "key_mean": means,
        **table,
    }


def as_layer_index(
    arrays: Mapping[str, Tensor],  # of `index_arrays`, in host memory; the index uses them without a copy
    config: IndexConfig,
    context_len: int,
    next_query: NDArray[np.float32] | None,
) -> LayerIndex:
    """The index that the arrays make up."""
    host = {name: array.numpy() for name, array in arrays.items()}
    table: RowTable | ListTable
    if config.layout == "rows":
        table = RowTable(codes=host["codes"], scales=host["scales"], context_len=context_len)
    else:
        table = ListTable(indices=host["indices"], scores=host["scores"], context_len=context_len)
    return LayerIndex(
        query_basis=host["query_basis"],
        codebooks=host["codebooks"],
        key_basis=host["key_basis"],
        key_mean=host["key_mean"],
        table=table,
        weigh_by_norm=config.weigh_by_norm,
        next_query=next_query,
        pool_group=config.pool_group,
    )


def _pooled(q: Tensor, num_heads: int) -> Tensor:
    """What searches will be made with: the sum of each group's unit queries, [num_heads, context_len, head_dim]."""
    pooled = torch.zeros(num_heads, *q.shape[1:], device=q.device)
    for head, rows in enumerate(q):
        pooled[head * num_heads // len(q)] += torch.nn.functional.normalize(rows.float(), dim=-1)
    return pooled
