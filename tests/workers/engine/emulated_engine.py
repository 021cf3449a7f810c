"""Runs a `GpuEngine` without a device: its kernels run on the CPU."""

from functools import partial

import pytest

from csattn.attention import device as attention
from csattn.attention import every_row
from csattn.search.device import compiling
from offload import gather, slot_cache, step_mail
from offload.budget import AvailableMemory
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE
from workers.engine.gpu import draws, latent_memory, placed_model, split_engine, step_model
from workers.engine.gpu import engine as gpu_engine


def emulate(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate a device until the test ends. Does nothing if there is a device."""
    modules = compiling, attention, every_row, gather, slot_cache, step_mail, latent_memory, draws
    emulator.stand_in(monkeypatch, *modules)
    if DEVICE.type == "cuda":
        return
    no_lock = partial(placed_model.PinnedRows, register=ignore, unregister=ignore)
    monkeypatch.setattr(placed_model, "PinnedRows", no_lock)
    for engine in (gpu_engine, split_engine):
        monkeypatch.setattr(engine, "require_device", ignore)
    plenty = AvailableMemory(device_bytes=1 << 40, host_bytes=1 << 40)
    monkeypatch.setattr(step_model, "available_memory", lambda device: plenty)


def ignore(*_: object, **__: object) -> None:
    """Register nothing: if the device is the CPU, it can read all host memory."""
