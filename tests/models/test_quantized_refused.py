"""Quantized checkpoints that are damaged, incomplete or in other formats are refused with the reason."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from csattn.errors import ConfigError, ModelError
from csattn.models import load_model
from csattn.models.quantized import read_state
from tests.models.quantized_files import GROUP, change, compressed, quantize


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
    "scales that are NaN": (lambda state: state[f"{MODULE}.scales"][1].fill_(torch.nan), "scales that are not finite"),
    "infinite scales": (lambda state: state[f"{MODULE}.scales"][1].fill_(torch.inf), "scales that are not finite"),
    "zero points of another shape": (
        lambda state: state.update({f"{MODULE}.qzeros": state[f"{MODULE}.qzeros"][:1].contiguous()}),
        "have zero points of shape",
    ),
    "weights of another type": (
        lambda state: state.update({f"{MODULE}.qweight": state[f"{MODULE}.qweight"].float()}),
        "numbers are packed into float32, which csattn cannot read",
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


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.uint8])
def test_one_byte_dtypes_that_are_not_read_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {"m.weight": torch.ones(8, 64).to(dtype), "m.weight_scale": torch.full((1, 1), 0.01)}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"m\.weight is in .*, a format that csattn does not read"):
        read_state(tmp_path, {"quant_method": "fp8"}, torch.float32)


@pytest.mark.parametrize(
    ("tensors", "config", "match"),
    [
        (
            {"m.experts.gate_up_proj": torch.ones(2, 8, 64).to(torch.float8_e4m3fn)},
            {"quant_method": "fbgemm_fp8"},
            r"m\.experts\.gate_up_proj is in float8_e4m3fn, a format .* with a matrix for each expert",
        ),
        (
            {"m.weight": torch.ones(8, 64).to(torch.float8_e4m3fn), "m.weight_scale": torch.ones(8, dtype=torch.int32)},
            {"quant_method": "fp8"},
            r"m\.weight_scale has scales in int32, which csattn cannot read",
        ),
        (
            {"m.weight": torch.ones(64, 64).to(torch.float8_e4m3fn), "m.weight_scale": torch.ones(2, 1)},
            {"quant_method": "fp8", "weight_block_size": [32, 32]},
            r"have scales of shape \(2, 1\) where \(2, 2\) were expected",
        ),
        (
            {"m.qweight": torch.ones(16, 64, dtype=torch.int16), "m.scales": torch.ones(1, 64)},
            {"quant_method": "gptq", "bits": 4},
            "numbers are packed into int16, which csattn cannot read",
        ),
    ],
)
def test_layouts_that_are_not_read_are_refused(tensors, config, match: str, tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=match):
        read_state(tmp_path, config, torch.float32)


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
        ({"quant_method": "gptq", "bits": 0}, "0 bits, which do not fill a word evenly"),
        ({"quant_method": "gptq", "bits": None}, "quantization_config has bits None, wanted a whole number; use its"),
        ({"quant_method": "gptq", "group_size": "x"}, "quantization_config has group_size 'x', wanted a whole number"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ weights are laid out as 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "format": "gemv"}, "AWQ weights are laid out as 'gemv'"),
        (
            {"quant_method": "gptq", "checkpoint_format": "marlin"},
            "laid out as 'marlin', .* of version gptq or gptq_v2",
        ),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*up_proj": {"bits": 8}, "-:.*o": {}}}, "in several"),
        ({"quant_method": "gptq", "bits": 16}, "16 bits, which do not fill a word evenly"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "has blocks of 128, wanted two whole numbers; use its"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"has blocks of \[0, 128\], wanted two positive"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"W4A16": ["Linear"]}},
            "has config_groups {'W4A16': .*, wanted an object for each group; use its published config",
        ),
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
