"""Gathers listed rows between memories that the device can address, by a kernel: no host calls, no copy engine."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from csattn.cuda import cuda_kernel
from offload.errors import OffloadError

PIECE_BYTES = 16  # one load of a thread
_NUM_BLOCKS, _THREADS = 16, 512  # few thread blocks saturate the link
_IN_FLIGHT = 4  # outstanding loads of a thread
_SOURCE = Path(__file__).with_name("gather.cu")


class RowLists(NamedTuple):
    """Rows to copy, all on the device: row `from_rows[l, i]` of memory `from_addresses[l]` goes to row
    `to_rows[l, i]` of memory `to_addresses[l]`, for every list l and every i below `counts[l]`.

    An address is that of the memory's row 0, a multiple of 16, in device memory or pinned host memory. Rows are copied
    as bytes, whatever their format.
    """

    counts: Tensor  # [num_lists] int32
    from_addresses: Tensor  # [num_lists] int64
    to_addresses: Tensor  # [num_lists] int64
    from_rows: Tensor  # [num_lists, capacity] int32
    to_rows: Tensor  # [num_lists, capacity] int32


def make_row_lists(num_lists: int, capacity: int, device: torch.device) -> RowLists:
    """Make lists that are all empty."""
    return RowLists(
        counts=torch.zeros(num_lists, dtype=torch.int32, device=device),
        from_addresses=torch.zeros(num_lists, dtype=torch.int64, device=device),
        to_addresses=torch.zeros(num_lists, dtype=torch.int64, device=device),
        from_rows=torch.zeros(num_lists, capacity, dtype=torch.int32, device=device),
        to_rows=torch.zeros(num_lists, capacity, dtype=torch.int32, device=device),
    )


class RowGather:
    """The gather kernel for rows of one size. It occupies few multiprocessors (SMs)."""

    def __init__(self, row_bytes: int, max_lists: int) -> None:
        if row_bytes <= 0 or row_bytes % PIECE_BYTES:
            raise OffloadError(
                f"rows of {row_bytes} bytes cannot be gathered: a row has to be a multiple of {PIECE_BYTES} bytes; "
                "choose a head_dim and dtype for which it is, or a placement without a gather"
            )
        self.row_bytes = row_bytes
        self._max_lists = max_lists
        defines = {"ROW_BYTES": row_bytes, "MAX_LISTS": max_lists, "THREADS": _THREADS, "IN_FLIGHT": _IN_FLIGHT}
        self._kernel = cuda_kernel(_SOURCE, "gather_rows", defines, early_start=True)

    def __repr__(self) -> str:
        return f"<RowGather {self.row_bytes}-byte rows of up to {self._max_lists} lists>"

    def launch(self, lists: RowLists) -> None:
        """Enqueue the copy on torch's current stream. It must not write a row that another list entry reads."""
        num_lists, capacity = lists.from_rows.shape
        assert num_lists <= self._max_lists, f"{num_lists} lists for {self!r}"
        assert num_lists * capacity < 1 << 32, "the kernel counts rows in 32 bits"
        self._kernel.launch((_NUM_BLOCKS, 1, 1), _THREADS, *lists, num_lists, capacity)
