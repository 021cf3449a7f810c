"""Plan once, search at every step: memory is set aside here, launches allocate nothing and never wait."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from csattn.batch import DeviceSelection
from csattn.cuda import CudaKernel, cuda_kernel
from csattn.errors import ConfigError
from csattn.index import LayerIndex
from csattn.search.device.indexes import TILE_BYTES, DeviceIndexes
from csattn.table.rows import RowTable

HERE = Path(__file__).parent
MATCH = ("common", "match")
SCORE_ROWS = ("common", "rows", "score_rows")
CHOOSE_ROWS = ("common", "cluster", "rows", "worth", "select", "choose_rows")
SEARCH_LISTS = ("common", "cluster", "worth", "select", "lists", "search_lists")
MATCH_THREADS = 256
SCORE_THREADS = 512
CHOOSE_THREADS = 512
LARGEST_CLUSTER = 16  # blocks that choose for one index head of one row
MAX_SUBSPACE_DIM = MATCH_THREADS // 8  # eight threads sum up each coordinate
MATCH_BYTES = 16  # struct Match of common.cu
# Worths of a block's keys that are kept in shared memory at most; two blocks still fit on a multiprocessor with half.
SHARED_BYTES = 208 << 10
UNIT_KEYS = 4  # of worth.cu; a unit is 16 bytes
QUERY_TYPES = {torch.float32: "float", torch.float16: "u16", torch.bfloat16: "u16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexShape:
    """What all indexes of one search have in common; kernels are compiled for it."""

    layout: Literal["rows", "lists"]
    num_index_heads: int
    group_size: int  # query heads that one index head answers for
    head_dim: int
    num_subspaces: int
    num_centroids: int
    score_bits: int = 4  # rows only
    weigh_by_norm: bool = True

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
    def tile_keys(self) -> int:
        """Keys that are scored together (TILE_KEYS of rows.cu)."""
        return TILE_BYTES * 8 // self.score_bits

    @property
    def keys_per_word(self) -> int:
        """Keys of one query row whose scores share 32 bits."""
        return 2 if self.layout == "rows" else 1

    @classmethod
    def of(cls, index: LayerIndex, num_q_heads: int) -> "IndexShape":
        """The shape of a layer's index."""
        rows = isinstance(index.table, RowTable)
        return cls(
            layout="rows" if rows else "lists",
            num_index_heads=index.num_heads,
            group_size=num_q_heads // index.num_heads,
            head_dim=int(index.query_basis.shape[1]),
            num_subspaces=index.num_subspaces,
            num_centroids=index.num_centroids,
            score_bits=index.table.score_bits if isinstance(index.table, RowTable) else 4,
            weigh_by_norm=index.weigh_by_norm,
        )


