"""Requests' own rows on their way between a device and the host, beside the steps."""

from collections.abc import Callable

import torch
from torch import Tensor


class RowCopies:
    """Copies on a stream of its own, through page-locked memory. Where the device is the CPU, plain copies."""

    def __init__(self, tails: Tensor) -> None:
        """tails: [num_layers, num_tails, num_kv_heads, tail_capacity, 2, head_dim]."""
        self._tails = tails
        self._stream = torch.cuda.Stream(tails.device) if tails.is_cuda else None  # type: ignore[no-untyped-call]
        self._staged: list[tuple[torch.cuda.Event, Tensor]] = []  # what copies to the device still read

    def read(self, slot: int, start: int, stop: int) -> Callable[[], Tensor]:
        """Of rows that steps have written, or that were enqueued to be."""
        rows = self._tails[:, slot, :, start:stop]
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
            return staged.clone()  # page-locked memory is for those who come next

        return wait

    def write(self, slot: int, start: int, rows: Tensor) -> None:
        place = self._tails[:, slot, :, start : start + rows.shape[2]]
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

    def join(self) -> None:
        """What is enqueued from now on comes after all copies: before a slot is given to another request."""
        if self._stream is not None:
            torch.cuda.current_stream(self._tails.device).wait_stream(self._stream)

    def wait(self) -> None:
        """Until all rows are where they were written to: before any stream reads them."""
        if self._stream is not None:
            self._stream.synchronize()
