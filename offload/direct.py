"""Chosen rows fetched by the device itself out of pinned context KV: the other way to do what `StagedRows` does."""

import torch
from torch import Tensor

from offload.gather import RowGather, RowLists
from offload.host_store import row_numbers
from offload.pinned import PinnedRows
from offload.staging import StagingRing
from offload.transfer import Stream, Transfer


class DirectRows:
    """The rows of one context, which the device can read; the host sends it no more than their numbers."""

    def __init__(self, rows: PinnedRows, ring: StagingRing, max_lists: int) -> None:
        """max_lists: of one call, the product of all but the last size of its kv_indices."""
        self._kv = rows.layers[0]
        self._addresses = rows.addresses
        self._ring = ring
        self._gather = RowGather(2 * self._kv.shape[-1] * self._kv.itemsize, max_lists)

    def submit(self, layer_idx: int, kv_indices: Tensor) -> Transfer:
        """As `StagedRows.submit`; returns when the rows' numbers are on their way."""
        num_lists, top_k = kv_indices.shape[:-1].numel(), kv_indices.shape[-1]
        rows_bytes = kv_indices.numel() * self._gather.row_bytes
        table_bytes = _table_bytes(num_lists, top_k)
        self._ring.require(rows_bytes + table_bytes)
        slot = self._ring.next()
        rows, device_table = slot.device[:rows_bytes], slot.device[rows_bytes : rows_bytes + table_bytes]
        table = _as_lists(slot.host[:table_bytes], num_lists, top_k)
        table.counts.fill_(top_k)
        # numbers count from the layer's first row, whichever head it belongs to
        table.from_addresses.fill_(self._addresses[layer_idx])
        table.from_rows.copy_(row_numbers(self._kv.shape, kv_indices).view(num_lists, top_k))
        table.to_addresses.fill_(rows.data_ptr())
        table.to_rows.copy_(torch.arange(num_lists * top_k).view(num_lists, top_k))
        lists = _as_lists(device_table, num_lists, top_k)

        def fill(stream: Stream) -> None:
            assert isinstance(stream, torch.cuda.Stream)
            self._ring.machine.copy(device_table, slot.host[:table_bytes], stream)
            with torch.cuda.stream(stream):
                self._gather.launch(lists)

        return self._ring.send(slot, rows.view(self._kv.dtype).view(*kv_indices.shape, *self._kv.shape[2:]), fill)


def _table_bytes(num_lists: int, top_k: int) -> int:
    return num_lists * (20 + 8 * top_k)


def _as_lists(table: Tensor, num_lists: int, top_k: int) -> RowLists:
    """Views of a buffer: the addresses first, for they are the widest."""
    addresses = table[: 16 * num_lists].view(torch.int64).view(2, num_lists)
    numbers = table[16 * num_lists :].view(torch.int32)
    rows = numbers[num_lists:].view(2, num_lists, top_k)
    return RowLists(numbers[:num_lists], addresses[0], addresses[1], rows[0], rows[1])


def direct_slot_bytes(num_lists: int, top_k: int, row_bytes: int) -> int:
    """What a staging slot must hold for one call."""
    return num_lists * top_k * row_bytes + _table_bytes(num_lists, top_k)
