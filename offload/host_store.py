"""The context's KV in host memory, and the gather of chosen rows from it."""

from collections.abc import Generator, Iterable, Sequence

import torch
from torch import Tensor

from offload.kv_store import pieces_of


class HostStore:
    """Owns the context KV of all layers; read-only, shared by all requests. A `KvStore`.

    kv: per layer [num_kv_heads, context_len, 2, head_dim], K at [..., 0, :] and V at [..., 1, :]; may be
    memory-mapped. With K and V of one key adjacent, one row is one read.
    stream_rows: rows in each piece of `stream`. Default: all rows at once.
    """

    def __init__(self, kv: Sequence[Tensor], stream_rows: int | None = None):
        self._kv = kv
        self._stream_rows = stream_rows

    def rows(self, layer_idx: int, rows: slice) -> Tensor:
        """Return a contiguous range of rows without a copy: [num_kv_heads, num_rows, 2, head_dim]."""
        return self._kv[layer_idx][:, rows]

    def gather(self, layer_idx: int, kv_indices: Tensor) -> Tensor:
        """See `KvStore.gather`."""
        kv = self._kv[layer_idx]
        rows = kv.view(-1, kv.shape[2:].numel()).index_select(0, row_numbers(kv.shape, kv_indices).flatten())
        return rows.view(*kv_indices.shape, *kv.shape[2:])

    def stream(self, layer_idx: int, rows: slice) -> Generator[Tensor, None, None]:
        """Yield a range of rows piece by piece."""
        if self._stream_rows is None:
            yield self.rows(layer_idx, rows)
            return
        for piece in pieces_of(rows, self._stream_rows):
            yield self.rows(layer_idx, piece)

    def prefetch(self, layer_idx: int, kv_indices: Tensor) -> None:
        """Do nothing: the rows are in host memory already."""

    def close(self) -> None:
        """Do nothing: the rows are freed with the store, or belong to the caller."""


def distinct(layers: Iterable[Tensor]) -> list[Tensor]:
    """Return the layers that are in different memory: several layers may share their rows."""
    return list({layer.data_ptr(): layer for layer in layers}.values())


def row_numbers(shape: Sequence[int], kv_indices: Tensor) -> Tensor:
    """Map a selection to row numbers in [num_kv_heads * context_len]; padding becomes some row of its head.

    shape: num_kv_heads, context_len, ...; kv_indices and the result: [..., num_index_heads, top_k].
    """
    num_kv_heads, context_len = shape[:2]
    num_index_heads = kv_indices.shape[-2]
    kv_head = torch.arange(num_index_heads) // (num_index_heads // num_kv_heads)
    return kv_indices.long().clamp(0, context_len - 1) + (kv_head * context_len)[:, None]
