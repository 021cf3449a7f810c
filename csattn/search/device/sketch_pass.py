"""One pass over the codes of sketches: scores to choose by, and sums of the rows that may be chosen."""

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from csattn.batch import DeviceSelection
from csattn.cuda import CudaKernel
from csattn.search.device.compiling import (
    CHUNK_KEYS,
    THREADS,
    Places,
    blocks_of_slot,
    compiled,
    multiprocessors,
    require_queries,
)
from csattn.search.device.indexes import DeviceIndexes
from csattn.search.device.shapes import SketchShape

LEAST_TILE_KEYS, MOST_TILE_KEYS = 256, 1024
TILES_OF_CONTEXT = 512  # at least, of long ones: what tiles leave is read by many
INTEGER_THREADS = 128
PASS_WARPS, MOST_STAGES = 12, 4
MOST_SHARED_BYTES = 208 << 10  # of a ring; a block has more besides
REST_THREADS = 256


class SketchPass:
    """Queries of a batch over the codes of their contexts. Definitions: `csattn.sketch.reference`.

    Scores are the definition's integers. What a row gets depends neither on the rows beside it nor on the device.
    Launches share the memory that is set aside here, so they must be ordered.
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
        keeps_scores: bool,  # to choose by them
        sums_rest: bool,  # to attend to what is not chosen
    ) -> None:
        self.shape, self.batch_size, self.max_segments = shape, batch_size, max_segments
        self._softmax_scale, self._query_dtype = float(softmax_scale), query_dtype
        self._keeps_scores, self._sums_rest = keeps_scores, sums_rest
        self._num_blocks = multiprocessors(device)
        self.max_keys = -(-max_context_len // CHUNK_KEYS) * CHUNK_KEYS
        self._tile_keys = tile_keys(max_context_len)
        self.max_tiles = self.max_keys // self._tile_keys
        slots = batch_size * shape.num_index_heads
        queries = slots * shape.group_size
        self._combining_blocks = blocks_of_slot(device, slots, self.max_keys, 2)

        def memory(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._coordinates = memory(queries * max_segments, shape.num_coords)
        self._means = memory(queries * max_segments)
        self._asked = memory(queries * max_segments, dtype=torch.float64)
        self._multipliers = memory(queries * max_segments, shape.num_coords, dtype=torch.int8)
        self._offsets = memory(queries * max_segments, dtype=torch.int32)
        self._slopes = memory(queries)
        self._scores = memory(queries * self.max_keys * keeps_scores, dtype=torch.int16)
        self._statistics = memory(queries, self.max_tiles, 2)
        self._sums = memory(queries * self.max_tiles * sums_rest, self._num_sums)

    def __repr__(self) -> str:
        return f"<SketchPass for {self.batch_size} rows of {self.max_keys} keys>"

    @property
    def workspace_bytes(self) -> int:
        """Device memory of its own."""
        queries = self._coordinates, self._means, self._asked, self._multipliers, self._offsets, self._slopes
        return sum(part.nbytes for part in (*queries, self._scores, self._statistics, self._sums))

    def run(
        self,
        q: Tensor,  # [batch_size, num_q_heads, head_dim], after RoPE
        indexes: DeviceIndexes,
        layer_idx: int,
        context_ids: Tensor,  # [batch_size] int32, -1: idle
        choices: Tensor | None = None,  # of a search, cleared for it
    ) -> None:
        """Enqueue on torch's current stream."""
        shape = self.shape
        require_queries(q, shape, self.batch_size, self._query_dtype)
        assert indexes.max_segments == self.max_segments, f"indexes have up to {indexes.max_segments} segments"
        table, config = indexes.tables[layer_idx], indexes.config
        grid = self.max_segments, shape.num_index_heads, self.batch_size
        projected = self._coordinates, self._means, self._asked, self.max_segments
        cleared = 0 if choices is None else choices
        self._project.launch(grid, self._project_threads, q, table, context_ids, *projected, cleared)
        self._make_integers.launch(
            grid, INTEGER_THREADS, table, context_ids, self._softmax_scale, *projected, *self._queries[:-1]
        )
        self._score.launch(
            (self._num_blocks, 1, 1),
            32 * PASS_WARPS,
            *(table, indexes.context_lens, context_ids, config.sink_len, config.window_len, *self._queries),
            *(self._scores, self._statistics, self._sums, self.max_keys, self.max_tiles),
        )

    def combine(self, places: Places, worths: Tensor, choices: Tensor) -> None:
        """Enqueue what makes group scores of the scores, and counts them."""
        self._combine.launch(
            (self._combining_blocks, self.shape.num_index_heads, self.batch_size),
            THREADS,
            *(*places, self._scores, self._statistics, self.max_tiles, self._slopes),
            *(worths, self.max_keys, choices),
        )

    def attend_rest(
        self,
        indexes: DeviceIndexes,
        layer_idx: int,
        context_ids: Tensor,
        chosen: DeviceSelection,  # ids of keys
        posted: Tensor,  # [slots, num_parts, group_size, head_dim + 4]: see `DeviceAttention`
        rest_parts: int,  # the last of them are written
    ) -> None:
        """Enqueue attention to the rows that may be chosen and are not, after `run` with the same rows."""
        shape = self.shape
        assert self._sums_rest, "this pass sums up nothing of the rest"
        assert posted.shape[2:] == (shape.group_size, shape.head_dim + 4), f"parts have shape {tuple(posted.shape)}"
        self._rest(rest_parts).launch(
            (rest_parts, shape.num_index_heads, self.batch_size),
            REST_THREADS,
            *(indexes.tables[layer_idx], indexes.context_lens, context_ids, *self._queries),
            *(self._coordinates, self._means, self._softmax_scale),
            *(self._statistics, self._sums, self.max_tiles),
            *(chosen.kv_indices, chosen.valid_len, chosen.kv_indices.shape[2], posted, posted.shape[1]),
        )

    @property
    def _queries(self) -> tuple[Tensor, Tensor, Tensor, int]:
        """Struct Queries of codes.cu."""
        return self._multipliers, self._offsets, self._slopes, self.max_segments

    @property
    def _word_groups(self) -> int:
        """Of four words: what a lane loads of a key is one word of each."""
        return -(-self.shape.num_fine // 4) + -(-self.shape.num_coarse // 4)

    @property
    def _num_sums(self) -> int:
        return 32 * -(-self.shape.num_fine // 4) + 4

    @property
    def _project_threads(self) -> int:
        pairs = self.shape.group_size * (self.shape.num_coords // 2 + 1)
        return int(np.clip(-(-pairs // 32) * 32, 64, 512))

    @cached_property
    def _project(self) -> CudaKernel:
        shared_bytes = self.shape.head_dim * (2 * self.shape.num_coords + 8)
        how = self._query_dtype, self._project_threads, shared_bytes
        return compiled("project_queries", ("choice", "codes", "project"), self.shape, *how, TILE_KEYS=self._tile_keys)

    @cached_property
    def _make_integers(self) -> CudaKernel:
        parts = "choice", "codes", "project"
        return compiled(
            "make_integers", parts, self.shape, self._query_dtype, INTEGER_THREADS, TILE_KEYS=self._tile_keys
        )

    @cached_property
    def _score(self) -> CudaKernel:
        stage_bytes = PASS_WARPS * self._word_groups * 1024
        stages = max(2, min(MOST_STAGES, MOST_SHARED_BYTES // stage_bytes))
        more = {"BATCH": self.batch_size, "STAGES": stages, "TILE_KEYS": self._tile_keys}
        more |= {"SCORES": int(self._keeps_scores), "REST": int(self._sums_rest)}
        parts, shape = ("codes", "tiles", "score_codes"), self.shape
        shared_bytes = stages * stage_bytes
        return compiled("score_codes", parts, shape, self._query_dtype, 32 * PASS_WARPS, shared_bytes, **more)

    @cached_property
    def _combine(self) -> CudaKernel:
        parts = "choice", "codes", "combine_codes"
        return compiled("combine_codes", parts, self.shape, TILE_KEYS=self._tile_keys)

    def _rest(self, rest_parts: int) -> CudaKernel:
        shape, warps = self.shape, REST_THREADS // 32
        transform_bytes = 2 * shape.num_coords * shape.head_dim + 4 * shape.head_dim
        tray_bytes = warps * -(-shape.num_fine // 4) * 512
        shared_bytes = transform_bytes + tray_bytes + warps * shape.group_size * self._num_sums * 4
        parts = "codes", "rest"
        more = {"REST_PARTS": rest_parts, "TILE_KEYS": self._tile_keys, "AFTER_SEARCH": int(self._keeps_scores)}
        return compiled("attend_rest", parts, shape, self._query_dtype, REST_THREADS, shared_bytes, **more)


def tile_keys(max_context_len: int) -> int:
    """Keys that are summed up together: enough tiles for all warps of a device, and no more than it takes."""
    keys = LEAST_TILE_KEYS
    while keys < MOST_TILE_KEYS and keys * TILES_OF_CONTEXT < max_context_len:
        keys *= 2
    return keys
