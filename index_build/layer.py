"""From one layer's captured queries and keys to its index."""

from concurrent.futures import Executor

import torch
from torch import Tensor

from csattn.config import IndexConfig, ListConfig, SketchConfig
from csattn.sketch.build import sketch_arrays
from index_build.codebooks import make_codebooks
from index_build.tables import make_list_table


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
