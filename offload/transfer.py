"""Rows in flight: a value together with the event that says when it is there."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Event(Protocol):
    """A point in a stream's work, as torch.cuda.Event has it."""

    def synchronize(self) -> None: ...


class Stream(Protocol):
    """Work of a device in order, as torch.cuda.Stream has it."""

    def wait_event(self, event: Any) -> None: ...
    def record_event(self) -> Event: ...


class Machine(Protocol):
    """What staging needs of a device; tests have one whose copies are as late as they are allowed to be."""

    def stream(self) -> Stream: ...
    def current_stream(self) -> Stream: ...
    def host_buffer(self, num_bytes: int) -> Tensor: ...
    def device_buffer(self, num_bytes: int) -> Tensor: ...
    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None: ...


@dataclass(slots=True)
class Transfer:
    """Rows on their way to the device. Whoever reads them says when that is over, by `release`."""

    rows: Tensor  # on the device
    event: Event  # after it, the rows are there
    machine: Machine
    read: Event | None = None  # after it, nobody reads them

    def wait(self, stream: Stream | None = None) -> Tensor:
        """The rows, for work enqueued from now on: the stream waits for them, the host does not."""
        (stream or self.machine.current_stream()).wait_event(self.event)
        return self.rows

    def result(self) -> Tensor:
        """The rows, when they are there: the host waits."""
        self.event.synchronize()
        return self.rows

    def release(self, stream: Stream | None = None) -> None:
        """All work that reads the rows is enqueued on that stream by now; their memory may be reused after it."""
        self.read = (stream or self.machine.current_stream()).record_event()


class CudaMachine:
    """The device that torch works with."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def stream(self) -> Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def current_stream(self) -> Stream:
        return torch.cuda.current_stream(self.device)

    def host_buffer(self, num_bytes: int) -> Tensor:
        """Pinned, so that a copy out of it leaves the host free."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def device_buffer(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        """Enqueue a copy of a pinned buffer."""
        assert isinstance(stream, torch.cuda.Stream)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
