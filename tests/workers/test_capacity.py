"""Memory for weights is checked before any are loaded, unless they are memory-mapped from their files."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from csattn.models import weight_sizes
from csattn.models.loader import read_config
from csattn.models.weight_sizes import weight_bytes
from offload import budget
from offload.errors import MemoryPlanError
from tests.models.gguf_files import gguf_of, write_gguf
from tests.tiny import byte_tokenizer, make_model, save, tiny_config
from workers import capacity
from workers.cli import building
from workers.service import making
from workers.settings import load_settings


def test_weights_larger_than_memory_are_refused_unless_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = str(save(tmp_path))  # saved in float32
    monkeypatch.setattr(building, "load_model", lambda *_, **__: "loaded")
    monkeypatch.setattr(budget, "host_memory_bytes", lambda: 1000)
    monkeypatch.setattr(capacity, "host_memory_bytes", lambda: 1000)
    assert building.show_loading(model, "float32") == "loaded", "files that are mapped need no memory"
    assert (
        "are read from the disk whenever they are needed, on a CPU for each token; keep them in 4 bits" in caplog.text
    )
    for dtype, weights in (("bfloat16", None), ("float32", "fp8")):
        with pytest.raises(MemoryPlanError, match=rf"copied to {dtype}, needs .* use a smaller model"):
            building.show_loading(model, dtype, weights=weights)
    settings = load_settings(None, {}, {"model.name": model, "build.dtype": "bfloat16"}).settings
    with pytest.raises(MemoryPlanError, match="copied to bfloat16"):
        making.make_backend(settings, lambda *_: pytest.fail("a search worker is started"))
    for of in (budget, capacity):
        monkeypatch.setattr(of, "host_memory_bytes", lambda: 1 << 34)
    caplog.clear()
    assert building.show_loading(model, "bfloat16") == "loaded" and not caplog.records


def test_a_memory_refusal_suggests_the_dtype_that_is_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = save(tmp_path) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "bfloat16"}))
    monkeypatch.setattr(budget, "host_memory_bytes", lambda: 1000)
    with pytest.raises(MemoryPlanError, match=r"copied to float32, .* it is memory-mapped: --dtype bfloat16"):
        building.show_loading(str(tmp_path), "float32")


def test_a_gguf_conversion_without_enough_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CSATTN_CACHE", str(tmp_path))
    model = make_model("llama")
    tensors, its = gguf_of(model)
    file = str(write_gguf(tmp_path / "model.gguf", tensors, **its))
    sizes = [parameter.numel() for parameter in model.parameters()]
    monkeypatch.setattr(budget, "host_memory_bytes", lambda: budget.SPARE_BYTES + 2 * sum(sizes) + 13 * max(sizes))
    with monkeypatch.context() as of_test:  # the disk is full
        of_test.setattr(weight_sizes, "has_disk_space", lambda num_bytes: False)
        with pytest.raises(MemoryPlanError, match=r"converted to float32, needs .* takes less: --dtype bfloat16"):
            building.show_loading(file, "float32")
        assert not (tmp_path / "models").exists()
        with pytest.raises(MemoryPlanError, match=rf"converted to bfloat16, .*; with more room in {tmp_path} it takes"):
            building.show_loading(file, "bfloat16")
    monkeypatch.setattr(weight_sizes, "has_disk_space", lambda num_bytes: True)
    monkeypatch.setattr(budget, "host_memory_bytes", lambda: budget.SPARE_BYTES + 14 * max(sizes) - 1)
    with pytest.raises(MemoryPlanError, match=r"converted to bfloat16, needs .* use a smaller model$"):
        building.show_loading(file, "bfloat16")
    monkeypatch.setattr(budget, "host_memory_bytes", lambda: budget.SPARE_BYTES + 14 * max(sizes))
    assert building.show_loading(file, "bfloat16").dtype == torch.bfloat16
    assert capsys.readouterr().err.count("converted to bfloat16 once") == 3


def test_decoded_weights_of_quantized_models_count_unless_written_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = save(tmp_path) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "bfloat16"}))
    monkeypatch.setattr(building, "load_model", lambda *_, **__: "loaded")
    monkeypatch.setattr(weight_sizes, "has_disk_space", lambda num_bytes: True)
    size = weight_bytes(read_config(str(tmp_path), "bfloat16"), 2, "int4")
    assert 0 < size.quantized < size.linears and not size.experts
    monkeypatch.setattr(capacity, "host_memory_bytes", lambda: 0)
    monkeypatch.setattr(budget, "host_memory_bytes", lambda: budget.SPARE_BYTES + size.quantized)
    assert building.show_loading(str(tmp_path), "bfloat16", weights="int4") == "loaded", "embeddings stay mapped"
    assert "read from the disk" in caplog.text
    caplog.clear()
    with pytest.raises(MemoryPlanError, match=f"needs {2 * size.decoded + size.quantized:,} bytes"):
        building.show_loading(str(tmp_path), "float32", weights="int4")
    with monkeypatch.context() as of_test:
        of_test.setattr(weight_sizes, "has_disk_space", lambda num_bytes: False)
        with pytest.raises(MemoryPlanError, match=f"needs {size.linears + size.quantized:,} bytes"):
            building.show_loading(str(tmp_path), "bfloat16", weights="int4")
    assert not caplog.records, "what is refused is not read from the disk"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "float32"}))
    with pytest.raises(MemoryPlanError, match=f"needs {size.decoded:,} bytes"):  # all are cast before any is rounded
        building.show_loading(str(tmp_path), "bfloat16", weights="int4")


def test_a_multimodal_models_text_model_is_mapped_in_the_top_level_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in published files, only the top level of config.json has a dtype. If there is none, nothing is refused."""
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    tower |= {"model_type": "siglip_vision_model", "patch_size": 14, "image_size": 28}
    text = tiny_config("gemma3_text", final_logit_softcapping=None).to_dict()
    config = type(AutoConfig.for_model("gemma3"))(text_config=text, vision_config=tower)
    AutoModelForImageTextToText.from_config(config).to(torch.bfloat16).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    published = json.loads(file.read_text())
    for part in ("text_config", "vision_config"):
        published[part].pop("dtype", None)
    assert published["dtype"] == "bfloat16"
    file.write_text(json.dumps(published))
    monkeypatch.setattr(budget, "host_memory_bytes", lambda: 1000)
    assert building.show_loading(str(tmp_path), "bfloat16").dtype == torch.bfloat16
    with pytest.raises(MemoryPlanError, match=r"copied to float32, .* it is memory-mapped: --dtype bfloat16"):
        building.show_loading(str(tmp_path), "float32")
    file.write_text(json.dumps({name: value for name, value in published.items() if name != "dtype"}))
    assert building.show_loading(str(tmp_path), "bfloat16").dtype == torch.bfloat16
