"""One pass over the codes of sketches: scores to choose by, and sums of the rows that may be chosen."""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from csattn.batch import DeviceSelection
from csattn.cuda import CudaKernel, limits
from csattn.search.device.compiling import compiled, multiprocessors, require_queries
from csattn.search.device.indexes import DeviceIndexes
from csattn.search.device.shapes import WIDE_HEAD_DIM, SketchShape
from csattn.sketch.codes import BLOCK_KEYS
from csattn.sketch.reference import LOG2_E
from csattn.table.lists import CHUNK_KEYS

LEAST_TILE_KEYS, MOST_TILE_KEYS = 256, 1024
TILES_OF_CONTEXT = 512  # if a context has more, tiles are doubled: later kernels read every tile's sums
COARSE_BINS = 128  # as in choose_codes.cu
PASS_WARPS, WIDE_PASS_WARPS, MOST_STAGES = 12, 8, 3  # warps of a block, the second for wide heads; stages of a ring
OTHER_PASS_BYTES = 19 << 10  # shared memory of a block that scores, besides its warps' rings and counts
# of one that chooses, besides group scores: in all, and for each block of its slot
CHOOSING_BYTES, CHOOSING_BLOCK_BYTES = 18 << 10, 4 * COARSE_BINS
# Threads of a block of `attend_rest`. The latter where few blocks are waiting for memory at a time: because each has
# several segments, or takes too much shared memory
REST_THREADS, MOST_REST_THREADS = 128, 256
BLOCK_BYTES = 2 << 10  # shared memory that CUDA reserves for each block, and small variables
MOST_STAGED = 4 / 7  # of a block's shared memory, for a segment's transform; a larger one is read from global memory
MOST_CHOOSING, LEAST_CHOOSING_KEYS = 32, 2048  # blocks that choose for one slot, and keys of each
# The keys of such a block up to which it has 256 threads, if alone, and from which it has 1024: these take all
# registers of a multiprocessor, and the next kernel begins later. Otherwise it has 512.
FEW_KEYS, MANY_KEYS = 4096, 16384
# Query heads of a group up to which blocks that choose are alone on their multiprocessor. With more, `attend_rest` has
# so much to do that does not need the choice that it must begin beside them
MOST_QUERIES_ALONE = 4
NUM_OCTAVES = 128  # in which the pass counts scores
SEGMENT_STEP = 16  # segments that kernels read at a time


