"""What a context's own tokens attended to equals what `transformers` reports, and takes one run of the model."""

from pathlib import Path

import pytest
import torch

from csattn.artifact import open_artifact
from csattn.config import preset
from csattn.models.loader import wrap_model
from index_build.pipeline import build_artifact
from tests.tiny import FAMILIES, byte_tokenizer, loaded, make_model, token_ids
from workers.context_layers import context_layers

CONTEXT_LEN = 300  # more than twice the tokens that pass through the model at a time


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_received_equals_eager_attention(store, family) -> None:
    model, ids = loaded(family), token_ids(CONTEXT_LEN)
    before = model.model.config._attn_implementation
    with open_artifact(build_artifact(model, ids, preset("default"), store).path) as artifact:
        layers = context_layers(model, artifact)
        received = [layer.attention_received() for layer in layers]
        kv = [artifact.layer_kv(layer_idx).clone() for layer_idx in range(len(layers))]
    assert model.model.config._attn_implementation == before
    model.model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            want = model.model(torch.from_numpy(ids).long()[None], output_attentions=True).attentions
    finally:
        model.model.set_attn_implementation(before)
    for got, of_layer, layer, rows in zip(received, want, layers, kv, strict=True):
        torch.testing.assert_close(got, of_layer[0].sum(1), rtol=1e-3, atol=1e-4)
        assert torch.equal(layer.keys, rows[:, :, 0])
        assert torch.equal(layer.values, rows[:, :, 1])
        assert layer.group_size == 2


def test_attention_received_runs_the_model_once_and_only_on_demand(store) -> None:
    model, num_tokens = loaded(), []
    path = build_artifact(model, token_ids(CONTEXT_LEN), preset("default"), store).path
    hook = model.model.model.embed_tokens.register_forward_pre_hook(lambda _, args: num_tokens.append(args[0].numel()))
    try:
        with open_artifact(path) as artifact:
            layers = context_layers(model, artifact)
            assert not num_tokens
            for layer in layers:
                layer.attention_received()
    finally:
        hook.remove()
    assert sum(num_tokens) == CONTEXT_LEN


def test_attention_received_is_finite_where_products_exceed_float16(store) -> None:
    model = make_model("qwen2").half()
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.q_proj.bias, 100.0)
        torch.nn.init.constant_(layer.self_attn.k_proj.bias, 100.0)
    half = wrap_model(model, byte_tokenizer(), "half")
    with open_artifact(build_artifact(half, token_ids(CONTEXT_LEN), preset("default"), store).path) as artifact:
        for layer in context_layers(half, artifact):
            received = layer.attention_received()
            torch.testing.assert_close(received.sum(1), torch.full((len(received),), float(CONTEXT_LEN)))
