"""Checkpoints published in 8 and 4 bits are decoded as their formats define."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from csattn.errors import ModelError
from csattn.models import load_model
from csattn.models.loader import read_config, wrap_model
from csattn.models.quantized import read_state
from csattn.models.weight_sizes import device_bytes, weight_bytes
from tests.models.quantized_files import FORMATS, NUM_LAYERS, change, compressed, in_mxfp4, pack, quantize
from tests.tiny import save
from workers.model.weights import take_weights

# formats that a GPU does not keep: decoded once, when loaded
NOT_KEPT = (
    "fp8 by small block",
    "gptq of 8 bits",
    "int8 with zero points",
    "int8 in reordered groups",
    "fp8 by exponents",
)


@pytest.mark.parametrize("form", FORMATS)
def test_quantized_weights_decode_as_their_format_defines(form: str, plain: Path, tmp_path: Path, rng) -> None:
    meant = quantize(plain, tmp_path / "quantized", form, rng)
    there = load_model(str(tmp_path / "quantized"))
    weights = dict(there.model.named_parameters())
    assert len(meant) == 7 * NUM_LAYERS
    for name, expected in meant.items():
        torch.testing.assert_close(weights[name].data, expected, rtol=1e-6, atol=1e-7)
    untouched = load_file(plain / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(weights["model.embed_tokens.weight"], untouched)
    assert there.model.dtype == torch.float32 and not hasattr(there.model.config, "quantization_config")
    assert not any(hasattr(module, "quantized") for module in there.model.modules())
    half = load_model(str(tmp_path / "quantized"), "bfloat16")
    assert all(parameter.is_contiguous() for of in (there, half) for parameter in of.model.parameters())
    assert {parameter.dtype for parameter in half.model.parameters()} == {torch.bfloat16}
    kept = {name: module.quantized for name, module in half.model.named_modules() if hasattr(module, "quantized")}
    assert len(kept) == (0 if form in NOT_KEPT else len(meant))
    for name, weight in kept.items():
        assert torch.equal(weight.decoded(torch.float32), weights[f"{name}.weight"])


def test_matrices_of_models_named_backbone_are_kept_quantized(tmp_path: Path, rng) -> None:
    """transformers renames them while it loads."""
    plain = save(tmp_path / "plain", "nemotron_h", mlp_bias=False)
    meant = quantize(plain, tmp_path / "quantized", "fp8 by block", rng)
    loaded = load_model(str(tmp_path / "quantized"), "bfloat16")
    require_bytes_of(tmp_path / "quantized", loaded)
    half = loaded.model
    kept = {f"{name}.weight" for name, module in half.named_modules() if hasattr(module, "quantized")}
    names = {name.replace("backbone.", "model.", 1): name for name in meant}
    assert kept == {name for name in names if ".experts." not in name} | {
        f"model.layers.{layer_idx}.mixer.experts.weight" for layer_idx in (2, 6)
    }
    experts = load_model(str(tmp_path / "quantized")).model.model.layers[2].mixer.experts
    for number, (up, down) in enumerate(zip(experts.up_proj, experts.down_proj, strict=True)):
        of = f"backbone.layers.2.mixer.experts.{number}"
        assert torch.equal(up, meant[f"{of}.up_proj.weight"]) and torch.equal(down, meant[f"{of}.down_proj.weight"])
    quantized = half.model.layers[2].mixer.experts.quantized
    assert torch.equal(quantized.gate_up.decoded(torch.float32), experts.up_proj.flatten(0, 1))
    assert torch.equal(quantized.down.decoded(torch.float32), experts.down_proj.flatten(0, 1))


def kept_of_experts(half: Any) -> list[tuple[Any, Tensor, Tensor]]:
    """Return each layer's quantized experts, and the gate-up and down matrices that they decode to."""
    found = []
    for layer in half.model.model.layers:
        experts = layer.mlp.experts
        matrices = (experts.gate_up_proj.data, experts.down_proj.data)
        if experts.__class__.__name__.startswith("GptOss"):  # [num_in, num_out], gates and ups interleaved
            gate_up, down = (matrix.mT for matrix in matrices)
            matrices = torch.cat([gate_up[:, ::2], gate_up[:, 1::2]], dim=1), down
        found.append((experts.quantized, *(matrix.flatten(0, 1) for matrix in matrices)))
    return found


