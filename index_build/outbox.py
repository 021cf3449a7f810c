"""A finished layer's way to the disk: at once, or from a GPU in the background, beside the next layer's work."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import torch
from torch import Tensor

Write = Callable[[Mapping[str, Tensor]], None]  # takes arrays in host memory, which it may not keep

_NUM_SLOTS = 2  # layers that may be between the device and the disk


def make_outbox(device: torch.device) -> "Outbox":
    """For layers whose arrays are made on that device."""
    return DeviceOutbox(device) if device.type == "cuda" else Outbox()


class Outbox:
    """Takes each layer's KV as soon as it is there, and the index when it is made; used as a context manager.

    Writes at once, from the memory in which the arrays were made.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Nothing is on its way."""

    def take_kv(self, kv: Tensor) -> None:
        """Begin a layer: kv [num_kv_heads, context_len, 2, head_dim] stays as it is until `send` returns."""
        self._kv = kv

    def send(self, arrays: Mapping[str, Tensor], write: Write) -> None:
        """Have the layer's arrays, and its KV under the name `kv`, written. Earlier errors may be raised here."""
        write({"kv": self._kv, **arrays})


class DeviceOutbox(Outbox):
    """Copies to page-locked memory on a stream of its own, and writes from there on a thread of its own."""

    def __init__(self, device: torch.device) -> None:
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._slots = [_Slot(stream) for _ in range(_NUM_SLOTS)]
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="csattn-write")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._writer.shutdown(wait=True)
        if error is None:
            for slot in self._slots:
                slot.raise_error()

    def take_kv(self, kv: Tensor) -> None:
        slot = self._slots.pop(0)
        self._slots.append(slot)
        slot.raise_error()
        slot.arrays = {}
        self._kv_copied = slot.copy({"kv": kv})

    def send(self, arrays: Mapping[str, Tensor], write: Write) -> None:
        slot = self._slots[-1]
        copied = slot.copy(arrays)
        slot.written = self._writer.submit(_write_copied, copied, slot.arrays, write)
        torch.cuda.current_stream().wait_event(self._kv_copied)  # the next layer's KV goes where this one's was


class _Slot:
    """Page-locked memory for one layer's arrays."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        # by name and sizes, kept from layer to layer: locking memory is slow
        self._buffers: dict[tuple[str, torch.Size], Tensor] = {}
        self.arrays: dict[str, Tensor] = {}  # of the layer at hand
        self.written: Future[None] | None = None  # the layer that was here last

    def raise_error(self) -> None:
        """Wait until the last layer has been written, and raise what went wrong with it."""
        if self.written is not None:
            self.written.result()

    def copy(self, arrays: Mapping[str, Tensor]) -> torch.cuda.Event:
        """Start copying what the current stream computes up to here; the event has passed when it is done."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for name, array in arrays.items():
                key = name, array.shape
                if key not in self._buffers:
                    self._buffers[key] = torch.empty(array.shape, dtype=array.dtype, pin_memory=True)
                self.arrays[name] = self._buffers[key]
                self.arrays[name].copy_(array, non_blocking=True)
                array.record_stream(self._stream)  # the array may be dropped before the copy has been made
        event: torch.cuda.Event = self._stream.record_event()
        return event


def _write_copied(copied: torch.cuda.Event, arrays: Mapping[str, Tensor], write: Write) -> None:
    copied.synchronize()
    write(arrays)
