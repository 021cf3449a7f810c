"""Plan once, search at every step: memory is set aside here, launches allocate nothing and never wait."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from csattn.batch import DeviceSelection
from csattn.cuda import CudaKernel, cuda_kernel, num_multiprocessors
from csattn.errors import ConfigError
from csattn.index import LayerIndex
from csattn.search.device.clusters import CHUNK_KEYS, MOST_KEYS_OF_BLOCK, cluster_size, keys_of_block
from csattn.search.device.indexes import TILE_BYTES, DeviceIndexes
from csattn.table.rows import RowTable

HERE = Path(__file__).parent
INTRINSICS = HERE / "intrinsics.cu"
THREADS = 512  # of all kernels but match
MAX_MATCH_WARPS = 8
MAX_SUBSPACE_DIM = 32  # a centroid lies in a thread's registers
# sizes in bytes that the sources fix, of structs Match, TileStatistics and Choice; and MAX_BLOCKS
MATCH_BYTES, STATISTICS_BYTES, CHOICE_BYTES = 16, 8, 4 * (4096 + 3 + 256 + 2 * 512 + 1 + 33 * 256 + 4)
MAX_BLOCKS = 256
STREAM_BYTES = THREADS // 32 * 5 * 512  # of score_rows' ring, for each copy that a lane makes in a step
QUERY_TYPES = {torch.float32: "float", torch.float16: "u16", torch.bfloat16: "u16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexShape:
    """What all indexes of one search have in common; kernels are compiled for it."""

    layout: Literal["rows", "lists"]
    num_index_heads: int
    group_size: int  # queries that one index head answers for
    head_dim: int
    num_subspaces: int
    num_centroids: int
    score_bits: int = 4  # rows only
    weigh_by_norm: bool = True
    pool_size: int = 1  # query heads that are made one query

    def __post_init__(self) -> None:
        if self.head_dim % self.num_subspaces:
            raise ConfigError(f"{self.num_subspaces} subspaces do not divide head_dim {self.head_dim}")
        if self.head_dim // self.num_subspaces > MAX_SUBSPACE_DIM:
            raise ConfigError(
                f"subspaces are {self.head_dim // self.num_subspaces} wide, the search on a GPU takes at most "
                f"{MAX_SUBSPACE_DIM}; rebuild the index with more subspaces, or decode on the CPU"
            )
        largest = 7 if self.score_bits == 4 else 127
        if self.layout == "rows" and largest * self.num_subspaces / 2 >= 32766:
            raise ConfigError(f"{self.num_subspaces} subspaces of {self.score_bits}-bit scores do not fit 16-bit sums")

    @property
    def num_q_heads(self) -> int:
        return self.num_index_heads * self.group_size * self.pool_size

    @property
    def worths_are_sums(self) -> bool:
        """Of a single query, a sum of 16 bits says what a key is worth."""
        return self.layout == "rows" and self.group_size == 1

    @property
    def rows_at_once(self) -> int:
        """Rows that the lanes of a warp add up at a time (ROWS_AT_ONCE of score_rows.cu)."""
        if not self.worths_are_sums:
            return 1
        return 4 if self.score_bits == 4 else 2

    @property
    def tile_keys(self) -> int:
        """Keys that are scored together (TILE_KEYS of rows.cu)."""
        return TILE_BYTES * 8 // self.score_bits

    @classmethod
    def of(cls, index: LayerIndex, num_q_heads: int) -> "IndexShape":
        """The shape of a layer's index."""
        rows = isinstance(index.table, RowTable)
        return cls(
            layout="rows" if rows else "lists",
            num_index_heads=index.num_heads,
            group_size=1 if index.pool_group else num_q_heads // index.num_heads,
            head_dim=int(index.query_basis.shape[1]),
            num_subspaces=index.num_subspaces,
            num_centroids=index.num_centroids,
            score_bits=index.table.score_bits if isinstance(index.table, RowTable) else 4,
            weigh_by_norm=index.weigh_by_norm,
            pool_size=num_q_heads // index.num_heads if index.pool_group else 1,
        )