class SketchPass:
    """Scores the keys of a batch's contexts by their codes, chooses rows, and attends to the rest by codes.

    Definitions: `csattn.sketch.reference`. Scores are the definition's integers, on every device. A row's results do
    not depend on the other rows of the batch. Launches share the memory that is allocated here: they must be ordered.
    """

    def __init__(
        self,
        shape: SketchShape,
        *,
        batch_size: int,
        max_context_len: int,
        max_segments: int,
        softmax_scale: float,
        query_dtype: torch.dtype,
        device: torch.device,
        keeps_scores: bool,  # for `choose`
        sums_rest: bool,  # for `attend_rest`
        beside: bool = False,  # whether it runs beside another search, on another stream
    ) -> None:
        self.shape, self.batch_size, self.max_segments = shape, batch_size, max_segments
        self._beside = beside
        self._octaves, self._query_dtype = float(softmax_scale) * LOG2_E, query_dtype
        self._keeps_scores, self._sums_rest = keeps_scores, sums_rest
        self._num_blocks = multiprocessors(device)
        self.max_keys = -(-max_context_len // CHUNK_KEYS) * CHUNK_KEYS
        self._tile_keys = tile_keys(max_context_len)
        self.max_tiles = self.max_keys // self._tile_keys
        slots = batch_size * shape.num_index_heads
        queries = slots * shape.group_size
        # blocks that wait for each other need room at the same time: those of two searches could each get half of it
        self._choosing = 1 if beside else blocks_that_choose(slots, self.max_keys, self._num_blocks)
        at_once = slots * self._choosing <= self._num_blocks
        self._chooses_alone = at_once and not beside and shape.group_size <= MOST_QUERIES_ALONE

        def memory(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._padded_segments = -(-max_segments // SEGMENT_STEP) * SEGMENT_STEP
        self._coordinates = memory(queries * self._padded_segments, shape.num_coords)
        self._means = memory(queries * self._padded_segments)
        self._unit_exponents = memory(queries * self._padded_segments, dtype=torch.uint8)
        self._scores = memory(queries * self.max_keys * keeps_scores, dtype=torch.int16)
        self._octave_counts = memory(queries * keeps_scores, NUM_OCTAVES, dtype=torch.int32)
        spills = keeps_scores and not self._group_scores_fit
        self._group_scores = memory(slots * self.max_keys * spills, dtype=torch.int16)
        self._launches = memory(slots * keeps_scores, self._choosing, dtype=torch.int32)
        self._counted = memory(slots * keeps_scores, 2, self._choosing, COARSE_BINS, dtype=torch.int32)
        self._exponents = memory(queries * sums_rest, self.max_tiles)
        self._sums = memory(queries * self.max_tiles * sums_rest, self._num_sums)

    def run(
        self,
        q: Tensor,  # [batch_size, num_q_heads, head_dim], after RoPE
        indexes: DeviceIndexes,
        layer_idx: int,
        context_ids: Tensor,  # [batch_size] int32, -1: idle
    ) -> None:
        """Enqueue the projection of queries and the pass over the codes on torch's current stream."""
        shape = self.shape
        require_queries(q, shape, self.batch_size, self._query_dtype)
        assert indexes.max_segments == self.max_segments, f"indexes have up to {indexes.max_segments} segments"
        table, config = indexes.tables[layer_idx], indexes.config
        grid = self.max_segments, shape.num_index_heads, self.batch_size
        projected = *self._queries, self._octave_counts if self._keeps_scores else None
        self._project.launch(grid, self._project_threads, q, table, context_ids, self._octaves, *projected)
        self._score.launch(
            (self._num_blocks, 1, 1),
            32 * self._pass_warps,
            *(table, indexes.context_lens, context_ids, config.sink_len, config.window_len, *self._queries),
            *(self._scores, self._octave_counts, self._exponents, self._sums, self.max_keys, self.max_tiles),
        )

    def choose(
        self,
        indexes: DeviceIndexes,
        layer_idx: int,
        context_ids: Tensor,
        out: DeviceSelection,
        top_ks: Tensor | None = None,  # see `DeviceSearch.search`
    ) -> None:
        """Enqueue the choice, after `run` with the same rows."""
        config = indexes.config
        self._choose.launch(
            (self._choosing, self.shape.num_index_heads, self.batch_size),
            self._choosing_threads,
            *(indexes.context_lens, indexes.top_ks, context_ids, top_ks),
            *(config.sink_len, config.window_len, indexes.min_top_ks_for_marks),
            *(indexes.tables[layer_idx], *self._queries),
            *(self._scores, self.max_keys, self._octave_counts, self._group_scores, self._launches, self._counted),
            *(out.kv_indices, out.valid_len, out.kv_indices.shape[2]),
        )

    def attend_rest(
        self,
        indexes: DeviceIndexes,
        layer_idx: int,
        context_ids: Tensor,
        chosen: DeviceSelection,  # kv_indices are positions in the context
        posted: Tensor,  # [num_units, num_parts, heads, head_dim + 4]: see `DeviceAttention`
        rest_parts: int,  # written: so many of num_parts, the last ones
    ) -> None:
        """Enqueue attention by codes to the eligible rows that are not chosen, after `run` with the same rows."""
        shape = self.shape
        assert self._sums_rest, "this pass sums up nothing of the rest"
        _, num_parts, heads, width = posted.shape
        assert shape.group_size % heads == 0 and width == shape.head_dim + 4, f"parts have shape {tuple(posted.shape)}"
        self._rest(rest_parts).launch(
            (rest_parts, shape.num_index_heads, self.batch_size),
            self._rest_threads(rest_parts),
            *(indexes.tables[layer_idx], indexes.context_lens, context_ids, *self._queries),
            *(self._exponents, self._sums, self.max_tiles),
            *(chosen.kv_indices, chosen.valid_len, chosen.kv_indices.shape[2], posted, num_parts, heads),
        )

    @property
    def _queries(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """The fields of struct Queries in codes.cuh."""
        return self._coordinates, self._means, self._unit_exponents, self._padded_segments

    @property
    def _block_bytes(self) -> int:
        """Bytes of the codes of BLOCK_KEYS keys."""
        return 4 * BLOCK_KEYS * (self.shape.num_fine + self.shape.num_coarse)

    @cached_property
    def _pass_warps(self) -> int:
        warps = PASS_WARPS if self.shape.head_dim <= WIDE_HEAD_DIM else WIDE_PASS_WARPS
        while warps > 1 and self._ring_bytes(warps) < 2 * self._block_bytes:
            warps //= 2
        return warps

    def _ring_bytes(self, warps: int) -> int:
        """Shared memory for a warp's ring, in a block of so many warps."""
        return (limits().block_bytes - OTHER_PASS_BYTES) // warps - self._count_bytes

    @property
    def _count_bytes(self) -> int:
        """Bytes of a scoring warp's counts by octave."""
        together = min(self.batch_size, max(1, 16 // self.shape.group_size)) * self.shape.group_size
        return together * NUM_OCTAVES * 4 * (self._keeps_scores and self.shape.group_size > 1)

    @property
    def _staged_bytes(self) -> int:
        """Bytes of a segment's transform, of queries or of values, if blocks have it in shared memory; else 0."""
        num_bytes = 2 * self.shape.num_coords * self.shape.head_dim
        return num_bytes if num_bytes <= MOST_STAGED * limits().block_bytes else 0

    @property
    def _num_sums(self) -> int:
        return 32 * -(-self.shape.num_fine // 4) + 4

    @property
    def _project_threads(self) -> int:
        pairs = self.shape.group_size * self.shape.num_coords // 2
        return int(np.clip(32 + -(-pairs // 32) * 32, 64, 512))

    @cached_property
    def _project(self) -> CudaKernel:
        head_dim, num_coords, group_size = self.shape.head_dim, self.shape.num_coords, self.shape.group_size
        of_queries = group_size * (8 * (num_coords + 1) + 4 * head_dim + 4 * num_coords + 8)
        shared_bytes = self._staged_bytes + 8 * head_dim + of_queries
        of_mean = group_size * 8 * (head_dim + 1)
        means = 2 if shared_bytes + 2 * of_mean <= limits().block_bytes else 1
        threads, shared_bytes = self._project_threads, shared_bytes + means * of_mean
        more = {"TILE_KEYS": self._tile_keys, "STAGED": int(self._staged_bytes > 0), "MEANS": means}
        return compiled("project.cu", "project_queries", self.shape, self._query_dtype, threads, shared_bytes, **more)

    @cached_property
    def _score(self) -> CudaKernel:
        warps = self._pass_warps
        stages = min(MOST_STAGES, self._ring_bytes(warps) // self._block_bytes)
        more = {"BATCH": self.batch_size, "STAGES": stages, "TILE_KEYS": self._tile_keys}
        more |= {"SCORES": int(self._keeps_scores), "REST": int(self._sums_rest)}
        dtype, threads = self._query_dtype, 32 * warps
        shared_bytes = warps * (stages * self._block_bytes + self._count_bytes)
        return compiled("score_codes.cu", "score_codes", self.shape, dtype, threads, shared_bytes, **more)

    @cached_property
    def _choose(self) -> CudaKernel:
        dtype, shared_bytes = torch.float32, self._block_group_score_bytes * self._group_scores_fit
        if self._chooses_alone:
            # two blocks must not fit: a multiprocessor whose scoring ends early would get them, and another none
            shared_bytes = max(shared_bytes, limits().block_bytes // 2 + BLOCK_BYTES - self._other_choosing_bytes)
        more = {"TILE_KEYS": self._tile_keys, "BLOCKS": self._choosing, "IN_SHARED": int(self._group_scores_fit)}
        return compiled(
            "choose_codes.cu", "choose_codes", self.shape, dtype, self._choosing_threads, shared_bytes, **more
        )

    @property
    def _choosing_threads(self) -> int:
        if self.max_keys >= MANY_KEYS * self._choosing and not self._beside:
            return 1024
        return 256 if self.max_keys <= FEW_KEYS * self._choosing and self._chooses_alone else 512

    @property
    def _block_group_score_bytes(self) -> int:
        """Bytes of the group scores of a block that chooses: 16 for eight keys."""
        return -(-self.max_keys // (8 * self._choosing)) * 16

    @property
    def _group_scores_fit(self) -> bool:
        return self._block_group_score_bytes + self._other_choosing_bytes + BLOCK_BYTES <= limits().block_bytes

    @property
    def _other_choosing_bytes(self) -> int:
        return CHOOSING_BYTES + CHOOSING_BLOCK_BYTES * self._choosing

    def _rest(self, rest_parts: int) -> CudaKernel:
        threads = self._rest_threads(rest_parts)
        dtype, shared_bytes = self._query_dtype, self._rest_bytes(threads)
        more = {"REST_PARTS": rest_parts, "TILE_KEYS": self._tile_keys, "AFTER_SEARCH": int(self._keeps_scores)}
        more["STAGED"] = int(self._staged_bytes > 0)
        return compiled("rest.cu", "attend_rest", self.shape, dtype, threads, shared_bytes, **more)

    def _rest_threads(self, rest_parts: int) -> int:
        """Threads of a block of `attend_rest`: the same for every batch, because the order of sums depends on it."""
        shape = self.shape
        static_bytes = 4 * shape.group_size * (self._num_sums + shape.num_coords + shape.head_dim)  # the kernel's own
        room = limits().block_bytes
        is_small = 2 * (self._rest_bytes(REST_THREADS) + static_bytes + BLOCK_BYTES) <= room + 1024
        fits = self._rest_bytes(MOST_REST_THREADS) + static_bytes + BLOCK_BYTES <= room
        return REST_THREADS if (is_small and self.max_segments <= rest_parts) or not fits else MOST_REST_THREADS

    def _rest_bytes(self, threads: int) -> int:
        """Dynamic shared memory of a block of `attend_rest`."""
        shape, warps = self.shape, threads // 32
        transform_bytes = self._staged_bytes + 4 * shape.head_dim
        tray_bytes = warps * 4 * BLOCK_KEYS * shape.num_fine
        return transform_bytes + tray_bytes + warps * shape.group_size * self._num_sums * 4


def tile_keys(max_context_len: int) -> int:
    """Return the number of keys that are summed together, few enough to give all warps of a device a tile."""
    keys = LEAST_TILE_KEYS
    while keys < MOST_TILE_KEYS and keys * TILES_OF_CONTEXT < max_context_len:
        keys *= 2
    return keys


def blocks_that_choose(num_slots: int, max_keys: int, num_multiprocessors: int) -> int:
    """Return how many blocks choose for a slot: one, or as many as run at the same time, with a multiprocessor each."""
    return max(1, min(MOST_CHOOSING, num_multiprocessors // num_slots, -(-max_keys // LEAST_CHOOSING_KEYS)))
