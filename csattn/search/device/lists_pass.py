"""Search over lists: sum, by key, the scores in the lists of the queries' nearest centroids, and choose the best."""

from functools import cached_property

import torch
from torch import Tensor

from csattn.batch import DeviceSelection
from csattn.cuda import CudaKernel
from csattn.search.device.compiling import THREADS, blocks_of_slot, compiled, multiprocessors, require_queries
from csattn.search.device.indexes import DeviceIndexes
from csattn.search.device.shapes import ListsShape
from csattn.table.lists import CHUNK_KEYS

MATCH_BYTES, STATISTICS_BYTES = 16, 8  # sizes of structs Match and TileStatistics
CHOICE_BYTES = 4 * (4096 + 5 + 256 + 2 * 512 + 3)  # size of struct Choice
MAX_MATCH_WARPS = 8
SCORING_THREADS, SCORING_BLOCKS = 128, 5  # threads of a block; blocks of a multiprocessor


class ListsPass:
    """Scores the keys of a batch's contexts by their lists, and chooses rows. Definition: `csattn.search.reference`.

    Scores are the definition's; shares are float32.
    """

    def __init__(
        self,
        shape: ListsShape,
        *,
        batch_size: int,
        max_context_len: int,
        softmax_scale: float,
        query_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape = shape
        self._softmax_scale, self._query_dtype = float(softmax_scale), query_dtype
        self.max_keys = -(-max_context_len // CHUNK_KEYS) * CHUNK_KEYS
        self._batch_size, heads = batch_size, shape.num_index_heads
        slots, queries = batch_size * heads, batch_size * heads * shape.group_size
        self._match_threads = 32 * min(shape.group_size, MAX_MATCH_WARPS)
        self._grid = blocks_of_slot(device, slots, self.max_keys, 4), heads, batch_size
        self._choosing_grid = blocks_of_slot(device, slots, self.max_keys, 2), heads, batch_size
        # a warp for each query's chunk, up to the warps that the device has room for
        num_warps, room = shape.group_size * (self.max_keys // CHUNK_KEYS), SCORING_BLOCKS * multiprocessors(device)
        self._scoring_grid = max(1, min(-(-num_warps * 32 // SCORING_THREADS), room // slots)), heads, batch_size
        self._matches = torch.zeros(queries * shape.num_subspaces, MATCH_BYTES, dtype=torch.uint8, device=device)
        self._scores = torch.zeros(queries * self.max_keys, dtype=torch.float32, device=device)
        self._statistics = torch.zeros(
            queries * self.max_keys // CHUNK_KEYS, STATISTICS_BYTES // 4, dtype=torch.float32, device=device
        )
        self._group_scores = torch.zeros(slots, self.max_keys, dtype=torch.int32, device=device)
        self._marks = torch.zeros(slots, self.max_keys // 32, dtype=torch.int32, device=device)
        self._choices = torch.zeros(slots, CHOICE_BYTES, dtype=torch.uint8, device=device)

    def run(
        self,
        q: Tensor,  # [batch_size, num_q_heads, head_dim], after RoPE
        indexes: DeviceIndexes,
        layer_idx: int,
        context_ids: Tensor,  # [batch_size] int32, -1: idle
    ) -> None:
        """Enqueue the scoring on torch's current stream."""
        shape, table = self.shape, indexes.tables[layer_idx]
        require_queries(q, shape, self._batch_size, self._query_dtype)
        grid = shape.num_subspaces, shape.num_index_heads, self._batch_size
        matching = q, table, context_ids, int(shape.weigh_by_norm), self._matches, self._choices
        self._match.launch(grid, self._match_threads, *matching)
        places, read = places_of(indexes, context_ids), (self._matches, self._softmax_scale)
        found = self._scores, self.max_keys, self._statistics
        self._scoring.launch(self._scoring_grid, SCORING_THREADS, table, *places, *read, *found)

    def choose(
        self,
        indexes: DeviceIndexes,
        layer_idx: int,
        context_ids: Tensor,
        out: DeviceSelection,
        top_ks: Tensor | None = None,  # see `DeviceSearch.search`
    ) -> None:
        """Enqueue the choice, after `run` with the same rows."""
        places, max_keys = places_of(indexes, context_ids, top_ks), self.max_keys
        read = self._softmax_scale, self._scores, self._statistics
        self._combine.launch(self._grid, THREADS, *places, *read, self._group_scores, max_keys, self._choices)
        self._mark(places, out)
        written = self._choices, out.kv_indices, out.valid_len, out.kv_indices.shape[2]
        self._write.launch(self._choosing_grid, THREADS, *places, self._marks, max_keys, *written)

    def _mark(self, places: tuple[Tensor | int | None, ...], out: DeviceSelection) -> None:
        """Enqueue the marking of chosen keys, except for candidates that have to be compared one by one."""
        read = self._group_scores, self.max_keys
        marked = self._marks, self._choices, out.kv_indices, out.kv_indices.shape[2]
        self._find.launch(self._choosing_grid, THREADS, *places, *read, *marked)

    @cached_property
    def _match(self) -> CudaKernel:
        return compiled("match.cu", "match_centroids", self.shape, self._query_dtype, self._match_threads)

    @cached_property
    def _scoring(self) -> CudaKernel:
        return compiled("score_lists.cu", "score_lists", self.shape, threads=SCORING_THREADS, MIN_BLOCKS=SCORING_BLOCKS)

    @cached_property
    def _combine(self) -> CudaKernel:
        return compiled("combine_lists.cu", "combine_lists", self.shape)

    @cached_property
    def _find(self) -> CudaKernel:
        return compiled("find.cu", "find_keys", self.shape)

    @cached_property
    def _write(self) -> CudaKernel:
        return compiled("write.cu", "write_keys", self.shape)


def places_of(
    indexes: DeviceIndexes, context_ids: Tensor, top_ks: Tensor | None = None
) -> tuple[Tensor | int | None, ...]:
    """Return the arguments of `context_of` in common.cuh."""
    config = indexes.config
    return indexes.context_lens, indexes.top_ks, context_ids, top_ks, config.sink_len, config.window_len
