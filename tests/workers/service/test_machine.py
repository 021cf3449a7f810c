"""A service's description of its machine agrees with its memory plan."""

from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tiny import loaded
from workers.capacity import context_bytes, spec_of
from workers.doctor.facts import Gpu
from workers.service import machine
from workers.service.machine import describe_machine
from workers.settings import EngineSettings, Settings, StoreSettings

Usage = namedtuple("Usage", "free")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Settings on a machine with room for seven contexts (and nearly eight) of max_positions tokens."""
    model = loaded()
    needed = sum(context_bytes(spec_of(model.geometry, model.geometry.max_positions)))
    monkeypatch.setattr(machine, "host_memory_bytes", lambda: 8 * needed - 1)
    monkeypatch.setattr(machine, "available_cpus", lambda: 3)
    monkeypatch.setattr(machine, "visible_gpus", tuple)
    monkeypatch.setattr(machine, "shutil", SimpleNamespace(disk_usage=lambda path: Usage(5 << 30)))
    settings = Settings(store=StoreSettings(path=tmp_path))
    return replace(settings, build=replace(settings.build, dtype="bfloat16"))


def test_the_machine_is_described_in_one_line(settings: Settings) -> None:
    line = describe_machine(settings, loaded())
    assert line.startswith("no GPU, 3 CPUs, 0.0 GiB of memory and 5.0 GiB of disk for the store; room")
    assert line.endswith(f" 7 contexts of {loaded().geometry.max_positions:,} tokens") and "\n" not in line


def test_several_workers_divide_the_machines_memory(settings: Settings) -> None:
    """Out of room for nearly eight contexts, each of three workers has room for two."""
    line = describe_machine(settings, loaded(), 3)
    assert " 0.0 GiB of memory, shared by 3 workers, and " in line and " 2 contexts of " in line


def test_the_described_room_respects_context_bytes(settings: Settings) -> None:
    engine = EngineSettings(context_bytes=1)
    assert " 0 contexts of " in describe_machine(replace(settings, engine=engine), loaded())


def test_gpus_are_described_with_memory_and_pcie_link(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(Gpu("NVIDIA H200", "570.1", 140_000, 143_771, "5.0 x16") for _ in range(2))
    monkeypatch.setattr(machine, "visible_gpus", lambda: gpus)
    cuda = SimpleNamespace(mem_get_info=lambda: (1 << 40, 1 << 40))
    monkeypatch.setattr(machine, "torch", SimpleNamespace(cuda=cuda))
    line = describe_machine(replace(settings, engine=EngineSettings(placement="hybrid", num_contexts=6)), loaded())
    assert line.startswith("2 × NVIDIA H200 (136.7 GiB of 140.4 GiB free, PCIe 5.0 x16), 3 CPUs")
    assert " 6 contexts of " in line


@pytest.mark.parametrize(("num_devices", "room"), [(1, 0), (2, 1), (4, 3)])
def test_the_room_of_several_gpus_adds_up(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, num_devices: int, room: int
) -> None:
    """The free memory of each GPU equals the size of all weights, and that of one context."""
    model = loaded()
    kv, index = context_bytes(spec_of(model.geometry, model.geometry.max_positions, "bfloat16"))
    monkeypatch.setattr(machine, "weights_on_device", lambda model: kv + index)
    cuda = SimpleNamespace(mem_get_info=lambda: (kv + index, kv + index))
    monkeypatch.setattr(machine, "torch", SimpleNamespace(cuda=cuda))
    engine = EngineSettings(placement="device", num_contexts=6, num_devices=num_devices)
    assert f" {room} contexts of " in describe_machine(replace(settings, engine=engine), model)