@pytest.mark.parametrize(
    ("family", "form"), [("qwen3_moe", "fp8 by block"), ("mixtral", "awq"), ("olmoe", "gptq in order")]
)
def test_experts_stored_one_by_one_are_joined_and_kept_quantized(family: str, form: str, tmp_path: Path, rng) -> None:
    sizes = {"moe_intermediate_size": 96} if family == "qwen3_moe" else {}
    meant = quantize(save(tmp_path / "plain", family, **sizes), tmp_path / "quantized", form, rng)
    exact, half = (load_model(str(tmp_path / "quantized"), dtype) for dtype in ("float32", "bfloat16"))
    experts = exact.model.model.layers[1].mlp.experts
    names = ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    of_last = [next(x for name, x in meant.items() if f"layers.1.{block}.experts.4.{part}." in name)
               for block in ["block_sparse_moe" if family == "mixtral" else "mlp"] for part in names]  # fmt: skip
    torch.testing.assert_close(experts.gate_up_proj[4].data, torch.cat(of_last[:2]), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(experts.down_proj[4].data, of_last[2], rtol=1e-6, atol=1e-7)
    for quantized, gate_up, down in kept_of_experts(half):
        assert torch.equal(quantized.gate_up.decoded(torch.bfloat16), gate_up)
        assert torch.equal(quantized.down.decoded(torch.bfloat16), down)
    require_bytes_of(tmp_path / "quantized", half)


def require_bytes_of(folder: Path, half: Any, weights: str | None = None) -> None:
    """Check that the bytes predicted from a config are those of the loaded model."""
    decoded = sum(parameter.nbytes for parameter in half.model.parameters())
    size = weight_bytes(read_config(str(folder)), 2, weights)
    assert (size.decoded, size.on_gpu) == (decoded, device_bytes(half.model))


def test_experts_with_reordered_groups_are_not_kept_quantized(tmp_path: Path, rng) -> None:
    quantize(save(tmp_path / "plain", "olmoe"), tmp_path / "quantized", "gptq", rng)
    half = load_model(str(tmp_path / "quantized"), "bfloat16")
    assert not any(hasattr(layer.mlp.experts, "quantized") for layer in half.model.model.layers)
    require_bytes_of(tmp_path / "quantized", half)


def test_experts_of_mtp_layers_are_not_mistaken_for_those_of_the_first_layers(tmp_path: Path, rng) -> None:
    quantize(
        save(tmp_path / "plain", "qwen3_next", moe_intermediate_size=96), tmp_path / "quantized", "fp8 by block", rng
    )
    state = load_file(tmp_path / "quantized" / "model.safetensors")
    for name in [name for name in state if name.startswith("model.layers.0.mlp.experts.")]:
        state[name.replace("model.", "mtp.", 1)] = state[name].flip(0).contiguous()
    config = json.loads((tmp_path / "quantized" / "config.json").read_text())
    change(tmp_path / "quantized", tmp_path / "with mtp", state, **config)
    layer = load_model(str(tmp_path / "with mtp"), "bfloat16").model.model.layers[0]
    quantized = layer.mlp.experts.quantized
    assert torch.equal(quantized.gate_up.decoded(torch.bfloat16), layer.mlp.experts.gate_up_proj.flatten(0, 1))


def test_mxfp4_experts_are_kept_in_four_bits(tmp_path: Path, rng) -> None:
    in_mxfp4(save(tmp_path / "plain", "gpt_oss", intermediate_size=96), tmp_path / "quantized", rng)
    half = load_model(str(tmp_path / "quantized"), "bfloat16")
    for quantized, gate_up, down in kept_of_experts(half):
        assert quantized.gate_up.format == quantized.down.format == "fp4"
        assert torch.equal(quantized.gate_up.decoded(torch.bfloat16), gate_up) and gate_up.norm() > 1
        assert torch.equal(quantized.down.decoded(torch.bfloat16), down)
    assert not hasattr(half.model.model.layers[0].self_attn.q_proj, "quantized")
    require_bytes_of(tmp_path / "quantized", half)
    state = load_file(tmp_path / "quantized" / "model.safetensors")
    state["model.layers.1.mlp.experts.down_proj_scales"] = state["model.layers.1.mlp.experts.down_proj_scales"][:, :9]
    change(tmp_path / "quantized", tmp_path / "damaged", {name: x.contiguous() for name, x in state.items()})
    with pytest.raises(ModelError, match="down_proj cannot be decoded: scales of shape"):
        load_model(str(tmp_path / "damaged"), "bfloat16")


@pytest.mark.parametrize(("family", "rounding"), [("gpt_oss", "int4"), ("qwen3_moe", "fp8")])
def test_experts_can_be_rounded_while_loading(family: str, rounding: str, tmp_path: Path) -> None:
    folder = save(tmp_path, family)
    exact, rounded = load_model(str(folder), "bfloat16"), load_model(str(folder), "bfloat16", weights=rounding)
    before = [layer.mlp.experts.gate_up_proj for layer in exact.model.model.layers]
    for old, layer in zip(before, rounded.model.model.layers, strict=True):
        assert 0 < (layer.mlp.experts.gate_up_proj - old).norm() < 0.12 * old.norm()
    for quantized, gate_up, down in kept_of_experts(rounded):
        assert torch.equal(quantized.gate_up.decoded(torch.bfloat16), gate_up)
        assert torch.equal(quantized.down.decoded(torch.bfloat16), down)
    require_bytes_of(folder, rounded, rounding)


@pytest.mark.parametrize("of_scales", [torch.uint8, torch.float8_e8m0fnu])
def test_mxfp4_experts_decode_to_the_values_of_their_nibbles_and_scales(of_scales, tmp_path: Path, rng) -> None:
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    blocks = rng.integers(0, 256, (2, 5, 3, 16), dtype=np.uint8)  # experts, outputs, groups of 32 inputs
    scales = rng.integers(120, 134, (2, 5, 3), dtype=np.uint8)
    meant = np.empty((2, 96, 5), np.float32)
    for expert, out, group, pair in np.ndindex(blocks.shape):
        for half in range(2):
            number = blocks[expert, out, group, pair] >> 4 * half & 15
            value = values[number & 7] * (-1 if number & 8 else 1) * 2.0 ** (int(scales[expert, out, group]) - 127)
            meant[expert, 32 * group + 2 * pair + half, out] = value
    stored = torch.from_numpy(scales).view(of_scales)
    tensors = {"mlp.experts.up_blocks": torch.from_numpy(blocks), "mlp.experts.up_scales": stored}
    save_file(tensors, tmp_path / "model.safetensors")
    state, kept = read_state(tmp_path, {"quant_method": "mxfp4"}, torch.float32)
    assert not kept  # some scales are 2 ** 2 or more
    assert list(state) == ["mlp.experts.up"] and np.array_equal(state["mlp.experts.up"].numpy(), meant)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rounding", ["fp8", "int4"])
@pytest.mark.parametrize(("hidden_size", "intermediate_size"), [(72, 130), (128, 256)])
def test_rounded_weights_of_any_width_are_contiguous(
    rounding: str, dtype: str, hidden_size: int, intermediate_size: int, tmp_path: Path
) -> None:
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "head_dim": 16}
    loaded = load_model(str(save(tmp_path, "qwen3", **sizes)), dtype, weights=rounding)
    assert all(parameter.is_contiguous() for parameter in loaded.model.parameters())


