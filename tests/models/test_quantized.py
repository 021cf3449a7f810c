"""Checkpoints published in 8 and 4 bits, written here number by number, are decoded as their formats define."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from csattn.errors import ConfigError, ModelError
from csattn.models import load_model
from csattn.models.loader import read_config, wrap_model
from csattn.models.quantized import read_state
from csattn.models.weight_sizes import device_bytes, weight_bytes
from tests.tiny import save

GROUP = 32
NUM_LAYERS = 2
# The tensors written in place of a matrix [num_out, num_in], and the matrix that they decode to.
Written = tuple[dict[str, Tensor], Tensor]


def pack(numbers: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unsigned numbers [rows, n] in int32 words [rows, n * bits / 32], the lowest bits first."""
    each = 32 // bits
    order = order or tuple(range(each))
    rows, n = numbers.shape
    words = np.zeros((rows, -(-n // each)), np.uint32)
    for row in range(rows):
        for word in range(words.shape[1]):
            for place in range(each):
                i = word * each + order[place]
                if i < n:
                    words[row, word] |= np.uint32(numbers[row, i]) << np.uint32(place * bits)
    return torch.from_numpy(words.view(np.int32))


def gptq(
    shape: tuple[int, int], rng: np.random.Generator, bits: int = 4, v2: bool = False, in_order: bool = False
) -> Written:
    num_out, num_in = shape
    groups = num_in // GROUP
    # as with desc_act; matrices with the same input have the same order
    group_of = np.arange(num_in) // GROUP if in_order else np.random.default_rng(7).permutation(num_in) % groups
    q = rng.integers(0, 1 << bits, (num_in, num_out))
    zeros = rng.integers(0, 1 << bits, (groups, num_out))
    scales = torch.from_numpy(rng.uniform(0.001, 0.1, (groups, num_out))).half()
    weight, steps = np.empty(shape, np.float32), scales.float().numpy()
    for i in range(num_in):
        for o in range(num_out):
            weight[o, i] = (q[i, o] - zeros[group_of[i], o]) * float(steps[group_of[i], o])
    return {
        "qweight": pack(q.T, bits).T.contiguous(),
        "qzeros": pack((zeros - (not v2)) & ((1 << bits) - 1), bits),
        "scales": scales,
        "g_idx": torch.from_numpy(group_of.astype(np.int32)),
    }, torch.from_numpy(weight)


def awq(shape: tuple[int, int], rng: np.random.Generator) -> Written:
    num_out, num_in = shape
    q = rng.integers(0, 16, (num_in, num_out))
    zeros = rng.integers(0, 16, (num_in // GROUP, num_out))
    scales = torch.from_numpy(rng.uniform(0.001, 0.1, (num_in // GROUP, num_out))).half()
    weight, steps = np.empty(shape, np.float32), scales.float().numpy()
    for i in range(num_in):
        for o in range(num_out):
            weight[o, i] = (q[i, o] - zeros[i // GROUP, o]) * float(steps[i // GROUP, o])
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {"qweight": pack(q, 4, order), "qzeros": pack(zeros, 4, order), "scales": scales}, torch.from_numpy(weight)


def packed(shape: tuple[int, int], rng: np.random.Generator, symmetric: bool) -> Written:
    num_out, num_in = shape
    q = rng.integers(-8, 8, shape)
    zeros = np.zeros((num_out, num_in // GROUP), int) if symmetric else rng.integers(-8, 8, (num_out, num_in // GROUP))
    scales = torch.from_numpy(rng.uniform(0.001, 0.1, zeros.shape)).bfloat16()
    weight, steps = np.empty(shape, np.float32), scales.float().numpy()
    for o in range(num_out):
        for i in range(num_in):
            weight[o, i] = (q[o, i] - zeros[o, i // GROUP]) * float(steps[o, i // GROUP])
    parts = {"weight_packed": pack(q + 8, 4), "weight_scale": scales, "weight_shape": torch.tensor(shape)}
    if not symmetric:
        parts["weight_zero_point"] = pack((zeros + 8).T, 4).T.contiguous()
    return parts, torch.from_numpy(weight)


def eight_bits(shape: tuple[int, int], rng: np.random.Generator, of_scales: str) -> Written:
    num_out, num_in = shape
    block = 40, 64 if of_scales == "block" else 24  # do not divide all sizes
    size = {"output": (num_out, 1), "matrix": (1,)}.get(of_scales, (-(-num_out // 40), -(-num_in // block[1])))
    q = torch.from_numpy(rng.normal(size=shape)).to(torch.float8_e4m3fn)
    scales = torch.from_numpy(rng.uniform(0.01, 0.1, size)).float()
    weight, numbers, steps = np.empty(shape, np.float32), q.float().numpy(), scales.numpy()
    for o in range(num_out):
        for i in range(num_in):
            at = {"output": (o, 0), "matrix": (0,)}.get(of_scales, (o // block[0], i // block[1]))
            weight[o, i] = float(numbers[o, i]) * float(steps[at])
    name = "weight_scale_inv" if "block" in of_scales else "weight_scale"
    return {"weight": q, name: scales}, torch.from_numpy(weight)


def with_zeros(shape: tuple[int, int], rng: np.random.Generator) -> Written:
    q, zeros = rng.integers(-128, 128, shape, np.int8), rng.integers(-128, 128, (shape[0], 1), np.int8)
    scales = rng.uniform(0.001, 0.01, (shape[0], 1)).astype(np.float32)
    weight = (q.astype(np.float32) - zeros.astype(np.float32)) * scales
    parts = {"weight": q, "weight_scale": scales, "weight_zero_point": zeros}
    return {name: torch.from_numpy(part) for name, part in parts.items()}, torch.from_numpy(weight)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}}}


FORMATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "fp8 by block": (
        lambda *of: eight_bits(*of, "block"),
        {"quant_method": "fp8", "weight_block_size": [40, 64], "activation_scheme": "dynamic"},
    ),
    "fp8 by small block": (
        lambda *of: eight_bits(*of, "small block"),
        {"quant_method": "fp8", "weight_block_size": [40, 24], "activation_scheme": "dynamic"},
    ),
    "fp8 by output": (lambda *of: eight_bits(*of, "output"), {"quant_method": "fbgemm_fp8"}),
    "fp8 by matrix": (
        lambda *of: eight_bits(*of, "matrix"),
        compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
    ),
    "fp8 by matrix, as Mistral publishes": (
        lambda *of: eight_bits(*of, "matrix"),
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
    ),
    "fp8 by block, in compressed-tensors": (
        lambda *of: eight_bits(*of, "block"),
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[40, 64]),
    ),
    "fp8 by block, in older compressed-tensors": (
        lambda *of: eight_bits(*of, "block"),
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure="40x64"),
    ),
    "int8 with zero points": (
        with_zeros,
        compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=False),
    ),
    "packed": (
        lambda *of: packed(*of, symmetric=True),
        compressed("pack-quantized", num_bits=4, group_size=GROUP, symmetric=True),
    ),
    "packed with zero points": (
        lambda *of: packed(*of, symmetric=False),
        compressed("pack-quantized", num_bits=4, group_size=GROUP, symmetric=False),
    ),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}),
    "gptq of 8 bits": (lambda *of: gptq(*of, bits=8), {"quant_method": "gptq", "bits": 8, "group_size": GROUP}),
    "gptq v2": (
        lambda *of: gptq(*of, v2=True),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
    ),
    "gptq in order": (
        lambda *of: gptq(*of, in_order=True),
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP},
    ),
    "awq, no size of groups told": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
}


# formats that a GPU does not keep: decoded once, when loaded
NOT_KEPT = ("fp8 by small block", "gptq of 8 bits", "int8 with zero points")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("plain"), num_hidden_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def in_gptq(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("gptq")
    quantize(plain, to, "gptq", np.random.default_rng(1))
    return to


def quantize(plain: Path, to: Path, form: str, rng: np.random.Generator) -> dict[str, Tensor]:
    """Write a copy with the layers' matrices in a format. Returns what they decode to, by name."""
    write, config = FORMATS[form]
    state, meant = load_file(plain / "model.safetensors"), {}
    for name in [name for name in state if "_proj." in name or ".experts." in name]:
        parts, meant[name] = write(tuple(state.pop(name).shape), rng)
        module = name.removesuffix(".weight")
        state |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
        for part in ("input_scale", "activation_scale"):  # for activations: ignored
            state[f"{module}.{part}"] = torch.ones(1)
        for part in ("k_scale", "k_zero_point"):  # for KV: ignored
            state[f"{module.rpartition('.')[0]}.{part}"] = torch.ones(1)
    change(plain, to, state, quantization_config=config)
    return meant


def change(plain: Path, to: Path, state: dict[str, Tensor], **of_config: Any) -> None:
    to.mkdir(exist_ok=True)
    for file in plain.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((plain / "config.json").read_text()) | of_config
    (to / "config.json").write_text(json.dumps(config))
    save_file(state, to / "model.safetensors", metadata={"format": "pt"})


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


def in_mxfp4(plain: Path, to: Path, rng: np.random.Generator) -> None:
    """Write a copy whose experts are random MXFP4 blocks."""
    state = load_file(plain / "model.safetensors")
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        num, num_in, num_out = state.pop(name).shape
        size = num, num_out, num_in // 32
        state[f"{name}_blocks"] = torch.from_numpy(rng.integers(0, 256, (*size, 16), dtype=np.uint8))
        state[f"{name}_scales"] = torch.from_numpy(rng.integers(118, 126, size, dtype=np.uint8))
    change(plain, to, state, quantization_config={"quant_method": "mxfp4"})


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


def test_mxfp4_experts_decode_to_the_values_of_their_nibbles_and_scales(tmp_path: Path, rng) -> None:
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    blocks = rng.integers(0, 256, (2, 5, 3, 16), dtype=np.uint8)  # experts, outputs, groups of 32 inputs
    scales = rng.integers(120, 134, (2, 5, 3), dtype=np.uint8)
    meant = np.empty((2, 96, 5), np.float32)
    for expert, out, group, pair in np.ndindex(blocks.shape):
        for half in range(2):
            number = blocks[expert, out, group, pair] >> 4 * half & 15
            value = values[number & 7] * (-1 if number & 8 else 1) * 2.0 ** (int(scales[expert, out, group]) - 127)
            meant[expert, 32 * group + 2 * pair + half, out] = value
    tensors = {"mlp.experts.up_blocks": torch.from_numpy(blocks), "mlp.experts.up_scales": torch.from_numpy(scales)}
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
    assert len(names) == 7 * NUM_LAYERS and not any("head" in name for name in names)
    for name in names:
        assert torch.equal(after[name].weight, after[name].quantized.decoded(torch.bfloat16))
        assert 0 < (after[name].weight - before[name].weight).norm() < most * before[name].weight.norm()
    again = load_model(str(plain), "bfloat16", weights=rounding)
    assert exact.fingerprint != rounded.fingerprint == again.fingerprint
    saved = sum(before[name].weight.nbytes - after[name].quantized.nbytes for name in names)
    assert device_bytes(exact.model) == sum(parameter.nbytes for parameter in exact.model.parameters())
    assert device_bytes(rounded.model) == device_bytes(exact.model) - saved


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


def test_rounding_that_is_unknown_or_not_possible_is_refused_with_the_reason(plain: Path, tmp_path: Path, rng) -> None:
    with pytest.raises(ConfigError, match="rounded to fp8 or int4, not to 'int3'"):
        load_model(str(plain), weights="int3")
    quantize(plain, tmp_path / "quantized", "awq", rng)
    with pytest.raises(ModelError, match="already published in 8 or 4 bits; load it without rounding them to int4"):
        load_model(str(tmp_path / "quantized"), weights="int4")


MODULE = "model.layers.1.mlp.up_proj"
DAMAGED = {
    "no scales": (lambda state: state.pop(f"{MODULE}.scales"), f"has no {MODULE}.scales"),
    "scales of another shape": (
        lambda state: state.update({f"{MODULE}.scales": state[f"{MODULE}.scales"][:, :50].contiguous()}),
        "have scales of shape",
    ),
    "scales that are NaN": (lambda state: state[f"{MODULE}.scales"][1].fill_(torch.nan), "scales that are NaN"),
    "zero points of another shape": (
        lambda state: state.update({f"{MODULE}.qzeros": state[f"{MODULE}.qzeros"][:1].contiguous()}),
        "have zero points of shape",
    ),
    "weights of another type": (
        lambda state: state.update({f"{MODULE}.qweight": state[f"{MODULE}.qweight"].float()}),
        "cannot be decoded",
    ),
    "a group that is not there": (
        lambda state: state[f"{MODULE}.g_idx"].fill_(99),
        "does not name one of 2 groups for each of 64 inputs",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_quantized_checkpoint_is_refused_with_the_reason(damage: str, in_gptq: Path, tmp_path: Path) -> None:
    state = load_file(in_gptq / "model.safetensors")
    do, match = DAMAGED[damage]
    do(state)
    change(in_gptq, tmp_path / "quantized", state)
    with pytest.raises(ModelError, match=match):
        load_model(str(tmp_path / "quantized"))


@pytest.mark.parametrize("form", ["gptq", "packed", "fp8 by block"])
def test_quantized_weights_without_a_quantization_config_are_refused(
    form: str, plain: Path, tmp_path: Path, rng
) -> None:
    """Old checkpoints in GPTQ have it in a file of its own."""
    quantize(plain, tmp_path, form, rng)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "quantize_config.json").write_text(json.dumps(config.pop("quantization_config")))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"has model\.layers\.0.*, of quantized weights, and its config.json has no"):
        load_model(tmp_path)


def test_an_unexpected_bias_is_accepted_only_if_it_is_zero(in_gptq: Path, tmp_path: Path) -> None:
    """AutoGPTQ writes biases of zeros."""
    shutil.copytree(in_gptq, tmp_path, dirs_exist_ok=True)
    for bias in (torch.zeros(96), torch.ones(96)):
        state = load_file(in_gptq / "model.safetensors") | {f"{MODULE}.bias": bias}
        save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
        with (
            nullcontext()
            if not bias.any()
            else pytest.raises(ModelError, match=f"has {MODULE}.bias, which a model with its config does not have")
        ):
            load_model(tmp_path)


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


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.uint8])
def test_one_byte_dtypes_that_are_not_read_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {"m.weight": torch.ones(8, 64).to(dtype), "m.weight_scale": torch.full((1, 1), 0.01)}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"m\.weight is in .*, a format that csattn does not read"):
        read_state(tmp_path, {"quant_method": "fp8"}, torch.float32)


def test_scales_of_another_block_size_are_refused(plain: Path, tmp_path: Path, rng) -> None:
    quantize(plain, tmp_path / "quantized", "fp8 by small block", rng)
    config = tmp_path / "quantized" / "config.json"
    config.write_text(config.read_text().replace("24", "32"))
    with pytest.raises(ModelError, match="have scales of shape"):
        load_model(str(tmp_path / "quantized"))


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"quant_method": "aqlm"}, "'aqlm', which csattn cannot read; use a checkpoint in fp8"),
        ({"bits": 4, "group_size": GROUP}, "has no quant_method, .*; add it, one of fp8"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits, which do not fill a word evenly"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "laid out as 'gemv'"),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R3": {}}}},
            r"its weights are rotated \(transform_config\)",
        ),
        (
            compressed("nvfp4-pack-quantized", num_bits=4, type="float", group_size=16),
            r"floats of 4 bits \(nvfp4-pack-quantized\), which csattn cannot read",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {"num_bits": 8}}},
            },
            "in several ways",
        ),
    ],
)
def test_quantization_formats_that_are_not_read_are_refused_with_the_reason(
    config, match, plain: Path, tmp_path: Path
) -> None:
    change(plain, tmp_path / "other", load_file(plain / "model.safetensors"), quantization_config=config)
    with pytest.raises(ModelError, match=match):
        load_model(str(tmp_path / "other"))


