"""A layer's way to the disk: in order, from memory that nobody changes meanwhile, errors not lost.

The device is played by memory copies here; with a real one see `test_pipeline_gpu.py`.
"""

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from index_build import outbox as outbox_module
from index_build.outbox import DeviceOutbox, Outbox, make_outbox


@pytest.fixture
def device_outbox(monkeypatch: pytest.MonkeyPatch) -> DeviceOutbox:
    """Copies are made at once, events have always passed."""

    def copy(slot, arrays: Mapping[str, Tensor]):
        slot.arrays.update({name: array.clone() for name, array in arrays.items()})
        return SimpleNamespace(synchronize=lambda: None)

    monkeypatch.setattr(outbox_module._Slot, "copy", copy)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(wait_event=lambda event: None))
    return DeviceOutbox(torch.device("cpu"))


def send(outbox, layer: int, write) -> None:
    """A layer whose arrays all hold its number; its KV is overwritten as soon as it was sent."""
    kv = torch.full((3,), float(layer))
    outbox.take_kv(kv)
    outbox.send({"codes": torch.full((2,), float(layer))}, write)
    kv.fill_(-1.0)


def test_on_the_cpu_a_layer_is_written_before_send_returns() -> None:
    seen: list[dict[str, Tensor]] = []
    with make_outbox(torch.device("cpu")) as outbox:
        assert type(outbox) is Outbox
        kv, codes = torch.zeros(3), torch.zeros(2)
        outbox.take_kv(kv)
        outbox.send({"codes": codes}, lambda arrays: seen.append(dict(arrays)))
        assert seen[0]["kv"] is kv, "nothing is copied"
        assert seen[0]["codes"] is codes


def test_layers_are_written_in_order_and_as_they_were_sent(device_outbox: DeviceOutbox) -> None:
    seen: list[tuple[float, float]] = []
    with device_outbox as outbox:
        for layer in range(7):
            send(outbox, layer, lambda arrays: seen.append((float(arrays["kv"].sum()), float(arrays["codes"].sum()))))
    assert seen == [(3.0 * layer, 2.0 * layer) for layer in range(7)]


def test_the_device_is_at_most_two_layers_ahead_of_the_disk(device_outbox: DeviceOutbox) -> None:
    may_write, num_written = threading.Event(), []

    def write(arrays: Mapping[str, Tensor]) -> None:
        may_write.wait(timeout=30)
        num_written.append(float(arrays["kv"][0]))

    with device_outbox as outbox, ThreadPoolExecutor(1) as computing:
        send(outbox, 0, write)
        send(outbox, 1, write)
        third = computing.submit(send, outbox, 2, write)
        with pytest.raises(TimeoutError):
            third.result(timeout=0.2)
        may_write.set()
        third.result(timeout=30)
    assert num_written == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("num_later_layers", [0, 1, 5])
def test_an_error_of_the_writing_is_raised(device_outbox: DeviceOutbox, num_later_layers: int) -> None:
    def fail(arrays: Mapping[str, Tensor]) -> None:
        raise OSError("disk full")

    def build() -> None:
        with device_outbox as outbox:
            send(outbox, 0, fail)
            for layer in range(num_later_layers):
                send(outbox, 1 + layer, lambda arrays: None)

    with pytest.raises(OSError, match="disk full"):
        build()


def test_an_interrupted_build_finishes_what_was_sent_and_keeps_its_own_error(device_outbox: DeviceOutbox) -> None:
    seen: list[Mapping[str, Tensor]] = []

    def build() -> None:
        with device_outbox as outbox:
            send(outbox, 0, seen.append)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build()
    assert len(seen) == 1
