"""Chosen rows gathered by the CPU into pinned slots and copied from there: for context KV that is not pinned itself."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.errors import OffloadError
from offload.host_store import row_numbers
from offload.transfer import Event, Machine, Stream, Transfer


@dataclass(slots=True)
class StagingSlot:
    """A pinned buffer and the device buffer that it is copied to."""

    host: Tensor  # [slot_bytes] uint8
    device: Tensor  # [slot_bytes] uint8
    copied: Event | None = None  # after it, `host` may be written again
    transfer: Transfer | None = None  # after its `read`, `device` may be written again


class StagingRing:
    """Slots used in turn; shared by all layers and contexts."""

    def __init__(self, machine: Machine, num_slots: int, slot_bytes: int) -> None:
        self.machine = machine
        self.slot_bytes = slot_bytes
        self._stream = machine.stream()
        self._slots = deque(
            StagingSlot(machine.host_buffer(slot_bytes), machine.device_buffer(slot_bytes)) for _ in range(num_slots)
        )

    def __repr__(self) -> str:
        in_use = sum(slot.transfer is not None and slot.transfer.read is None for slot in self._slots)
        return f"<StagingRing {in_use}/{len(self._slots)} slots of {self.slot_bytes} bytes not released>"

    def require(self, num_bytes: int) -> None:
        """Raise OffloadError if a slot cannot hold that much."""
        if num_bytes > self.slot_bytes:
            raise OffloadError(
                f"{num_bytes:,} bytes are to be staged at once and a slot holds {self.slot_bytes:,}; make the ring for "
                f"the largest batch and selection"
            )

    def next(self) -> StagingSlot:
        """The slot that was used longest ago; its host buffer is free to be written."""
        slot = self._slots[0]
        if slot.transfer is not None and slot.transfer.read is None:
            raise OffloadError(
                f"all {len(self._slots)} staging slots hold rows that are still to be read; release a transfer "
                f"once its reader is enqueued, or make a ring of more slots"
            )
        self._slots.rotate(-1)
        if slot.copied is not None:
            slot.copied.synchronize()  # its last copy may still read the host buffer
        return slot

    def send(self, slot: StagingSlot, rows: Tensor, fill: Callable[[Stream], None]) -> Transfer:
        """Have `rows`, a view of the slot's device buffer, filled on the ring's stream from the slot's host buffer."""
        if slot.transfer is not None and slot.transfer.read is not None:
            self._stream.wait_event(slot.transfer.read)  # its last reader may still read the device buffer
        fill(self._stream)
        slot.copied = self._stream.record_event()
        slot.transfer = Transfer(rows, slot.copied, self.machine)
        return slot.transfer


class StagedRows:
    """The rows of one context, which only the host can read."""

    def __init__(self, layers: Sequence[Tensor], ring: StagingRing) -> None:
        """layers: per layer [num_kv_heads, context_len, 2, head_dim]."""
        self._layers = layers
        self._ring = ring

    def submit(self, layer_idx: int, kv_indices: Tensor) -> Transfer:
        """Bring chosen rows to the device. Returns when the CPU has gathered them; the copy is under way.

        kv_indices: [..., num_index_heads, top_k] integers on the host; num_index_heads is a multiple of
        num_kv_heads, and neighbours share a KV head. Padding becomes rows of no meaning.
        The transfer's rows are [..., num_index_heads, top_k, 2, head_dim], until it is released.
        """
        kv = self._layers[layer_idx]
        row_elements = kv.shape[2:].numel()
        num_bytes = kv_indices.numel() * row_elements * kv.itemsize
        self._ring.require(num_bytes)
        slot = self._ring.next()
        host, device = slot.host[:num_bytes], slot.device[:num_bytes]
        gathered = host.view(kv.dtype).view(-1, row_elements)
        torch.index_select(kv.view(-1, row_elements), 0, row_numbers(kv.shape, kv_indices).view(-1), out=gathered)
        rows = device.view(kv.dtype).view(*kv_indices.shape, *kv.shape[2:])
        return self._ring.send(slot, rows, lambda stream: self._ring.machine.copy(device, host, stream))