@pytest.mark.parametrize("names", [("quantization",), ("quantization", "quantization_config")])
def test_weights_that_mlx_quantized_are_refused_by_its_name(
    names: tuple[str, ...], plain: Path, tmp_path: Path
) -> None:
    told = {name: {"group_size": 64, "bits": 4} for name in names}
    change(plain, tmp_path / "other", load_file(plain / "model.safetensors"), **told)
    with pytest.raises(ModelError, match="weights are quantized by 'mlx', which csattn cannot read; use a checkpoint"):
        load_model(tmp_path / "other")


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda state: state.pop(f"{MODULE}.weight"), f"lacks {MODULE}.weight, which its config requires"),
        (
            lambda state: state.update({"model.more": torch.ones(2)}),
            "has model.more, which a model with its config does not have",
        ),
        (
            lambda state: state.update({f"{MODULE}.weight": torch.ones(95, 64)}),
            r"up_proj.weight has shape \(95, 64\) where its config wants \(96, 64\)",
        ),
    ],
)
def test_missing_unexpected_or_misshapen_weights_are_refused_with_the_reason(
    damage, match: str, plain: Path, tmp_path: Path, capfd
) -> None:
    """Without the error the model would have randomly initialised weights."""
    state = load_file(plain / "model.safetensors")
    damage(state)
    change(plain, tmp_path / "damaged", state)
    with pytest.raises(ModelError, match=match):
        load_model(str(tmp_path / "damaged"))
    assert capfd.readouterr().err == ""


def test_a_truncated_weights_file_is_refused(plain: Path, tmp_path: Path) -> None:
    change(plain, tmp_path / "cut", load_file(plain / "model.safetensors"))
    whole = (tmp_path / "cut" / "model.safetensors").read_bytes()
    (tmp_path / "cut" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="could not be loaded"):
        load_model(str(tmp_path / "cut"))
