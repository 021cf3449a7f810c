"""A layer's way to the disk: at once, or from a GPU in the background, beside the next layers' prefill."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import torch
from torch import Tensor

Arrays = Mapping[str, Tensor]
Make = Callable[[], Arrays]  # the arrays of a layer's index, from what was captured of it
Write = Callable[[Arrays], None]  # takes arrays in host memory, which it may not keep
Then = Callable[[], None]

# A file is hashed and written by one thread: it takes as long as some layers of a short context are prefilled.
_FEWEST_WRITERS, _MOST_WRITERS = 3, 6
_LOCKED_BYTES = 1 << 30  # of memory, for layers on their way; more only for as many as the fewest writers want


def make_outbox(device: torch.device, layer_bytes: int) -> "Outbox":
    """For layers that are on that device, which take about so much."""
    if device.type != "cuda":
        return Outbox()
    num_writers = _LOCKED_BYTES // max(1, layer_bytes) - 1
    return DeviceOutbox(device, max(_FEWEST_WRITERS, min(num_writers, _MOST_WRITERS)))


class Outbox:
    """Takes each layer's KV, and how its index is made, as soon as the layer is there; used as a context manager.

    Makes and writes at once, from the memory in which the arrays are.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Nothing is on its way."""

    def send(self, kv: Tensor, make: Make, write: Write, then: Then | None = None) -> None:
        """Have a layer's index made, and it and the layer's KV, under the name `kv`, written.

        kv: [num_kv_heads, num_kept, 2, head_dim]. It, and what `make` reads, stay as they are until the next `send`, or
        `settle`, has returned. `then` is called when this layer and all before it are written. Earlier errors may be
        raised here.
        """
        write({"kv": kv, **make()})
        self.settle(then)

    def settle(self, then: Then | None = None) -> None:
        """Return when what was sent last may change; `then` as above."""
        if then is not None:
            then()


class DeviceOutbox(Outbox):
    """Makes indexes by a thread on a stream of its own, copies to page-locked memory, writes from there by threads."""

    def __init__(self, device: torch.device, num_writers: int = _FEWEST_WRITERS) -> None:
        # torch loads what it needs for this once, and not when two threads ask for it at the same time
        torch.linalg.inv(torch.eye(1, device=device))
        self._index_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # of layers that may be between the device and the disk; that of the last is the last
        self._slots = [_Slot(copy_stream) for _ in range(num_writers + 1)]
        self._indexer = ThreadPoolExecutor(1, thread_name_prefix="csattn-index")
        self._writers = ThreadPoolExecutor(num_writers, thread_name_prefix="csattn-write")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._indexer.shutdown(wait=True)
        self._writers.shutdown(wait=True)
        if error is None:
            for slot in self._slots:
                slot.raise_error()

    def send(self, kv: Tensor, make: Make, write: Write, then: Then | None = None) -> None:
        slot = self._slots[0]
        slot.raise_error()
        captured = torch.cuda.current_stream().record_event()
        slot.made = self._indexer.submit(self._make, slot, captured, kv, make)
        slot.written = self._writers.submit(_write, slot.made, slot.arrays, write)
        self.settle()
        self._slots = [*self._slots[1:], slot]
        self._call_when_written(then)

    def settle(self, then: Then | None = None) -> None:
        if (last := self._slots[-1].made) is not None:
            for event in last.result():
                torch.cuda.current_stream().wait_event(event)
        self._call_when_written(then)

    def _call_when_written(self, then: Then | None) -> None:
        if then is not None:
            last, written = self._slots[-1], [slot.written for slot in self._slots]
            last.written = self._writers.submit(_wait_and_call, written, then)

    def _make(self, slot: "_Slot", captured: torch.cuda.Event, kv: Tensor, make: Make) -> "list[torch.cuda.Event]":
        """Events after which the layer's own arrays have been read; with the last all that is written is copied."""
        with torch.cuda.stream(self._index_stream):
            self._index_stream.wait_event(captured)
            slot.arrays.clear()
            return [slot.copy({"kv": kv}), slot.copy(make())]


class _Slot:
    """Page-locked memory for one layer's arrays."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        # by name and sizes, kept from layer to layer: locking memory is slow
        self._buffers: dict[tuple[str, torch.Size], Tensor] = {}
        self.arrays: dict[str, Tensor] = {}  # of the layer at hand
        # of the layer that was here last
        self.made: Future[list[torch.cuda.Event]] | None = None
        self.written: Future[None] | None = None

    def raise_error(self) -> None:
        """Wait until the last layer has been written, and raise what went wrong with it."""
        if self.written is not None:
            self.written.result()

    def copy(self, arrays: Arrays) -> torch.cuda.Event:
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


def _write(made: "Future[list[torch.cuda.Event]]", arrays: Arrays, write: Write) -> None:
    made.result()[-1].synchronize()
    write(arrays)


def _wait_and_call(layers: Sequence["Future[None] | None"], then: Then) -> None:
    for written in layers:
        if written is not None:
            written.result()
    then()