@pytest.mark.parametrize(("rounding", "most"), [("fp8", 0.03), ("int4", 0.12)])
def test_weights_can_be_rounded_while_loading(rounding: str, most: float, plain: Path) -> None:
    exact, rounded = load_model(str(plain), "bfloat16"), load_model(str(plain), "bfloat16", weights=rounding)
    before, after = dict(exact.model.named_modules()), dict(rounded.model.named_modules())
    names = [name for name, module in after.items() if hasattr(module, "quantized")]
    assert len(names) == 7 * NUM_LAYERS + (rounding == "int4") and ("lm_head" in names) == (rounding == "int4")
    for name in names:
        assert torch.equal(after[name].weight, after[name].quantized.decoded(torch.bfloat16))
        assert 0 < (after[name].weight - before[name].weight).norm() < most * before[name].weight.norm()
    again = load_model(str(plain), "bfloat16", weights=rounding)
    assert exact.fingerprint != rounded.fingerprint == again.fingerprint
    saved = sum(before[name].weight.nbytes - after[name].quantized.nbytes for name in names)
    assert device_bytes(exact.model) == sum(parameter.nbytes for parameter in exact.model.parameters())
    assert device_bytes(rounded.model) == device_bytes(exact.model) - saved


def test_a_head_that_is_the_embedding_is_rounded_to_8_bits_with_layers_of_4(tmp_path: Path) -> None:
    exact = load_model(str(save(tmp_path, "llama", tie_word_embeddings=True)), "bfloat16")
    rounded = load_model(str(tmp_path), "bfloat16", weights="int4")
    head, embedding = rounded.model.lm_head, rounded.model.model.embed_tokens
    assert head.weight is embedding.weight and head.quantized.format == "fp8"
    assert torch.equal(head.weight, head.quantized.decoded(torch.bfloat16))
    modules = [(name, module) for name, module in rounded.model.named_modules() if hasattr(module, "quantized")]
    saved = sum(module.weight.nbytes * (name != "lm_head") - module.quantized.nbytes for name, module in modules)
    assert device_bytes(rounded.model) == device_bytes(exact.model) - saved
    taken = take_weights(rounded.model, "cpu")
    assert taken.head.quantized is not None and torch.equal(taken.embedding, embedding.weight)
    sizes = weight_bytes(rounded.model.config, 2, "int4")
    assert sizes.on_gpu == device_bytes(rounded.model)