class DeviceSearch:
    """Chooses rows for a whole batch. Definition: `csattn.search.reference.search`, without a tail.

    A selection does not depend on the batch it is made in. Scores are the definition's integers; shares are float32.
    """

    def __init__(
        self,
        shape: IndexShape,
        *,
        batch_size: int,
        max_context_len: int,
        softmax_scale: float,
        query_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if query_dtype not in QUERY_TYPES:
            raise ConfigError(f"queries of {query_dtype} cannot be searched with; use float32, float16 or bfloat16")
        self.shape = shape
        self.batch_size = batch_size
        self.max_context_len = max_context_len
        self._softmax_scale = float(softmax_scale)
        self._query_dtype = query_dtype
        self._rows = shape.layout == "rows"
        self._max_keys = -(-max_context_len // CHUNK_KEYS) * CHUNK_KEYS
        self._max_tiles = self._max_keys // (shape.tile_keys if self._rows else CHUNK_KEYS)
        self._slots = batch_size * shape.num_index_heads
        queries = self._slots * shape.group_size

        def memory(num_bytes: int) -> Tensor:
            return torch.zeros(num_bytes, dtype=torch.uint8, device=device)

        self._matches = memory(queries * shape.num_subspaces * MATCH_BYTES)
        single = shape.worths_are_sums
        self._scores = memory(0 if single else queries * self._max_keys * (2 if self._rows else 4))
        self._statistics = memory(queries * self._max_tiles * STATISTICS_BYTES)
        self._slopes = memory(queries * 4)
        self._worths = memory(self._slots * self._max_keys * (2 if single else 4))
        self._marks = memory(0 if single else self._slots * self._max_keys // 8)
        self._choices = memory(self._slots * CHOICE_BYTES)
        self._list_kernels: dict[str, CudaKernel] = {}
        self._num_multiprocessors = num_multiprocessors(device)

    def __repr__(self) -> str:
        return f"<DeviceSearch {self.shape.layout} for {self.batch_size} rows of {self.max_context_len} keys>"

    @property
    def workspace_bytes(self) -> int:
        """Device memory of its own."""
        parts = self._matches, self._scores, self._statistics, self._slopes, self._worths, self._marks, self._choices
        return sum(part.numel() for part in parts)

    def search(
        self,
        q: Tensor,  # [batch_size, num_q_heads, head_dim], after RoPE
        indexes: DeviceIndexes,
        layer_idx: int,
        context_ids: Tensor,  # [batch_size] int32, -1: idle
        out: DeviceSelection,  # written
    ) -> None:
        """Enqueue the search of one layer on torch's current stream."""
        shape, heads, config = self.shape, self.shape.num_index_heads, indexes.config
        assert q.is_contiguous() and q.dtype == self._query_dtype, f"q is {q.dtype}, or not contiguous"
        assert q.shape == (self.batch_size, shape.num_q_heads, shape.head_dim), f"q has shape {tuple(q.shape)}"
        assert out.kv_indices.shape[:2] == (self.batch_size, heads), f"out has shape {tuple(out.kv_indices.shape)}"
        table, lens = indexes.tables[layer_idx], indexes.context_lens
        matching = int(shape.weigh_by_norm), self._matches, self._choices
        self._match.launch(self._grid(shape.num_subspaces), self._match_threads, q, table, context_ids, *matching)
        context = lens, indexes.top_ks, context_ids, config.sink_len, config.window_len
        if self._rows:
            self._score_rows(table, lens, context_ids, context)
        else:
            self._add_lists(table, lens, indexes.list_lens, context_ids, context)
        chosen = out.kv_indices, out.kv_indices.shape[2]
        worths, marks, choices = (self._worths, self._max_keys), self._marks, self._choices
        written = choices, out.kv_indices, out.valid_len, out.kv_indices.shape[2]
        blocks = self._blocks(2, self._max_keys // CHUNK_KEYS)
        if not shape.worths_are_sums:
            self._launch(self._find, blocks, *context, *worths, marks, choices, *chosen)
            self._launch(self._write, blocks, *context, marks, self._max_keys, *written)
        elif self._many_keys:
            self._launch(self._find, blocks, *context, *worths, choices, *chosen)
            self._launch(self._write, blocks, *context, *worths, *written)
        else:
            self._launch(self._choose, self._cluster, *context, *worths, *written)

    def _score_rows(self, table: Tensor, lens: Tensor, context_ids: Tensor, context: tuple[Any, ...]) -> None:
        if self.shape.worths_are_sums:
            blocks, worths = self._blocks(2, self._max_tiles), (self._worths, self._max_keys, self._choices)
            return self._launch(self._score, blocks, table, *context, self._matches, *worths)
        blocks = self._blocks(1, self._max_tiles)
        sums = self._scores, self._statistics, self._slopes, self._max_tiles
        self._launch(self._score, blocks, table, lens, context_ids, self._matches, self._softmax_scale, *sums)
        blocks = self._blocks(2, self._max_tiles)
        self._launch(self._combine, blocks, *context, *sums, self._worths, self._max_keys, self._choices)

    def _add_lists(
        self, table: Tensor, lens: Tensor, list_lens: Tensor, context_ids: Tensor, context: tuple[Any, ...]
    ) -> None:
        blocks, scores = self._blocks(4, self._max_keys // CHUNK_KEYS), (self._scores, self._max_keys)
        self._launch(self._lists("clear_scores"), blocks, lens, context_ids, *scores)
        for subspace in range(self.shape.num_subspaces):
            chosen = table, list_lens, context_ids, self._matches, subspace
            self._launch(self._lists("add_list"), blocks, *chosen, *scores)
        if self.shape.group_size > 1:
            summed = lens, context_ids, self._softmax_scale, *scores, self._statistics
            self._launch(self._lists("sum_tiles"), blocks, *summed)
        read = self._softmax_scale, self._scores, self._statistics
        self._launch(self._combine, blocks, *context, *read, self._worths, self._max_keys, self._choices)

    def _launch(self, kernel: CudaKernel, blocks: int, *args: Any) -> None:
        kernel.launch(self._grid(blocks), THREADS, *args)

    def _grid(self, blocks: int) -> tuple[int, int, int]:
        return blocks, self.shape.num_index_heads, self.batch_size

    def _blocks(self, per_multiprocessor: int, most: int) -> int:
        """Blocks for each slot that together fill the device once."""
        return max(1, min(most, MAX_BLOCKS, per_multiprocessor * self._num_multiprocessors // self._slots))

    @property
    def _match_threads(self) -> int:
        return 32 * min(self.shape.group_size, MAX_MATCH_WARPS)

    @cached_property
    def _match(self) -> CudaKernel:
        return self._compile(("common", "choice", "match"), "match_centroids", self._match_threads)

    @cached_property
    def _score(self) -> CudaKernel:
        copies = -(-self.shape.num_subspaces // self.shape.rows_at_once)
        shared_bytes = STREAM_BYTES * (2 if copies % 2 == 0 else 1)
        if self.shape.worths_are_sums:
            parts: tuple[str, ...] = "common", "choice", "rows", "sums", "score_rows", "score_single"
            return self._compile(parts, "score_single", shared_bytes=shared_bytes)
        parts = "common", "choice", "rows", "score_rows", "score_group"
        return self._compile(parts, "score_group", shared_bytes=shared_bytes)

    @cached_property
    def _combine(self) -> CudaKernel:
        if self._rows:
            return self._compile(("common", "choice", "rows", "combine_rows"), "combine_rows")
        return self._lists("combine_lists")

    def _lists(self, name: str) -> CudaKernel:
        if name not in self._list_kernels:
            self._list_kernels[name] = self._compile(("common", "choice", "lists", "combine_lists"), name)
        return self._list_kernels[name]

    @cached_property
    def _cluster(self) -> int:
        """Blocks that together choose for one slot."""
        return cluster_size(self._max_keys, self._slots, self._num_multiprocessors)

    @cached_property
    def _many_keys(self) -> bool:
        """More than the blocks of a cluster can hold."""
        return self.shape.worths_are_sums and keys_of_block(self._max_keys, self._cluster) > MOST_KEYS_OF_BLOCK

    @cached_property
    def _choose(self) -> CudaKernel:
        parts = "common", "choice", "boundary", "sums", "choose_sums"
        return self._compile(parts, "choose_sums", CLUSTER=self._cluster)

    @cached_property
    def _find(self) -> CudaKernel:
        if self._many_keys:
            return self._compile(("common", "choice", "boundary", "sums", "find_sums"), "find_sums")
        return self._compile(("common", "choice", "boundary", "find"), "find_keys")

    @cached_property
    def _write(self) -> CudaKernel:
        if self._many_keys:
            return self._compile(("common", "choice", "sums", "write_sums"), "write_sums")
        return self._compile(("common", "choice", "write"), "write_keys")

    def _compile(
        self, parts: tuple[str, ...], name: str, threads: int = THREADS, shared_bytes: int = 0, **more: int
    ) -> CudaKernel:
        shape = self.shape
        defines = {
            "GROUP_SIZE": shape.group_size,
            "POOL_SIZE": shape.pool_size,
            "HEAD_DIM": shape.head_dim,
            "SUBSPACES": shape.num_subspaces,
            "CENTROIDS": shape.num_centroids,
            "SCORE_BITS": shape.score_bits,
            "LISTS": int(not self._rows),
            "THREADS": threads,
            "QUERY": QUERY_TYPES[self._query_dtype],
            "QUERY_IS_HALF": int(self._query_dtype == torch.float16),
            "MANY_KEYS": int(self._many_keys),
            **more,
        }
        sources = (INTRINSICS, *(HERE / f"{part}.cu" for part in parts))
        return cuda_kernel(sources, name, defines, shared_bytes, early_start=True, most_shared=shape.worths_are_sums)
