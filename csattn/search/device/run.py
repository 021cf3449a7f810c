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
from csattn.search.device.indexes import DeviceIndexes
from csattn.table.rows import KEYS_PER_BLOCK, RowTable

HERE = Path(__file__).parent
ROWS = ("cluster", "match", "worth", "rows", "row_worth", "select", "search_rows")
LISTS = ("cluster", "match", "worth", "lists", "select", "search_lists")
CLUSTER = 16  # blocks that serve one index head of one row
THREADS = 512
# Two blocks fit on a multiprocessor with this much dynamic shared memory each, one with the larger figure.
HALF_SHARED_BYTES = 98 << 10
FULL_SHARED_BYTES = 208 << 10
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
        largest = 7 if self.score_bits == 4 else 127
        if self.layout == "rows" and largest * self.num_subspaces / 2 >= 32766:
            raise ConfigError(f"{self.num_subspaces} subspaces of {self.score_bits}-bit scores do not fit 16-bit sums")

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
    """Chooses rows for a whole batch in one launch. Definition: `csattn.search.reference.search`, without a tail.

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
        self._softmax_scale = softmax_scale
        self._query_dtype = query_dtype
        num_blocks = -(-max_context_len // KEYS_PER_BLOCK)
        self._columns = -(-num_blocks // CLUSTER) * (KEYS_PER_BLOCK * shape.score_bits // 128)
        self._scratch = torch.empty(batch_size * self._scratch_words, dtype=torch.int32, device=device)

    def __repr__(self) -> str:
        return f"<DeviceSearch {self.shape.layout} for {self.batch_size} rows of {self.max_context_len} keys>"

    @property
    def workspace_bytes(self) -> int:
        """Device memory of its own."""
        return self._scratch.numel() * 4

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
        common = (
            q,
            indexes.tables[layer_idx],
            indexes.context_lens,
            indexes.top_ks,
            context_ids,
            indexes.config.sink_len,
            indexes.config.window_len,
            float(self._softmax_scale),
            int(shape.weigh_by_norm),
        )
        layout: tuple[Tensor | int, ...] = indexes.list_lens, self._scratch, self.max_context_len
        if shape.layout == "rows":
            layout = self._scratch, self._shared_columns, self._columns - self._shared_columns
        result = out.kv_indices, out.valid_len, out.kv_indices.shape[2]
        self._kernel.launch((CLUSTER, heads, self.batch_size), THREADS, *common, *layout, *result)

    @cached_property
    def _kernel(self) -> CudaKernel:
        shape = self.shape
        defines = {
            "GROUP_SIZE": shape.group_size,
            "HEAD_DIM": shape.head_dim,
            "SUBSPACES": shape.num_subspaces,
            "CENTROIDS": shape.num_centroids,
            "SCORE_BITS": shape.score_bits,
            "CLUSTER": CLUSTER,
            "THREADS": THREADS,
            "BLOCKS_PER_SM": 2,
            "QUERY": QUERY_TYPES[self._query_dtype],
            "QUERY_IS_HALF": int(self._query_dtype == torch.float16),
        }
        parts, name = (ROWS, "search_rows") if shape.layout == "rows" else (LISTS, "search_lists")
        shared_bytes = self._shared_bytes(self._shared_columns) if shape.layout == "rows" else 0
        sources = tuple(HERE / f"{part}.cu" for part in parts)
        return cuda_kernel(sources, name, defines, shared_bytes, wide_cluster=CLUSTER > 8)

    @cached_property
    def _shared_columns(self) -> int:
        """How many of a block's columns keep their scores in shared memory: all, or as many as fit, in whole tiles."""
        for room in (HALF_SHARED_BYTES, FULL_SHARED_BYTES):
            if self._shared_bytes(self._columns) <= room:
                return self._columns
        columns = self._columns
        while self._shared_bytes(columns) > FULL_SHARED_BYTES:
            columns = (columns - 1) // 32 * 32
        return columns

    def _shared_bytes(self, shared_columns: int) -> int:
        """Of the cells (struct Cells, with its padding), and of the statistics of all tiles."""
        tiles = -(-self._columns // 32)
        return self._planes * self._quads * (shared_columns + 2) * 16 + self.shape.group_size * tiles * 8

    @property
    def _planes(self) -> int:
        return max(2, self.shape.group_size)

    @property
    def _quads(self) -> int:
        return 16 // self.shape.score_bits

    @property
    def _scratch_words(self) -> int:
        """Words in global memory for one row of the batch."""
        if self.shape.layout == "lists":
            return self.shape.num_index_heads * self.shape.group_size * self.max_context_len
        spilled = self._columns - self._shared_columns
        return self.shape.num_index_heads * CLUSTER * self._planes * self._quads * spilled * 4
