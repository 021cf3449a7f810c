"""What `auto` stands for, on imaginary GPUs of a given memory."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from csattn.artifact import ArtifactSpec
from csattn.cpus import multiplies_bfloat16
from csattn.errors import ConfigError
from csattn.models import load_model, loader
from csattn.models.description import describe
from csattn.models.identity import geometry_of
from csattn.models.loader import dtype_for, read_config, wrap_model
from index_build.pipeline import build_context
from offload.budget import AvailableMemory
from offload.errors import NoDeviceError
from tests.tiny import byte_tokenizer, make_model, save, tiny_config
from workers import auto, capacity
from workers.auto import choose_placement
from workers.capacity import context_bytes, spec_of
from workers.cli import serving
from workers.doctor.facts import Gpu
from workers.doctor.probes import PROBES
from workers.engine.gpu import memory
from workers.settings import EngineSettings, Settings, load_settings

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
    for module in (auto, memory):
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
    monkeypatch.setattr(auto, "require_device", refuse_gpu)
    assert choose_placement(model, "float32", None, EngineSettings(), spec)[1] == "the GPU engine needs CuPy"


def test_a_service_is_placed_for_contexts_of_all_positions(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str
) -> None:
    loaded = load_settings(None, {}, {"model.name": model})
    settings, left = loaded.settings, loaded.left_to_csattn
    monkeypatch.setattr(serving, "ask", lambda probe, given: PROBES[probe](given))
    for module in (loader, serving):
        monkeypatch.setattr(module, "multiplies_bfloat16", lambda: False)
    assert serving._chosen(settings, left, []) == settings

    def chosen(settings: Settings, left: list[str]) -> tuple[str, str]:
        settings = serving._chosen(settings, left, [])
        return settings.engine.placement, settings.build.dtype

    monkeypatch.setattr(serving, "visible_gpus", lambda: (Gpu("imaginary", "570.1", 1, 1),))
    have_gpu(monkeypatch, 40 * GIB)
    assert chosen(settings, left) == ("device", "float32"), "the dtype of the model's files"
    assert chosen(settings, ["build.dtype"]) == ("cpu", "float32")
    narrow = str(tmp_path / "narrow")
    make_model("llama").bfloat16().save_pretrained(narrow)
    byte_tokenizer().save_pretrained(narrow)
    of_narrow = replace(settings, model=replace(settings.model, name=narrow))
    assert chosen(of_narrow, left) == ("device", "bfloat16")
    on_host = replace(of_narrow, engine=replace(settings.engine, placement="host"))
    assert chosen(on_host, ["build.dtype"]) == ("host", "bfloat16")
    assert chosen(replace(of_narrow, build=replace(settings.build, dtype="float16")), left[:1]) == ("device", "float16")
    geometry = geometry_of(describe(read_config(model)))
    kv, index = context_bytes(spec_of(geometry, geometry.max_positions, "float32"))
    have_gpu(monkeypatch, memory.KERNELS_BYTES + (1 << 20) + 3 * (kv + index) * 4 // 3)
    assert chosen(settings, left) == ("hybrid", "float32"), "there is room for 3 contexts of 4"
    have_gpu(monkeypatch, 1000)
    assert chosen(of_narrow, left) == ("cpu", "float32")
    monkeypatch.setattr(serving, "ask", lambda probe, given: {"error": "no answer within 120 s"})
    assert chosen(settings, left) == ("cpu", "float32")
    assert capsys.readouterr().err.endswith("\ndecoding on the CPU: no answer within 120 s\n")


def test_a_service_on_a_cpu_has_the_dtype_of_a_models_files_where_it_is_fast(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make_model("llama").bfloat16().save_pretrained(tmp_path)
    loaded = load_settings(None, {}, {"model.name": str(tmp_path)})
    monkeypatch.setattr(serving, "ask", lambda probe, given: PROBES[probe](given))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(serving, "visible_gpus", lambda: ())
    capsys.readouterr()
    for fast, wanted in ((False, "float32"), (True, "bfloat16")):
        for module in (loader, serving):
            monkeypatch.setattr(module, "multiplies_bfloat16", lambda fast=fast: fast)
        settings = serving._chosen(loaded.settings, loaded.left_to_csattn, [])
        assert (settings.engine.placement, settings.build.dtype) == ("cpu", wanted)
        assert serving._chosen(loaded.settings, ["engine.placement"], []).build.dtype == "float32"
    monkeypatch.setattr(serving, "ask", lambda *_: pytest.fail("nothing is left to choose"))
    placed = replace(loaded.settings, engine=replace(loaded.settings.engine, placement="device"))
    assert serving._chosen(placed, [], []) == placed
    assert capsys.readouterr().err == ""


def test_the_instructions_of_this_cpu_are_read() -> None:
    supported = [name for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported") if getattr(torch.cpu, name)()]
    assert multiplies_bfloat16() == bool(supported)


def test_a_service_has_the_dtype_of_its_first_named_artifact(tmp_path: Path) -> None:
    built = build_context(wrap_model(make_model().bfloat16(), byte_tokenizer(), "tiny"), "word " * 100, tmp_path)
    settings = load_settings(None, {}, {"store.path": tmp_path}).settings
    pairs = [("it", built.artifact_id[:6])]
    chosen = serving._chosen(settings, ["build.dtype"], pairs)
    assert chosen.build.dtype == "bfloat16" and serving._named(chosen, pairs) == {"it": built.artifact_id}
    with pytest.raises(ConfigError, match="was built in bfloat16 and the service loads its model in float32"):
        serving._named(serving._chosen(settings, [], pairs), pairs)


@pytest.mark.parametrize(
    ("dtype", "weights", "on_gpu", "on_cpu"),
    [
        (None, None, "float32", "float32"),
        ("float16", None, "float16", "float32"),
        ("bfloat16", None, "bfloat16", "bfloat16"),
        (None, "fp8", "bfloat16", "bfloat16"),
    ],
)
def test_auto_is_the_dtype_of_a_models_files_where_it_is_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str | None, weights: str | None, on_gpu: str, on_cpu: str
) -> None:
    config = tiny_config("llama")
    config.dtype = dtype
    config.save_pretrained(tmp_path)
    assert dtype_for("cuda", str(tmp_path), "auto", weights) == on_gpu
    for fast, wanted in ((False, "float32"), (True, on_cpu)):
        monkeypatch.setattr(loader, "multiplies_bfloat16", lambda fast=fast: fast)
        assert dtype_for("cpu", str(tmp_path), "auto", weights) == wanted
        assert dtype_for("cpu", str(tmp_path), "float16", weights) == "float16"


def test_load_model_computes_in_that_dtype(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model().bfloat16().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).model.dtype == torch.float32
    monkeypatch.setattr(loader, "multiplies_bfloat16", lambda: True)
    assert load_model(str(tmp_path)).model.dtype == torch.bfloat16
    assert load_model(str(tmp_path), "float32").model.dtype == torch.float32


def test_auto_is_bfloat16_for_quantized_models_but_not_for_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("llama")
    config.quantization_config = {"quant_method": "awq", "bits": 4}
    config.save_pretrained(tmp_path)
    (gguf := tmp_path / "model.gguf").touch()
    monkeypatch.setattr(loader, "multiplies_bfloat16", lambda: True)
    for device in ("cpu", "cuda"):
        assert dtype_for(device, str(tmp_path), "auto") == dtype_for(device, str(gguf), "auto") == "bfloat16"
        assert dtype_for(device, None, "auto") == "float32"


@pytest.mark.gpu
def test_a_gpu_is_found_in_another_process(model: str) -> None:
    loaded = load_settings(None, {}, {"model.name": model})
    settings = serving._chosen(loaded.settings, loaded.left_to_csattn, [])
    assert (settings.engine.placement, settings.build.dtype) == ("device", "float32")
