"""The interface between a decode step and the context's KV, wherever it is stored."""

from collections.abc import Generator, Iterator
from typing import Protocol

from torch import Tensor

STREAM_ROWS = 1024  # rows of a piece that is attended to at once, when a context is streamed


class KvStore(Protocol):
    """The context KV of all layers; read-only, shared by all requests."""

    def rows(self, layer_idx: int, rows: slice) -> Tensor:
        """Return rows that stay in memory, such as sinks and window: [num_kv_heads, num_rows, 2, head_dim]."""
        ...

    def gather(self, layer_idx: int, kv_indices: Tensor) -> Tensor:
        """Copy chosen rows into contiguous memory: [..., num_index_heads, top_k, 2, head_dim].

        kv_indices: [..., num_index_heads, top_k] integers; num_index_heads is a multiple of num_kv_heads, and
        consecutive index heads share a KV head. Indices outside the context are clamped into it: mask their rows.
        """
        ...

    def stream(self, layer_idx: int, rows: slice) -> Generator[Tensor, None, None]:
        """Yield a range of rows in pieces [num_kv_heads, num_rows, 2, head_dim], each valid until the next one.

        Close it, also after an error: one that is still referenced may block the next.
        """
        ...

    def prefetch(self, layer_idx: int, kv_indices: Tensor) -> None:
        """Start to load rows that will be gathered next. Returns at once."""
        ...

    def close(self) -> None:
        """Free all resources. No call may be in progress."""
        ...


def pieces_of(rows: slice, stream_rows: int) -> Iterator[slice]:
    """Cut a range at multiples of `stream_rows`, wherever the range starts."""
    start = rows.start
    while start < rows.stop:
        stop = min(rows.stop, (start // stream_rows + 1) * stream_rows)
        yield slice(start, stop)
        start = stop
