"""A device that does everything as late as it is allowed to: what nobody waits for has not happened."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offload.transfer import Event, Stream


class LateEvent:
    def __init__(self, stream: "LateStream") -> None:
        self._stream, self._place = stream, stream.num_enqueued

    def synchronize(self) -> None:
        """The host waits."""
        if not self._stream.host_is_careless:
            self.reach()

    def reach(self) -> None:
        self._stream.run_to(self._place)


class LateStream:
    def __init__(self, host_is_careless: bool = False, is_careless: bool = False) -> None:
        self.host_is_careless = host_is_careless
        self._is_careless = is_careless
        self._work: list[Callable[[], Any]] = []
        self._num_done = 0

    @property
    def num_enqueued(self) -> int:
        return len(self._work)

    def enqueue(self, work: Callable[[], Any]) -> None:
        self._work.append(work)

    def wait_event(self, event: LateEvent) -> None:
        if not self._is_careless:
            self.enqueue(event.reach)

    def record_event(self) -> Event:
        return LateEvent(self)

    def run_to(self, place: int) -> None:
        while self._num_done < place:
            self._num_done += 1
            self._work[self._num_done - 1]()


class LateMachine:
    """`compute` is the current stream, on which a test enqueues its readers. The others may be careless."""

    def __init__(self, host_is_careless: bool = False, stream_is_careless: bool = False) -> None:
        self.compute = LateStream()
        self._careless = host_is_careless, stream_is_careless

    def stream(self) -> Stream:
        return LateStream(*self._careless)

    def current_stream(self) -> Stream:
        return self.compute

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 255, dtype=torch.uint8)

    def device_buffer(self, num_bytes: int) -> Tensor:
        return self.host_buffer(num_bytes)

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        assert isinstance(stream, LateStream)
        stream.enqueue(lambda: target.copy_(source))
