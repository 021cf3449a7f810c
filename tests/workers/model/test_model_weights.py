"""Weights come from a loaded model, from a directory, or are random."""

from dataclasses import fields, is_dataclass
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from bench.random_weights import random_weights
from bench.streamed import streamed_bytes, streamed_params
from csattn.errors import ModelError
from csattn.models import load_model
from csattn.models.module_weights import weights_of
from csattn.models.quantized_weight import QuantizedWeight
from csattn.models.spec import ModelSpec
from tests.tiny import ALL_FAMILIES, FAMILIES, loaded, make_model, save
from workers.model import take_weights

TINY = LlamaConfig(
    num_hidden_layers=2,
    hidden_size=64,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=300,
    max_position_embeddings=512,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_taken_weights_have_the_models_shapes_and_parameter_count(family) -> None:
    model = loaded(family).model
    weights = take_weights(model, "cpu")
    shape = weights.spec
    assert weights.layers[0].qkv[0].weight.shape == (shape.heads.qkv_width, shape.hidden_size)
    assert weights.layers[0].gate_up[0].weight.shape == (2 * shape.layers[0].mlp.intermediate_size, shape.hidden_size)
    assert (weights.layers[0].qkv[0].bias is not None) == (family == "qwen2")
    assert (weights.layers[0].head_norms is not None) == (family == "qwen3")
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert streamed_params(shape) == matrices - shape.vocab_size * shape.hidden_size
    assert streamed_bytes(weights) == 4 * streamed_params(shape)


def test_taken_weights_are_copies() -> None:
    model = make_model()
    weights = take_weights(model, "cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    assert weights.final_norm.isfinite().all() and weights.layers[1].down.weight.isfinite().all()


def test_weights_loaded_in_another_dtype_are_taken_in_it(tmp_path) -> None:
    model = load_model(str(save(tmp_path, "qwen3")), "bfloat16").model
    weights = take_weights(model, "cpu")
    assert weights.dtype == torch.bfloat16 and weights.ropes[0].angles.dtype == torch.float32
    assert torch.equal(weights.head.weight, model.lm_head.weight)


@pytest.mark.parametrize("rounding", ["fp8", "int4"])
def test_quantized_weights_are_taken_without_decoding(rounding, tmp_path) -> None:
    model = load_model(str(save(tmp_path, "qwen2")), "bfloat16", weights=rounding).model
    weights = take_weights(model, "cpu")
    for layer, there in zip(weights.layers, model.model.layers, strict=True):
        attention, mlp = there.self_attn, there.mlp
        parts = {
            layer.qkv[0]: (attention.q_proj, attention.k_proj, attention.v_proj),
            layer.out: (attention.o_proj,),
            layer.gate_up[0]: (mlp.gate_proj, mlp.up_proj),
            layer.down: (mlp.down_proj,),
        }
        for linear, modules in parts.items():
            assert linear.weight is linear.quantized.words and linear.quantized.format == rounding
            whole = torch.cat([module.weight for module in modules])
            assert torch.equal(linear.plain(torch.bfloat16), whole)
            assert torch.equal(linear.outputs(3, 20).plain(torch.bfloat16), whole[3:20])
        assert torch.equal(layer.qkv[0].bias, torch.cat([part.bias for part in parts[layer.qkv[0]]]))
    head, linears = weights.head, [(*x.qkv, x.out, *x.gate_up, x.down) for x in weights.layers]
    assert (None if head.quantized is None else head.quantized.format) == {"fp8": None, "int4": "fp8"}[rounding]
    of_head = head.weight.nbytes if head.quantized is None else head.quantized.nbytes
    assert streamed_bytes(weights) == sum(linear.quantized.nbytes for of in linears for linear in of) + of_head


@pytest.mark.parametrize(
    ("family", "shared"), [("gpt_oss", False), ("gemma4_text, experts", False), ("qwen3_next", True)]
)
def test_quantized_experts_are_taken_without_decoding(family, shared, tmp_path) -> None:
    model = load_model(str(save(tmp_path, family)), "bfloat16", weights="int4").model
    want = [layer.experts for layer in weights_of(model).layers]
    weights = take_weights(model, "cpu")
    for layer, there in zip(weights.layers, want, strict=True):
        beside_mlp = any(experts.norms is not None for experts in there)
        assert len(layer.experts) == (0 if layer.gate_up and not beside_mlp else 1 + shared)
        for experts, plain in zip(layer.experts, there, strict=True):
            assert experts.gates.dtype == torch.int16 and experts.quantized.down.format == "int4"
            assert experts.ups.data_ptr() - experts.gates.data_ptr() == experts.gates[0].nbytes
            got = experts.plain(torch.bfloat16)
            for name in ("gates", "ups", "down"):
                assert torch.equal(getattr(got, name), getattr(plain, name))


def test_matrices_of_different_formats_are_decoded_before_they_are_joined(tmp_path) -> None:
    model = load_model(str(save(tmp_path)), "bfloat16", weights="int4").model
    attention = model.model.layers[0].self_attn
    attention.k_proj.quantized = QuantizedWeight.rounded(attention.k_proj.weight.data, "fp8")
    attention.k_proj.weight.data = attention.k_proj.quantized.decoded(torch.bfloat16)
    joined = take_weights(model, "cpu").layers[0].qkv[0]
    assert joined.quantized is None
    assert torch.equal(
        joined.weight, torch.cat([part.weight for part in (attention.q_proj, attention.k_proj, attention.v_proj)])
    )


def test_float16_weights_are_refused() -> None:
    with pytest.raises(ModelError, match="float32 or bfloat16, not float16"):
        take_weights(make_model().half(), "cpu")
    with pytest.raises(ModelError, match="float32 or bfloat16, not float16"):
        random_weights(TINY, "cpu", torch.float16)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_random_weights_have_the_shapes_and_dtypes_of_the_models(family: str) -> None:
    model = loaded(family).model
    taken, drawn = take_weights(model, "cpu"), random_weights(model.config, "cpu", model.dtype)
    assert sizes_of(drawn) == sizes_of(taken)


def sizes_of(part: Any) -> Any:
    """Return the shapes and dtypes of all tensors in weights, nested alike."""
    if isinstance(part, torch.Tensor):
        return tuple(part.shape), part.dtype
    if isinstance(part, tuple):
        return [sizes_of(each) for each in part]
    if is_dataclass(part) and not isinstance(part, ModelSpec):
        return {field.name: sizes_of(getattr(part, field.name)) for field in fields(part)}
    return part is None


def test_random_weights_of_one_seed_are_equal() -> None:
    first, second = random_weights(TINY, "cpu", seed=3), random_weights(TINY, "cpu", seed=3)
    other = random_weights(TINY, "cpu", seed=4)
    assert torch.equal(first.layers[1].down.weight, second.layers[1].down.weight)
    assert not torch.equal(first.layers[1].down.weight, other.layers[1].down.weight)
    assert first.dtype == torch.bfloat16


def test_what_layers_of_models_with_layer_norm_add_has_a_mean_of_0() -> None:
    """Kernels on a GPU then need not subtract the stream's mean before norms."""
    weights = take_weights(loaded("cohere2_moe").model, "cpu")
    assert weights.spec.centred and any(layer.experts for layer in weights.layers)
    for layer in weights.layers:
        added = [*(of.down for of in layer.experts), *(linear.weight for linear in (layer.out, layer.down))]
        for matrix in added:  # [..., hidden_size, num_in]
            torch.testing.assert_close(matrix.mean(-2), torch.zeros_like(matrix[..., 0, :]), rtol=0, atol=1e-6)
