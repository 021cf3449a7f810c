"""Exact Top-K on a device, from all keys: searches are compared with it. See `csattn.selectors.exact`."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from csattn.attention.device import RowSource
from csattn.batch import ANY_TOP_K, DeviceSelection
from csattn.cuda import CudaKernel
from csattn.search.device.compiling import compiled, require_queries
from csattn.search.device.indexes import DeviceIndexes
from csattn.search.device.shapes import RowsShape

THREADS = 256
BYTES_PER_KEY = 24  # of a head: its shares, and these sorted with their places


class ExactSearch:
    """Chooses rows for a batch as `DeviceSearch` does, but from the keys themselves. Only a context's rows are chosen.

    A key's rank is by its shares in the softmaxes over the context's keys, summed over the group's queries. Of equal
    keys the first is chosen; NaN counts as the greatest.
    """

    def __init__(
        self,
        shape: RowsShape,
        sources: Sequence[RowSource],  # for each layer: plain rows on the device, of the queries' dtype
        *,
        batch_size: int,
        max_context_len: int,
        softmax_scale: float,
        query_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape, self.batch_size, self.max_context_len = shape, batch_size, max_context_len
        self._sources, self._scale, self._query_dtype = sources, float(softmax_scale), query_dtype
        sizes = batch_size, shape.num_index_heads, shape.group_size, max_context_len
        self._logits = torch.zeros(sizes, dtype=torch.float32, device=device)
        self._places = torch.arange(max_context_len, dtype=torch.int32, device=device)

    def search(
        self,
        q: Tensor,  # [batch_size, num_q_heads, head_dim], after RoPE
        indexes: DeviceIndexes,  # for the contexts' lengths and K
        layer_idx: int,
        context_ids: Tensor,  # [batch_size] int32, -1: idle
        out: DeviceSelection,  # written
        top_ks: Tensor | None = None,  # see `DeviceSearch.search`
    ) -> None:
        """Enqueue the choice of one layer on torch's current stream."""
        require_queries(q, self.shape, self.batch_size, self._query_dtype)
        source, num_heads = self._sources[layer_idx], self.shape.num_index_heads
        self._score.launch(
            (-(-self.max_context_len // THREADS), num_heads, self.batch_size),
            THREADS,
            *(q, source.addresses, source.rows_per_head, context_ids),
            *(self._scale, self.max_context_len, self._logits),
        )
        config, contexts = indexes.config, context_ids.clamp_min(0).long()
        num_keys = torch.where(context_ids < 0, 0, indexes.context_lens[contexts])
        sink_end = num_keys.clamp_max(config.sink_len)
        window_start = torch.maximum(sink_end, num_keys - config.window_len)
        requested = indexes.top_ks[contexts].clamp_max(ANY_TOP_K if top_ks is None else top_ks)
        top_k = torch.minimum(requested, window_start - sink_end)[:, None, None]
        is_free = (self._places >= sink_end[:, None]) & (self._places < window_start[:, None])
        shares = self._logits.softmax(-1).sum(2).nan_to_num_(nan=torch.inf).masked_fill_(~is_free[:, None], -1.0)
        best = shares.sort(dim=2, descending=True, stable=True).indices[..., : out.kv_indices.shape[2]]
        is_chosen = self._places[: best.shape[2]] < top_k
        rows = best.masked_fill(~is_chosen, self.max_context_len).sort(dim=2).values
        out.kv_indices.copy_(rows.masked_fill_(~is_chosen, -1))
        out.valid_len.copy_(top_k[..., 0].expand(-1, num_heads))

    @cached_property
    def _score(self) -> CudaKernel:
        return compiled("exact.cu", "score_rows", self.shape, self._query_dtype, THREADS)


def exact_bytes(shape: RowsShape, batch_sizes: Sequence[int], max_context_len: int) -> int:
    """Return the device memory of searches with these batch sizes, and of the largest one's temporaries."""
    logits = sum(batch_sizes) + max(batch_sizes)
    of_row = 4 * logits * shape.group_size + BYTES_PER_KEY * max(batch_sizes)
    return shape.num_index_heads * max_context_len * of_row
