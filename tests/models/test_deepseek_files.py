"""DeepSeek-V4's published checkpoints (FP8, experts in FP4 or FP8), written here number by number, are decoded."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from csattn.errors import ModelError
from csattn.models import load_model
from csattn.models.description import describe
from csattn.models.loader import read_config
from csattn.models.module_weights import weights_of
from csattn.models.quantized import read_state
from csattn.models.weight_sizes import device_bytes, weight_bytes
from tests.tiny import ALL_FAMILIES, byte_tokenizer, make_model, save, tiny_config

pytestmark = pytest.mark.skipif("deepseek_v4" not in ALL_FAMILIES, reason="these transformers do not have the family")

BLOCK, GROUP = 128, 32
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# with INPUTS, all input widths are multiples of BLOCK; with OUTPUTS, all output widths too
INPUTS = {"hidden_size": 256, "intermediate_size": 128, "q_lora_rank": 128, "o_lora_rank": 64, "n_routed_experts": 4}
OUTPUTS = INPUTS | {"index_n_heads": 16}
IN_FP8 = re.compile(r"\.attn\.w\w+\.|\.attn\.indexer\.wq_b\.|\.shared_experts\.")
QUANTIZED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "scale_fmt": "ue8m0",
}


def exponents(shape: tuple[int, ...], rng: np.random.Generator) -> tuple[Tensor, np.ndarray]:
    """Return scales of about 0.01 in float8_e8m0fnu, and their values in float32."""
    stored = rng.integers(118, 123, shape, dtype=np.uint8)
    return torch.from_numpy(stored).view(torch.float8_e8m0fnu), np.exp2(stored.astype(np.float32) - 127)


def in_fp8(shape: tuple[int, int], rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return a float8_e4m3fn matrix, its scales, and the float32 matrix that they decode to."""
    numbers = torch.from_numpy(rng.normal(size=shape)).to(torch.float8_e4m3fn)
    scales, steps = exponents((-(-shape[0] // BLOCK), -(-shape[1] // BLOCK)), rng)
    each = np.repeat(np.repeat(steps, BLOCK, 0), BLOCK, 1)[: shape[0], : shape[1]]
    return numbers, scales, torch.from_numpy(numbers.float().numpy() * each)


def in_fp4(shape: tuple[int, int], rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor]:
    num_out, num_in = shape
    codes = rng.integers(0, 16, shape)
    pairs = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8).view(np.int8)
    scales, steps = exponents((num_out, num_in // GROUP), rng)
    return torch.from_numpy(pairs), scales, torch.from_numpy(VALUES[codes] * np.repeat(steps, GROUP, 1))


def as_published(name: str) -> str:
    """DeepSeek's name of a tensor that `transformers` saved."""
    name = re.sub(r"\.attn\.norm\.", ".attn.kv_norm.", name.removeprefix("model."))
    return name.replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")


def publish(to: Path, rng: np.random.Generator, expert_dtype: str = "fp4", **sizes: Any) -> dict[str, Tensor]:
    """Write a checkpoint as DeepSeek publishes it. Returns what its tensors decode to, by DeepSeek's names."""
    save(to, "deepseek_v4", **sizes)
    state = {as_published(name): x for name, x in load_file(to / "model.safetensors").items()}
    meant = dict(state)
    for name in list(state):
        if is_expert := ".experts." in name:
            write = in_fp4 if expert_dtype == "fp4" else in_fp8
        if is_expert or IN_FP8.search(name):
            of = write if is_expert else in_fp8
            state[name], state[name.replace(".weight", ".scale")], meant[name] = of(tuple(state[name].shape), rng)
        elif state[name].ndim == 2 and not name.startswith(("hc_", "layers.0.hc_")) and "ape" not in name:
            meant[name] = state[name] = state[name].bfloat16() if state[name].is_floating_point() else state[name]
    state["mtp.0.ffn.experts.0.w1.weight"] = torch.ones(2, 16, dtype=torch.int8)  # needs no scales: it is not read
    write_files(to, state, quantization_config=QUANTIZED, expert_dtype=expert_dtype)
    return meant


def write_files(folder: Path, state: dict[str, Tensor], **of_config: Any) -> None:
    config = json.loads((folder / "config.json").read_text()) | of_config
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def require_meant(model: Any, meant: dict[str, Tensor], folder: Path) -> None:
    """Check a model's tensors as it saves them. (Another test checks that it saves what was loaded.)"""
    model.save_pretrained(folder)
    there = {as_published(name): x for name, x in load_file(folder / "model.safetensors").items()}
    assert there.keys() == meant.keys()
    for name, x in there.items():
        assert torch.equal(x, meant[name].to(x.dtype)), name


@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8"])
def test_published_files_decode_as_their_format_defines(expert_dtype: str, tmp_path: Path, rng) -> None:
    meant = publish(tmp_path / "published", rng, expert_dtype, **INPUTS)
    exact, half = (load_model(tmp_path / "published", dtype).model for dtype in ("float32", "bfloat16"))
    require_meant(exact, meant, tmp_path / "exact")
    require_meant(half, meant, tmp_path / "half")
    assert not any(hasattr(module, "quantized") for module in exact.modules())
    size = weight_bytes(read_config(str(tmp_path / "published")), 2)
    decoded = sum(parameter.nbytes for parameter in half.parameters())
    assert (size.decoded, size.on_gpu) == (decoded, device_bytes(half))


@pytest.mark.parametrize(("expert_dtype", "format"), [("fp4", "fp4"), ("fp8", "fp8")])
def test_published_weights_are_kept_quantized_for_decode_steps(
    expert_dtype: str, format: str, tmp_path: Path, rng
) -> None:
    meant = publish(tmp_path, rng, expert_dtype, **INPUTS)
    model = load_model(tmp_path, "bfloat16").model
    linears = [x for x in model.modules() if isinstance(x, torch.nn.Linear) and hasattr(x, "quantized")]
    assert len(linears) == sum(bool(IN_FP8.search(name)) for name in meant)
    assert all(torch.equal(x.quantized.decoded(torch.bfloat16), x.weight) for x in linears)
    for layer in model.model.layers:
        experts = layer.mlp.experts
        assert experts.quantized.gate_up.format == experts.quantized.down.format == format
        assert torch.equal(experts.quantized.gate_up.decoded(torch.bfloat16), experts.gate_up_proj.flatten(0, 1))
        assert torch.equal(experts.quantized.down.decoded(torch.bfloat16), experts.down_proj.flatten(0, 1))
    layer = weights_of(model).layers[1]
    assert layer.compressed is not None and layer.experts[0].quantized is not None
    kept = [layer.compressed.latents, *layer.compressed.queries, layer.compressed.inputs[0], layer.compressed.groups]
    assert all(x.quantized is not None for x in (*kept, layer.out, *layer.gate_up, layer.down))
    assert all(x.quantized is None for x in layer.compressed.inputs[1:])


@pytest.mark.parametrize("expert_dtype", ["fp4", "fp8"])
def test_published_files_decode_to_the_same_weights_as_in_transformers(expert_dtype: str, tmp_path: Path, rng) -> None:
    from transformers import AutoModelForCausalLM

    publish(tmp_path, rng, expert_dtype, **OUTPUTS)
    by_transformers = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, device_map="cpu"
    ).state_dict()
    ours = load_model(tmp_path, "bfloat16").model.state_dict()
    assert ours.keys() == by_transformers.keys()
    for name, x in ours.items():
        assert torch.equal(x, by_transformers[name].to(x.dtype)), name


def test_the_low_nibble_of_an_fp4_byte_is_the_first_value(tmp_path: Path, rng) -> None:
    pairs, stored = rng.integers(0, 256, (5, 48), dtype=np.uint8), rng.integers(0, 255, (5, 3), dtype=np.uint8)
    meant = np.empty((5, 96), np.float32)
    for out, pair in np.ndindex(pairs.shape):
        for half in range(2):
            number, power = pairs[out, pair] >> 4 * half & 15, int(stored[out, pair // 16]) - 127
            meant[out, 2 * pair + half] = VALUES[number] * 2.0**power
    parts = {"m.weight": torch.from_numpy(pairs.view(np.int8))}
    parts["m.scale"] = torch.from_numpy(stored).view(torch.float8_e8m0fnu)
    save_file(parts, tmp_path / "model.safetensors")
    state, _ = read_state(tmp_path, QUANTIZED | {"expert_dtype": "fp4"}, torch.float32)
    assert list(state) == ["m.weight"] and np.array_equal(state["m.weight"].numpy(), meant)


OF_EXPERT, OF_LINEAR = "layers.1.ffn.experts.2.w2", "layers.2.attn.wo_a"


def with_nan(scales: Tensor) -> None:
    scales.view(torch.uint8)[-1, -1] = 255


DAMAGED = {
    "no scales": (lambda state: state.pop(f"{OF_LINEAR}.scale"), f"has no scales of {OF_LINEAR}.weight"),
    "no scales of an expert": (lambda state: state.pop(f"{OF_EXPERT}.scale"), f"has no scales of {OF_EXPERT}.weight"),
    "scales that are NaN": (lambda state: with_nan(state[f"{OF_LINEAR}.scale"]), f"{OF_LINEAR}.scale has scales that"),
    "likewise an expert's": (lambda state: with_nan(state[f"{OF_EXPERT}.scale"]), f"{OF_EXPERT}.scale has scales that"),
    "scales of another shape": (
        lambda state: state.update({f"{OF_LINEAR}.scale": torch.ones(2, 1).to(torch.float8_e8m0fnu)}),
        r"scales of shape \(2, 1\) where \(1, 1\) were expected",
    ),
    "an expert's of another shape": (
        lambda state: state.update({f"{OF_EXPERT}.scale": state[f"{OF_EXPERT}.scale"][:, :3].contiguous()}),
        r"scales of shape \(256, 3\) where \(256, 4\) were expected",
    ),
    "scales alone": (
        lambda state: state.pop(f"{OF_EXPERT}.weight"),
        f"has the scales {OF_EXPERT}.scale but not their weights",
    ),
    "a layer's part alone": (
        lambda state: [state.pop(f"{OF_LINEAR}.{part}") for part in ("weight", "scale")],
        r"lacks model.layers.2.self_attn.o_a_proj.weight, which its config requires",
    ),
}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("published")
    publish(folder, np.random.default_rng(1), **INPUTS)
    return folder


def copied(published: Path, to: Path) -> dict[str, Tensor]:
    for file in published.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return load_file(published / "model.safetensors")


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_published_files_are_refused_with_the_reason(damage: str, published: Path, tmp_path: Path) -> None:
    state, (do, match) = copied(published, tmp_path), DAMAGED[damage]
    do(state)
    write_files(tmp_path, state)
    with pytest.raises(ModelError, match=match):
        load_model(tmp_path)


def test_an_unknown_expert_dtype_is_refused_with_its_name(published: Path, tmp_path: Path) -> None:
    write_files(tmp_path, copied(published, tmp_path), expert_dtype="nf4")
    with pytest.raises(ModelError, match=r"its experts are in 'nf4' \(expert_dtype\)"):
        load_model(tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_saved_by_transformers_is_loaded_and_saved_unchanged(dtype: str, tmp_path: Path) -> None:
    model = make_model("deepseek_v4")
    there = load_model(save(tmp_path / "first", "deepseek_v4"), dtype)
    there.model.save_pretrained(tmp_path / "again")
    byte_tokenizer().save_pretrained(tmp_path / "again")
    again = load_model(tmp_path / "again", dtype)
    assert again.fingerprint == there.fingerprint
    saved = again.model.state_dict()
    for name, x in model.state_dict().items():
        assert torch.equal(saved[name], x.to(saved[name].dtype)), name


def test_a_published_config_describes_the_same_model_as_transformers_config(published: Path, tmp_path: Path) -> None:
    """A published config also has ratios for the layers that predict further tokens."""
    write_files(tmp_path, copied(published, tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")["compress"]
    for name in ("layer_types", "mlp_layer_types", "partial_rotary_factor", "compress_rates"):
        del config[name]
    config |= {"compress_ratios": [0, 4, 128, 4, 0], "compress_rate_hca": 12, "num_hash_layers": 1}
    config |= {"qk_rope_head_dim": 16, "rope_theta": 10000, "compress_rope_theta": rope["rope_theta"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    there, wanted = (describe(read_config(str(folder))) for folder in (tmp_path, published))
    assert [x.compressed for x in there.layers] == [x.compressed for x in wanted.layers]
    assert [x.experts[0].by_token for x in there.layers] == [True, False, False, False]
    assert there.ropes == wanted.ropes


def test_float16_is_refused_because_some_weights_need_float32(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"float32 and the others in float16.*bfloat16 or float32"):
        load_model(save(tmp_path, "deepseek_v4"), dtype="float16")


@pytest.mark.parametrize("name", ["sliding_window", "index_topk"])
def test_a_zero_sliding_window_or_index_topk_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=rf"{name} 0, and csattn needs at least 1"):
        describe(tiny_config("deepseek_v4", **{name: 0}))
    describe(tiny_config("deepseek_v4", **{name: 1}))