class DeviceSearch:
    """Chooses rows for a whole batch, in two or three launches. Definition: `csattn.search.reference.search`, no tail.

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
        self._max_tiles = -(-max_context_len // shape.tile_keys)
        num_groups = batch_size * shape.num_index_heads
        num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        self._splits = max(1, min(self._max_tiles, num_multiprocessors // num_groups))
        self._cluster = _cluster_size(num_groups, self._max_tiles, num_multiprocessors)
        self._block_units = -(-self._max_tiles // self._cluster) * shape.tile_keys // UNIT_KEYS

        def words(count: int) -> Tensor:
            return torch.empty(count, dtype=torch.int32, device=device)

        self._matches = words(num_groups * shape.group_size * shape.num_subspaces * MATCH_BYTES // 4)
        # rows: a short for every key and query row; lists: a float
        self._scores = words(num_groups * shape.group_size * self._max_tiles * shape.tile_keys // shape.keys_per_word)
        self._statistics = words(num_groups * shape.group_size * self._max_tiles * 2)
        self._slopes = words(num_groups * shape.group_size)
        self._fits = self._block_units * 16 <= SHARED_BYTES
        self._spilled = words(0 if self._fits else num_groups * self._cluster * self._block_units * 4)

    def __repr__(self) -> str:
        return f"<DeviceSearch {self.shape.layout} for {self.batch_size} rows of {self.max_context_len} keys>"

    @property
    def workspace_bytes(self) -> int:
        """Device memory of its own."""
        parts = self._matches, self._scores, self._statistics, self._slopes, self._spilled
        return sum(part.numel() * part.element_size() for part in parts)

    def search(
        self,
        q: Tensor,  # [batch_size, num_q_heads, head_dim], after RoPE
        indexes: DeviceIndexes,
        layer_idx: int,
        context_ids: Tensor,  # [batch_size] int32, -1: idle
        out: DeviceSelection,  # written
    ) -> None:
        """Enqueue the search of one layer on torch's current stream."""
        shape, heads = self.shape, self.shape.num_index_heads
        assert q.is_contiguous() and q.dtype == self._query_dtype, f"q is {q.dtype}, or not contiguous"
        assert q.shape == (self.batch_size, heads * shape.group_size, shape.head_dim), f"q has shape {tuple(q.shape)}"
        assert out.kv_indices.shape[:2] == (self.batch_size, heads), f"out has shape {tuple(out.kv_indices.shape)}"
        table, config, rows = indexes.tables[layer_idx], indexes.config, shape.layout == "rows"
        matching = context_ids, int(shape.weigh_by_norm), int(rows), self._matches
        self._match.launch((shape.num_subspaces, heads, self.batch_size), MATCH_THREADS, q, table, *matching)
        chosen = 0 if self._fits else self._spilled, out.kv_indices, out.valid_len, out.kv_indices.shape[2]
        grid = self._cluster, heads, self.batch_size
        resident = config.sink_len, config.window_len
        if rows:
            lens, sums = indexes.context_lens, (self._scores, self._statistics, self._slopes, self._max_tiles)
            self._score.launch(
                (self._splits, heads, self.batch_size),
                SCORE_THREADS,
                *(table, lens, context_ids, self._matches, self._softmax_scale),
                *sums,
            )
            contexts = lens, indexes.top_ks, context_ids
            self._choose.launch(grid, CHOOSE_THREADS, *contexts, *resident, *sums, *chosen)
        else:
            lists = table, indexes.context_lens, indexes.list_lens, indexes.top_ks, context_ids
            scores = self._softmax_scale, self._scores, self._max_tiles * shape.tile_keys, self._block_units
            self._choose.launch(grid, CHOOSE_THREADS, *lists, self._matches, *resident, *scores, *chosen)

    @cached_property
    def _match(self) -> CudaKernel:
        return cuda_kernel(_sources(MATCH), "match_centroids", self._defines(MATCH_THREADS), early_start=True)

    @cached_property
    def _score(self) -> CudaKernel:
        return cuda_kernel(_sources(SCORE_ROWS), "score_rows", self._defines(SCORE_THREADS), early_start=True)

    @cached_property
    def _choose(self) -> CudaKernel:
        """The launch that ends a search: of clusters, with the worths of a block's keys in shared memory."""
        parts, name = (CHOOSE_ROWS, "choose_rows") if self.shape.layout == "rows" else (SEARCH_LISTS, "search_lists")
        shared_bytes = self._block_units * 16 if self._fits else 0
        defines = self._defines(CHOOSE_THREADS)
        return cuda_kernel(_sources(parts), name, defines, shared_bytes, self._cluster > 8, early_start=True)

    def _defines(self, threads: int) -> dict[str, object]:
        shape = self.shape
        return {
            "GROUP_SIZE": shape.group_size,
            "HEAD_DIM": shape.head_dim,
            "SUBSPACES": shape.num_subspaces,
            "CENTROIDS": shape.num_centroids,
            "SCORE_BITS": shape.score_bits,
            "CLUSTER": self._cluster,
            "THREADS": threads,
            "QUERY": QUERY_TYPES[self._query_dtype],
            "QUERY_IS_HALF": int(self._query_dtype == torch.float16),
        }


def _sources(parts: tuple[str, ...]) -> tuple[Path, ...]:
    return tuple(HERE / f"{part}.cu" for part in parts)


def _cluster_size(num_groups: int, max_tiles: int, num_multiprocessors: int) -> int:
    """The largest power of two with which all clusters run at once, two blocks to a multiprocessor; 1 at least."""
    size = LARGEST_CLUSTER
    while size > 1 and (size * num_groups > 2 * num_multiprocessors or size > max_tiles):
        size //= 2
    return size
