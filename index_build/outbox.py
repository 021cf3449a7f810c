"""Index a layer and write it to disk: at once, or from a GPU in the background, beside the next layers' prefill."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

import torch
from torch import Tensor

Arrays = Mapping[str, Tensor]
Make = Callable[[], Arrays]  # makes the arrays of a layer's index from its capture
Write = Callable[[Arrays], None]  # writes arrays in host memory, which are reused after it returns
Then = Callable[[], None]

# One thread hashes and writes a file, which takes as long as the prefill of several layers of a short context.
_FEWEST_WRITERS, _MOST_WRITERS = 3, 6
_LOCKED_BYTES = 1 << 30  # page-locked memory for layers in flight; more only if _FEWEST_WRITERS need it


def make_outbox(device: torch.device, layer_bytes: int) -> "Outbox":
    """Make the outbox for layers on that device, of about `layer_bytes` each."""
    if device.type != "cuda":
        return Outbox()
    num_writers = _LOCKED_BYTES // max(1, layer_bytes) - 1
    return DeviceOutbox(device, max(_FEWEST_WRITERS, min(num_writers, _MOST_WRITERS)))


class Outbox:
    """Takes each layer's KV, and a function that makes its index, when the layer is captured. A context manager.

    This class makes and writes synchronously, from the arrays' own memory.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Do nothing: no layer is pending."""

    def send(self, kv: Tensor, make: Make, write: Write, then: Then | None = None) -> None:
        """Have a layer's index made, then the index and the layer's KV, under the name `kv`, written.

        kv: [num_kv_heads, num_kept, 2, head_dim]. Do not change it, or what `make` reads, before the next `send` or
        `wait_until_read` has returned. `then` is called when this layer and all earlier ones are written. May raise
        errors of earlier layers.
        """
        write({"kv": kv, **make()})
        self.wait_until_read(then)

    def wait_until_read(self, then: Then | None = None) -> None:
        """Return when the arrays that were sent last may change; `then`: as in `send`."""
        if then is not None:
            then()


class DeviceOutbox(Outbox):
    """Makes indexes on a thread and a stream of its own, copies them to page-locked memory, and writes in threads."""

    def __init__(self, device: torch.device, num_writers: int = _FEWEST_WRITERS) -> None:
        # initialises torch's linear algebra here, because its lazy initialisation fails if two threads race for it
        torch.linalg.inv(torch.eye(1, device=device))
        self._index_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        copy_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # a ring of slots for layers between the device and the disk; the latest layer's is last
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
        self.wait_until_read()
        self._slots = [*self._slots[1:], slot]
        self._call_when_written(then)

    def wait_until_read(self, then: Then | None = None) -> None:
        if (last := self._slots[-1].made) is not None:
            for event in last.result():
                torch.cuda.current_stream().wait_event(event)
        self._call_when_written(then)

    def _call_when_written(self, then: Then | None) -> None:
        if then is not None:
            last, written = self._slots[-1], [slot.written for slot in self._slots]
            last.written = self._writers.submit(_wait_and_call, written, then)

    def _make(self, slot: "_Slot", captured: torch.cuda.Event, kv: Tensor, make: Make) -> "list[torch.cuda.Event]":
        """Copy KV and index to the slot; return events after which the captured arrays have been read.

        After the last event, everything that is to be written has been copied.
        """
        with torch.cuda.stream(self._index_stream):
            self._index_stream.wait_event(captured)
            slot.arrays.clear()
            return [slot.copy({"kv": kv}), slot.copy(make())]


class _Slot:
    """Page-locked memory for one layer's arrays."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        # by name and shape, reused by later layers: page-locking is slow
        self._buffers: dict[tuple[str, torch.Size], Tensor] = {}
        self.arrays: dict[str, Tensor] = {}  # of the current layer
        # of the layer that used the slot last
        self.made: Future[list[torch.cuda.Event]] | None = None
        self.written: Future[None] | None = None

    def raise_error(self) -> None:
        """Wait until the slot's last layer has been written, and raise its error if it failed."""
        if self.written is not None:
            self.written.result()

    def copy(self, arrays: Arrays) -> torch.cuda.Event:
        """Start to copy arrays once the current stream has computed them; return an event that marks the copy's end."""
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