def test_quantized_forms_of_changed_matrices_are_dropped(plain: Path) -> None:
    """Merging an adapter changes a matrix: prefill and steps must both read its new values."""
    loaded = load_model(str(plain), "bfloat16", weights="int4")
    layers = loaded.model.model.layers
    up, down = layers[0].mlp.up_proj, layers[1].mlp.down_proj
    merged = torch.outer(torch.randn(len(up.weight)), torch.randn(up.in_features))
    up.weight.data += (0.1 * merged).bfloat16()
    wrap_model(loaded.model, loaded.tokenizer, "merged")
    linears = {name: module for name, module in layers.named_modules() if isinstance(module, torch.nn.Linear)}
    assert [name for name, linear in linears.items() if not hasattr(linear, "quantized")] == ["0.mlp.up_proj"]
    wrap_model(loaded.model.float(), loaded.tokenizer, "wider")
    assert not hasattr(down, "quantized")


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_second_copy_of_the_weights_in_another_layout_is_ignored(
    is_sharded: bool, in_gptq: Path, tmp_path: Path
) -> None:
    """Mistral publishes its weights in a second layout, consolidated.safetensors."""
    shutil.copytree(in_gptq, tmp_path, dirs_exist_ok=True)
    save_file({"layers.0.attention.wq.weight": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    if is_sharded:
        file = (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
        index = {"weight_map": dict.fromkeys(load_file(file), file.name)}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert load_model(tmp_path).fingerprint == load_model(in_gptq).fingerprint


@pytest.mark.parametrize(
    "of_groups",
    [{}, {"group_0": {"targets": ["Linear"], "weights": None, "input_activations": {"num_bits": 8, "type": "float"}}}],
)
def test_weights_are_plain_where_only_activations_or_kv_are_quantized(of_groups, plain: Path, tmp_path: Path) -> None:
    state = load_file(plain / "model.safetensors")
    config = {"quant_method": "compressed-tensors", "config_groups": of_groups, "kv_cache_scheme": {"num_bits": 8}}
    scales = {"model.layers.0.self_attn.k_scale": torch.ones(1)}
    change(plain, tmp_path / "of kv", state | scales, quantization_config=config)
    assert load_model(tmp_path / "of kv").fingerprint == load_model(plain).fingerprint


@pytest.mark.parametrize("left_out", ["re:.*self_attn.*", "model.layers.1.self_attn"])
def test_layers_that_a_config_ignores_are_counted_as_not_quantized(left_out: str, plain: Path, tmp_path, rng) -> None:
    quantize(plain, tmp_path / "quantized", "packed", rng)
    state = load_file(tmp_path / "quantized" / "model.safetensors")
    for name, tensor in load_file(plain / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if "_proj" in module and re.match(left_out.removeprefix("re:"), module):
            state = {other: x for other, x in state.items() if not other.startswith(f"{module}.")} | {name: tensor}
    config = FORMATS["packed"][1] | {"ignore": ["lm_head", left_out]}
    change(plain, tmp_path / "ignoring", state, quantization_config=config)
    require_bytes_of(tmp_path / "ignoring", load_model(tmp_path / "ignoring", "bfloat16"))


@pytest.mark.parametrize("group_size", [40, 60, 96])
def test_groups_that_do_not_divide_the_inputs_have_the_configs_length(group_size: int, tmp_path, rng) -> None:
    """The last of them is shorter: 64 inputs make two groups of 40, which must not be read as two of 32."""
    q, scales = rng.integers(-8, 8, (24, 64)), torch.from_numpy(rng.uniform(0.001, 0.1, (24, 2))).float()
    parts = {"weight_packed": pack(q + 8, 4), "weight_scale": scales, "weight_shape": torch.tensor(q.shape)}
    save_file({f"m.{name}": part for name, part in parts.items()}, tmp_path / "model.safetensors")
    config = compressed("pack-quantized", num_bits=4, group_size=group_size, symmetric=True)
    if group_size > 64:
        with pytest.raises(ModelError, match="m has 2 groups where 64 inputs need 1 of 96"):
            read_state(tmp_path, config, torch.float32)
        return
    weight = read_state(tmp_path, config, torch.float32)[0]["m.weight"]
    torch.testing.assert_close(weight, torch.from_numpy(q).float() * scales[:, torch.arange(64) // group_size])
