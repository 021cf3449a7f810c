"""What a decode step asks of the context's KV, wherever it lies."""

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor

STREAM_ROWS = 1024  # of a piece that is attended to at once, where a context is streamed


class KvStore(Protocol):
    """The context KV of all layers; never changed, shared by all requests."""

    def rows(self, layer_idx: int, rows: slice) -> Tensor:
        """Rows that stay in memory, sinks and window say: [num_kv_heads, num_rows, 2, head_dim]."""
        ...

    def gather(self, layer_idx: int, kv_indices: Tensor) -> Tensor:
        """Copy chosen rows together.

        kv_indices: [..., num_index_heads, top_k] integers; num_index_heads is a multiple of num_kv_heads, and
        neighbours share a KV head. Indices outside the context are clamped into it: mask what they yield.
        Returns [..., num_index_heads, top_k, 2, head_dim].
        """
        ...

    def stream(self, layer_idx: int, rows: slice) -> Iterator[Tensor]:
        """A range of rows in pieces [num_kv_heads, num_rows, 2, head_dim], each valid until the next is asked for."""
        ...

    def prefetch(self, layer_idx: int, kv_indices: Tensor) -> None:
        """Say that these rows will be gathered next. Returns at once."""
        ...

    def close(self) -> None:
        """No call may be under way."""
        ...


def pieces_of(rows: slice, stream_rows: int) -> Iterator[slice]:
    """Cut a range where a context's pages begin, whatever the range."""
    start = rows.start
    while start < rows.stop:
        stop = min(rows.stop, (start // stream_rows + 1) * stream_rows)
        yield slice(start, stop)
        start = stop
