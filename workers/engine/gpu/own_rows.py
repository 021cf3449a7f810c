"""Where requests' own rows lie on a GPU: in their tails, or only the last of them there and the first on the host."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from offload.pinned import PinnedRows
from workers.engine.gpu.far_rows import CachedRows
from workers.engine.gpu.shape import EngineShape
from workers.engine.gpu.stream_thread import synchronize_stream


class RowsInTails:
    """Own rows in tails. They are read and written through pinned memory, on a stream of its own beside the steps.

    A request's rows are numbered in the order of their arrival. If the device is the CPU, copies are synchronous.
    """

    def __init__(self, tails: Tensor) -> None:
        """tails: [num_layers, num_tails, num_kv_heads, tail_capacity, 2, head_dim]."""
        self._tails = tails
        self._stream = torch.cuda.Stream(tails.device) if tails.is_cuda else None  # type: ignore[no-untyped-call]
        self._staged: list[tuple[torch.cuda.Event, Tensor]] = []  # what copies to the device may still read

    def open(self, request_slot: int) -> None:
        """Prepare the tail for another request."""
        self._wait_for_copies()

    def start(self, request_slot: int) -> int:
        """Return the number of the first row that is in the tail."""
        return 0

    def must_move(self, request_slot: int, tail_len: int) -> bool:
        """Whether rows have to leave the tail before a step whose first row sees tail_len rows."""
        return False

    def move(self, request_slot: int, tail_len: int) -> None:
        """Move these rows. All their segments must be made, and no segment of the request may be in the making."""

    def read(self, request_slot: int, start: int, stop: int) -> Callable[[], Tensor]:
        """Begin to copy rows that steps have written to the host. What is returned waits, and gives the rows
        [num_layers, num_kv_heads, stop - start, 2, head_dim]."""
        rows = self._tails[:, request_slot, :, start - self.start(request_slot) : stop - self.start(request_slot)]
        if self._stream is None:
            copied = rows.clone(memory_format=torch.contiguous_format)
            return lambda: copied
        self._stream.wait_stream(torch.cuda.current_stream(rows.device))
        with torch.cuda.stream(self._stream):
            staged = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            staged.copy_(rows.contiguous(), non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()

        def wait() -> Tensor:
            done.synchronize()
            return staged.clone()  # so that the pinned memory can be reused

        return wait

    def write(self, request_slot: int, start: int, rows: Tensor) -> None:
        """Begin to write rows that follow those written before. No step may have added rows."""
        place = self._tails[:, request_slot, :, start : start + rows.shape[2]]
        if self._stream is None:
            place.copy_(rows)
            return
        self._staged = [(event, staged) for event, staged in self._staged if not event.query()]  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            staged = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            staged.copy_(rows)
            place.copy_(staged.to(place.device, non_blocking=True))
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
        self._staged.append((done, staged))

    def settle(self, request_slot: int, num_rows: int) -> None:
        """Wait until the num_rows rows that were written are where steps and segments read them."""
        if self._stream is not None:
            self._stream.synchronize()

    def segment(self, request_slot: int, start: int, stop: int) -> Iterator[Tensor]:
        """Yield each layer's rows [num_kv_heads, stop - start, 2, head_dim], on the device, to make a segment of."""
        return (tail[request_slot, :, start:stop] for tail in self._tails)

    def layer(self, layer_idx: int, request_slot: int, num_rows: int) -> Tensor:
        """Return a layer's first num_rows rows, on the device."""
        return self._tails[layer_idx, request_slot, :, :num_rows]

    def close(self) -> None:
        """Free memory outside of the tails. No step may be in flight."""

    def _wait_for_copies(self) -> None:
        """Make work that is enqueued later wait for the copies."""
        if self._stream is not None:
            torch.cuda.current_stream(self._tails.device).wait_stream(self._stream)


