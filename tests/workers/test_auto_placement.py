"""Placement `auto`, on imaginary GPUs of a given memory."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from csattn.artifact import ArtifactSpec
from csattn.models.description import describe
from csattn.models.identity import geometry_of
from csattn.models.loader import read_config
from offload.budget import AvailableMemory
from offload.errors import NoDeviceError
from tests.tiny import save
from workers import auto_placement, capacity
from workers.auto_placement import choose_for_service, choose_placement
from workers.capacity import context_bytes, spec_of
from workers.cli import serving
from workers.doctor.facts import Gpu
from workers.doctor.probes import PROBES
from workers.engine.gpu import memory
from workers.settings import EngineSettings, load_settings

GIB = 1 << 30
NUM_TOKENS = 1 << 20


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(save(tmp_path / "model"))


@pytest.fixture
def spec(model: str) -> ArtifactSpec:
    return spec_of(geometry_of(describe(read_config(model))), NUM_TOKENS, "float32")


def have_gpu(monkeypatch: pytest.MonkeyPatch, free_bytes: int, host_bytes: int = 1 << 40) -> None:
    free = AvailableMemory(device_bytes=free_bytes, host_bytes=host_bytes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for module in (auto_placement, memory):
        monkeypatch.setattr(module, "require_device", lambda: None)
        monkeypatch.setattr(module, "available_memory", lambda device: free)
    monkeypatch.setattr(memory, "require_heads", lambda spec, dtype: None)  # asks the GPU for its shared memory
    monkeypatch.setattr(capacity, "max_slots", lambda: NUM_TOKENS)


def refuse_gpu() -> None:
    raise NoDeviceError("the GPU engine needs CuPy")


def test_without_a_gpu_the_cpu_decodes(model: str, spec: ArtifactSpec) -> None:
    assert choose_placement(model, "float32", None, EngineSettings(num_contexts=1), spec) == ("cpu", "")


def test_a_gpu_decodes_with_as_much_on_it_as_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch, model: str, spec: ArtifactSpec
) -> None:
    kv, index = context_bytes(spec)
    assert index < kv / 4

    def chosen(device_bytes: int, host_bytes: int = 1 << 40, **engine: Any) -> tuple[str, str]:
        have_gpu(monkeypatch, memory.KERNELS_BYTES + (1 << 20) + device_bytes * 4 // 3, host_bytes)
        return choose_placement(model, "float32", None, EngineSettings(**engine), spec)

    assert chosen(kv + index, num_contexts=1) == ("device", "")
    assert chosen(kv + index, num_contexts=2) == ("hybrid", "")
    assert chosen(2 * (kv + index), num_contexts=2) == ("device", "")
    assert chosen(kv, num_contexts=1) == ("hybrid", "")
    assert chosen(kv + index, num_contexts=1, context_bytes=1000) == ("device", "")
    assert chosen(kv + index, num_contexts=1, num_search_workers=2) == ("cpu", "")
    no_room = ("cpu", "the GPU has no room for a context of 1,048,576 tokens")
    assert chosen(kv, kv - 1, num_contexts=1) == no_room
    assert chosen(index, num_contexts=1) == no_room
    assert chosen(kv, num_contexts=1, selector="exact") == no_room, "in hybrid, keys are not on the device"


def test_the_reason_why_a_gpu_is_not_used(monkeypatch: pytest.MonkeyPatch, model: str, spec: ArtifactSpec) -> None:
    have_gpu(monkeypatch, 1000)
    placement, reason = choose_placement(model, "float32", None, EngineSettings(), spec)
    assert placement == "cpu"
    assert re.fullmatch(r"the model's weights take .* in float32, the GPU has 0.0 GiB free", reason)
    have_gpu(monkeypatch, 1 << 40)
    placement, reason = choose_placement(model, "float32", None, EngineSettings(selector="quest"), spec)
    assert placement == "cpu" and "selector is 'quest'" in reason
    monkeypatch.setattr(auto_placement, "require_device", refuse_gpu)
    assert choose_placement(model, "float32", None, EngineSettings(), spec)[1] == "the GPU engine needs CuPy"


def test_a_service_is_placed_for_contexts_of_all_positions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    settings = load_settings(None, {}, {"model.name": model}).settings
    assert settings.engine.placement == "cpu"
    monkeypatch.setattr(auto_placement, "ask", lambda probe, given: PROBES[probe](given))
    assert choose_for_service(settings) == ("cpu", "")
    monkeypatch.setattr(auto_placement, "visible_gpus", lambda: (Gpu("imaginary", "570.1", 1, 1),))
    have_gpu(monkeypatch, 40 * GIB)
    assert serving._placed(settings).engine.placement == "device"
    geometry = geometry_of(describe(read_config(model)))
    kv, index = context_bytes(spec_of(geometry, geometry.max_positions, "float32"))
    have_gpu(monkeypatch, memory.KERNELS_BYTES + (1 << 20) + 3 * (kv + index) * 4 // 3)
    assert serving._placed(settings).engine.placement == "hybrid", "there is room for 3 contexts of 4"
    monkeypatch.setattr(auto_placement, "ask", lambda probe, given: {"error": "no answer within 120 s"})
    assert serving._placed(settings).engine.placement == "cpu"
    assert capsys.readouterr().err.endswith("\ndecoding on the CPU: no answer within 120 s\n")


@pytest.mark.gpu
def test_a_gpu_is_found_in_another_process(model: str) -> None:
    assert choose_for_service(load_settings(None, {}, {"model.name": model}).settings) == ("device", "")
