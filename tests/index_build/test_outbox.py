"""The outbox writes each layer from memory that does not change meanwhile, loses no error, and calls `then` in order.

Copies in host memory stand in for the device; `test_pipeline_gpu.py` has tests with a real one.
"""

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from index_build import outbox as outbox_module
from index_build.outbox import DeviceOutbox, Outbox, make_outbox


@pytest.fixture
def device_outbox(monkeypatch: pytest.MonkeyPatch) -> DeviceOutbox:
    """An outbox whose copies are made at once, and whose events have always completed."""
    event = SimpleNamespace(synchronize=lambda: None)
    stream = SimpleNamespace(wait_event=lambda event: None, record_event=lambda: event)

    def copy(slot, arrays: Mapping[str, Tensor]):
        slot.arrays.update({name: array.clone() for name, array in arrays.items()})
        return event

    monkeypatch.setattr(outbox_module._Slot, "copy", copy)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return DeviceOutbox(torch.device("cpu"))


class Sender:
    """Sends layers whose arrays hold the layer's number, captured in `num_memories` buffers in turn."""

    def __init__(self, outbox, num_memories: int = 2) -> None:
        self._outbox, self._memory, self._layer = outbox, [torch.empty(3) for _ in range(num_memories)], 0

    def _capture(self) -> Tensor:
        captured = self._memory[self._layer % len(self._memory)].fill_(float(self._layer))
        self._layer += 1
        return captured

    def send(self, write, then=None, make_s: float = 0.0) -> None:
        captured = self._capture()

        def make() -> dict[str, Tensor]:
            time.sleep(make_s)
            return {"codes": captured[:2].clone()}

        self._outbox.send(captured, make, write, then)
        if len(self._memory) == 1:
            self._outbox.wait_until_read()

    def skip(self) -> None:
        self._capture()
        self._outbox.wait_until_read()


def test_on_the_cpu_a_layer_is_written_before_send_returns() -> None:
    seen: list[dict[str, Tensor]] = []
    with make_outbox(torch.device("cpu"), 0) as outbox:
        assert type(outbox) is Outbox
        kv, codes = torch.zeros(3), torch.zeros(2)
        outbox.send(kv, lambda: {"codes": codes}, lambda arrays: seen.append(dict(arrays)), lambda: seen.append({}))
        assert seen[0]["kv"] is kv, "nothing is copied"
        assert seen[0]["codes"] is codes
        assert seen[1] == {}
        outbox.wait_until_read(seen.clear)
        assert seen == []


@pytest.mark.parametrize("num_memories", [1, 2])
def test_every_layer_is_written_as_it_was_sent(device_outbox: DeviceOutbox, num_memories: int) -> None:
    """A layer is not overwritten while its index is still being made, whether the next layer is sent or skipped."""
    seen: set[tuple[float, float]] = set()

    def write(arrays: Mapping[str, Tensor]) -> None:
        seen.add((float(arrays["kv"].sum()), float(arrays["codes"].sum())))

    with device_outbox as outbox:
        sender = Sender(outbox, num_memories)
        for layer in range(12):
            if layer % 5 == 3:
                sender.skip()
            else:
                sender.send(write, make_s=0.02 * (layer % 2))
    assert seen == {(3.0 * layer, 2.0 * layer) for layer in range(12) if layer % 5 != 3}


def test_then_is_called_after_all_earlier_layers_are_written(device_outbox: DeviceOutbox) -> None:
    written, when_called = [], {}
    is_written = [threading.Event() for _ in range(9)]

    def write(arrays: Mapping[str, Tensor]) -> None:
        layer = int(arrays["kv"][0])
        if layer % 3 == 0:
            assert is_written[layer + 1].wait(timeout=30), "later ones are written meanwhile"
        written.append(layer)
        is_written[layer].set()

    with device_outbox as outbox:
        sender = Sender(outbox)
        for layer in range(9):
            sender.send(write, lambda layer=layer: when_called.update({layer: set(written)}))
    for layer in range(9):
        assert when_called[layer] >= set(range(layer + 1))


def test_then_is_not_called_after_a_layer_that_failed_to_write(device_outbox: DeviceOutbox) -> None:
    called: list[int] = []

    def fail(arrays: Mapping[str, Tensor]) -> None:
        time.sleep(0.05)
        raise OSError("disk full")

    def build() -> None:
        with device_outbox as outbox:
            sender = Sender(outbox)
            sender.send(fail)
            sender.send(lambda arrays: None, lambda: called.append(1))

    with pytest.raises(OSError, match="disk full"):
        build()
    assert called == []


def test_send_blocks_while_the_disk_is_too_many_layers_behind(device_outbox: DeviceOutbox) -> None:
    may_write, num_written, num_slots = threading.Event(), [], outbox_module._FEWEST_WRITERS + 1

    def write(arrays: Mapping[str, Tensor]) -> None:
        may_write.wait(timeout=30)
        num_written.append(float(arrays["kv"][0]))

    with device_outbox as outbox, ThreadPoolExecutor(1) as computing:
        sender = Sender(outbox)
        for _ in range(num_slots):
            sender.send(write)
        one_more = computing.submit(sender.send, write)
        with pytest.raises(TimeoutError):
            one_more.result(timeout=0.2)
        may_write.set()
        one_more.result(timeout=30)
    assert sorted(num_written) == list(range(num_slots + 1))


@pytest.mark.parametrize("num_later_layers", [0, 1, 5])
@pytest.mark.parametrize("of", ["index", "write"])
def test_an_error_of_indexing_or_writing_is_raised(device_outbox: DeviceOutbox, of: str, num_later_layers: int) -> None:
    def fail(*arrays: object) -> dict[str, Tensor]:
        raise OSError("disk full")

    def build() -> None:
        with device_outbox as outbox:
            sender = Sender(outbox)
            if of == "write":
                sender.send(fail)
            else:
                outbox.send(torch.zeros(1), fail, lambda arrays: None)
            for _ in range(num_later_layers):
                sender.send(lambda arrays: None)

    with pytest.raises(OSError, match="disk full"):
        build()


def test_an_interrupted_build_writes_sent_layers_and_raises_its_own_error(device_outbox: DeviceOutbox) -> None:
    seen: list[Mapping[str, Tensor]] = []

    def build() -> None:
        with device_outbox as outbox:
            Sender(outbox).send(seen.append)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build()
    assert len(seen) == 1
