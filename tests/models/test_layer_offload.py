"""Offloaded layers compute the same results on the device that they are copied to, and then return to the host."""

from contextlib import suppress
from typing import Any

import pytest
import torch

from csattn.models import layer_offload
from csattn.models.layer_offload import is_offloaded, layer_on_device, place
from csattn.models.query import projects_queries
from index_build.capture import prefill
from tests.tiny import make_model, token_ids


def addresses(model: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize(
    "family", ["llama", "gpt_oss", "qwen3_next", "deepseek_v32", "gemma3_text", "gemma4_text", "phi3"]
)
def test_prefill_with_offloaded_layers_equals_prefill_without(family: str) -> None:
    model, ids = make_model(family), torch.from_numpy(token_ids(70)).long()
    want = [leaving.clone() for _, leaving in prefill(model, ids, chunk_len=32)]
    homes, layers, seen = addresses(model), model.model.layers, []
    for layer in layers:
        layer.mlp.register_forward_pre_hook(lambda mlp, _: seen.append(next(mlp.parameters()).data_ptr()))
    model.layers_are_offloaded = True
    got = [leaving.clone() for _, leaving in prefill(model, ids, chunk_len=32)]
    assert all(map(torch.equal, got, want)) and len(got) == len(layers)
    assert len(seen) == 3 * len(layers) and not set(seen) & set(homes)
    assert addresses(model) == homes


def test_an_offloaded_layer_is_back_on_the_host_after_an_error() -> None:
    model = make_model()
    model.layers_are_offloaded = True
    homes = addresses(model)
    with suppress(KeyError), layer_on_device(model, 1) as layer:
        assert layer is model.model.layers[1] and addresses(model) != homes
        raise KeyError
    assert addresses(model) == homes


def test_layers_stay_on_the_host_if_the_device_has_no_room_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_offload, "_has_room", lambda model, device: False)
    model = place(make_model(), "meta")  # a device without any memory
    assert is_offloaded(model) and model.device.type == "meta"
    kinds = {name: tensor.device.type for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    assert all((kind == "cpu") == (".layers." in name or "lm_head" in name) for name, kind in kinds.items())
    monkeypatch.undo()
    whole = place(make_model(), "meta")
    assert not is_offloaded(whole) and {parameter.device.type for parameter in whole.parameters()} == {"meta"}


@pytest.mark.parametrize("free_bytes", [1000, 1 << 30])
def test_room_on_a_device_is_its_free_memory(free_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_offload.torch.cuda, "mem_get_info", lambda device: (free_bytes, 1 << 40))
    assert layer_offload._has_room(make_model(), "cuda") == (free_bytes > 1000) and layer_offload._has_room(
        make_model(), "cpu"
    )


def test_parts_of_an_offloaded_layer_can_be_copied_without_the_rest() -> None:
    model = make_model()
    model.layers_are_offloaded = True
    mlp, q = (part.weight for part in (model.model.layers[0].mlp.up_proj, model.model.layers[0].self_attn.q_proj))
    homes = mlp.data_ptr(), q.data_ptr()
    with layer_on_device(model, 0, projects_queries(model)):
        assert mlp.data_ptr() == homes[0] and q.data_ptr() != homes[1]
    assert (mlp.data_ptr(), q.data_ptr()) == homes
