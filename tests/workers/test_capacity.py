"""Room for weights is asked for before any is loaded, where they are not mapped from their files."""

import json
from pathlib import Path

import pytest

from offload import budget
from offload.errors import MemoryPlanError
from tests.tiny import save
from workers.cli import building
from workers.service import making
from workers.settings import load_settings


def test_weights_that_memory_has_no_room_for_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(save(tmp_path))  # its files have float32
    monkeypatch.setattr(building, "load_model", lambda *_, **__: "loaded")
    monkeypatch.setattr(budget, "host_memory_bytes", lambda: 1000)
    assert building.show_loading(model, "float32") == "loaded", "files that are mapped need no memory"
    for dtype, weights in (("bfloat16", None), ("float32", "fp8")):
        with pytest.raises(MemoryPlanError, match=rf"copied to {dtype}, needs .* take a smaller model"):
            building.show_loading(model, dtype, weights=weights)
    settings = load_settings(None, {}, {"model.name": model, "build.dtype": "bfloat16"}).settings
    with pytest.raises(MemoryPlanError, match="copied to bfloat16"):
        making.make_backend(settings, lambda *_: pytest.fail("a search worker is started"))
    monkeypatch.setattr(budget, "host_memory_bytes", lambda: 1 << 34)
    assert building.show_loading(model, "bfloat16") == "loaded"


def test_what_a_narrower_dtype_needs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = save(tmp_path) / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "dtype": "bfloat16"}))
    monkeypatch.setattr(budget, "host_memory_bytes", lambda: 1000)
    with pytest.raises(MemoryPlanError, match=r"copied to float32, .* it is mapped: --dtype bfloat16"):
        building.show_loading(str(tmp_path), "float32")
