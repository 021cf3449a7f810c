"""From one layer's captured queries and keys to its index."""

from collections.abc import Mapping
from concurrent.futures import Executor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from csattn.config import IndexConfig, ListConfig, SketchConfig
from csattn.index import LayerIndex
from csattn.sketch import SketchIndex
from csattn.sketch.build import sketch_arrays
from csattn.table.lists import ListTable
from index_build.codebooks import make_codebooks
from index_build.tables import make_list_table


@torch.inference_mode()
def index_arrays(
    q: Tensor,  # [num_q_heads, context_len, head_dim], after RoPE
    kv: Tensor,  # [num_kv_heads, context_len, 2, head_dim]
    config: IndexConfig,
    threads: Executor,  # for what runs on the CPU
) -> dict[str, Tensor]:
    """The arrays of which each head of an index has its part, by name, on the device of q and kv."""
    if isinstance(config, SketchConfig):
        return sketch_arrays(q, kv, config, threads.map)
    return _list_arrays(q, kv, config, threads)


def as_layer_index(
    arrays: Mapping[str, Tensor],  # of `index_arrays`, in host memory; the index uses them without a copy
    config: IndexConfig,
    context_len: int,
    next_query: NDArray[np.float32] | None,  # see `LayerIndex.next_query`
) -> LayerIndex | SketchIndex:
    """The index that the arrays make up."""
    host = {name: array.numpy() for name, array in arrays.items()}
    if isinstance(config, SketchConfig):
        return SketchIndex(
            codes=host["codes"],
            marks=host["marks"],
            num_fine=config.words(host["key_mean"].shape[-1])[0],
            segment_starts=np.array(config.segment_starts(context_len), np.int32),
            key_mean=host["key_mean"],
            query_transform=host["query_transform"],
            value_mean=host["value_mean"],
            value_transform=host["value_transform"],
            context_len=context_len,
            next_query=next_query,
        )
    return LayerIndex(
        codebooks=host["codebooks"],
        key_mean=host["key_mean"],
        table=ListTable(indices=host["indices"], scores=host["scores"], context_len=context_len),
        weigh_by_norm=config.weigh_by_norm,
        next_query=next_query,
    )


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