class MovingRows(RowsInTails):
    """Rows are copied to host memory when a segment is made of them, and leave the tail when others need the room.

    Those that requests choose come back through a slot cache.
    """

    def __init__(
        self,
        shape: EngineShape,
        tails: Tensor,
        local_tails: Sequence[Tensor],  # of layers without an index, [num_tails, KV heads, tail_capacity, 2, head_dim]
        host: PinnedRows,  # of each layer, [num_tails, num_kv_heads, own_capacity, 2, head_dim]
        far: CachedRows,  # the slot cache, in which each tail is a context
    ) -> None:
        super().__init__(tails)
        assert shape.growth is not None and shape.own_capacity is not None
        self._near_len, self._segment_len = shape.near_len, shape.growth.segment_len
        self._of_layers = [*tails, *local_tails]
        self._host, self._far = host, far
        self._starts = [0] * shape.num_tails
        of_tail = shape.num_kv_heads * shape.own_capacity * shape.row_bytes
        for request_slot in range(shape.num_tails):
            far.place(request_slot, [at + request_slot * of_tail for at in host.addresses], shape.own_capacity)

    def open(self, request_slot: int) -> None:
        super().open(request_slot)
        self._starts[request_slot] = 0
        self._far.cache.reset(request_slot)

    def start(self, request_slot: int) -> int:
        return self._starts[request_slot]

    def must_move(self, request_slot: int, tail_len: int) -> bool:
        return self._start_for(tail_len) > self._starts[request_slot]

    def move(self, request_slot: int, tail_len: int) -> None:
        """Drop rows from the tail, and shift those that stay to its beginning."""
        start, before, num_rows = self._start_for(tail_len), self._starts[request_slot], tail_len - 1
        self._wait_for_copies()  # which may still read what is overwritten here
        for tail in self._of_layers:
            stay = tail[request_slot, :, start - before : num_rows - before].clone()
            tail[request_slot, :, : num_rows - start].copy_(stay)
        self._starts[request_slot] = start

    def read(self, request_slot: int, start: int, stop: int) -> Callable[[], Tensor]:
        first = max(start, min(self._starts[request_slot], stop))
        of_tail = super().read(request_slot, first, stop)
        if first == start:
            return of_tail
        moved = torch.stack([layer[request_slot, :, start:first] for layer in self._host.layers])
        return lambda: torch.cat([moved, of_tail()], dim=2)

    def write(self, request_slot: int, start: int, rows: Tensor) -> None:
        """Write to host memory. `settle` copies rows to the tail: which ones is known once all have arrived."""
        for layer, of_layer in zip(self._host.layers, rows, strict=True):
            layer[request_slot, :, start : start + rows.shape[2]].copy_(of_layer)

    def settle(self, request_slot: int, num_rows: int) -> None:
        start = self._starts[request_slot] = self._start_for(num_rows + 1)
        for tail, layer in zip(self._tails, self._host.layers, strict=True):
            _copy_by_heads(layer[request_slot, :, start:num_rows], tail[request_slot, :, : num_rows - start])
        synchronize_stream(self._tails.device)

    def segment(self, request_slot: int, start: int, stop: int) -> Iterator[Tensor]:
        first = self._starts[request_slot]
        for tail, layer in zip(self._tails, self._host.layers, strict=True):
            moved = layer[request_slot, :, start:stop]
            if start >= first:
                rows = tail[request_slot, :, start - first : stop - first]
                _copy_by_heads(rows, moved)
                synchronize_stream(tail.device)  # even if the segment is given up: its rows may be overwritten then
            else:
                rows = torch.empty(moved.shape, dtype=moved.dtype, device=tail.device)
                _copy_by_heads(moved, rows)
            yield rows

    def layer(self, layer_idx: int, request_slot: int, num_rows: int) -> Tensor:
        start, tail = self._starts[request_slot], self._tails[layer_idx, request_slot]
        moved = self._host.layers[layer_idx][request_slot, :, :start]
        return torch.cat([moved.to(tail.device), tail[:, : num_rows - start]], dim=1)

    def close(self) -> None:
        self._host.close()

    def _start_for(self, tail_len: int) -> int:
        """Return the first row that the tail has to hold for a row that sees tail_len rows."""
        return max(0, tail_len - self._near_len) // self._segment_len * self._segment_len


def _copy_by_heads(rows: Tensor, place: Tensor) -> None:
    """Enqueue a copy. One side must be pinned, and each head of both sides contiguous."""
    for of_rows, of_place in zip(rows, place, strict=True):
        of_place.copy_(of_rows, non_blocking=True)
