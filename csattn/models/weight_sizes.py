"""What a model's weights take, decoded and as a GPU keeps them."""

from copy import deepcopy
from typing import Any, NamedTuple

import torch

from csattn.models import deepseek_files
from csattn.models.aside import has_room_aside
from csattn.models.few_bits import experts_of_layers, linears_of_layers
from csattn.models.quantized import Quantization
from csattn.models.quantized_weight import QuantizedWeight, WeightFormat, rounding_named
from csattn.models.text_part import named_as_text


class WeightBytes(NamedTuple):
    """Bytes of a model's weights. Linear layers and experts may have few bits beside their decoded weights."""

    decoded: int  # all of them
    few_bits: int
    linears: int  # decoded, of linear layers that have few bits
    experts: int  # likewise of experts

    @property
    def others(self) -> int:
        """Without few bits."""
        return self.decoded - self.linears - self.experts

    @property
    def aside(self) -> int:
        """In bfloat16, on a host: of what is decoded beside few bits, if the disk has room."""
        most = self.linears + 2 * self.experts  # while they are loaded: experts lie there in parts, and joined
        return (self.linears + self.experts) * has_room_aside(most)

    @property
    def on_gpu(self) -> int:
        """It keeps few bits alone."""
        return self.others + self.few_bits

    @property
    def on_host(self) -> int:
        """In bfloat16, beside what is put aside."""
        return self.decoded + self.few_bits - self.aside


def weight_bytes(config: Any, item_bytes: int, weights: str | None = None) -> WeightBytes:
    """Of the model that a config describes, which is not made.

    item_bytes: of a weight, 4 or 2; some families have a few in float32. weights: as `load_model` takes it. Raises
    ModelError for a quantization that is not read.
    """
    model = _without_memory(config, torch.float32 if item_bytes == 4 else torch.bfloat16)
    kept: tuple[WeightFormat, int] | None = None
    of_experts: tuple[WeightFormat, int] | None = None
    skipped: list[str] = []
    if (published := getattr(config, "quantization_config", None)) is not None:
        quantization, left_out = Quantization.read(published), published.get("modules_to_not_convert") or []
        skipped = [named_as_text(name) for name in left_out]
        if config.model_type == "deepseek_v4":
            skipped += deepseek_files.PLAIN
        kept, of_experts = quantization.kept, quantization.kept_experts
    elif weights is not None:
        kept = of_experts = (rounding := rounding_named(weights)), QuantizedWeight.group_size_of(rounding)
    few_bits = linears = experts = 0
    for name, linear in linears_of_layers(model):
        if kept is not None and not any(part in name for part in skipped):
            few_bits += QuantizedWeight.size(*kept, *linear.weight.shape)
            linears += linear.weight.numel() * item_bytes
    for name, _, of in experts_of_layers(model):
        if of_experts is None or any(part in name for part in skipped):
            continue
        for num_out, num_in in (
            (2 * of.intermediate_size, config.hidden_size),
            (config.hidden_size, of.intermediate_size),
        ):
            few_bits += QuantizedWeight.size(*of_experts, of.num_experts * num_out, num_in)
            experts += of.num_experts * num_out * num_in * item_bytes
    # which transformers loads in float32; since 5.20 some are so from the start
    wide = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    decoded = sum(
        parameter.numel() * (torch.float32 if wide.intersection(name.split(".")) else parameter.dtype).itemsize
        for name, parameter in model.named_parameters()
    )
    return WeightBytes(decoded, few_bits, linears, experts)


def conversion_bytes(config: Any, item_bytes: int) -> int:
    """Host memory while a GGUF file becomes the model that a config describes: the largest tensor is float32 three
    times, in pieces that take more besides, and all are in memory where the disk has no room to put them aside."""
    sizes: list[int] = [parameter.numel() for parameter in _without_memory(config, torch.float32).parameters()]
    all_bytes = sum(sizes) * item_bytes
    return all_bytes * (not is_converted_aside(all_bytes)) + 7 * max(sizes) * torch.float32.itemsize // 2


def is_converted_aside(all_bytes: int) -> bool:
    """Whether a conversion puts so many weights aside: the disk has room for them, and once more for what is saved."""
    return has_room_aside(all_bytes * 11 // 10)


def _without_memory(config: Any, dtype: torch.dtype) -> Any:
    """A model of shapes and dtypes alone."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype)  # which it would write into it


def device_bytes(model: Any) -> int:
    """Of a loaded model's weights, as a GPU keeps them."""
    kept = [module for module in model.modules() if hasattr(module, "quantized")]
    plain = (
        module.weight.nbytes if hasattr(module, "weight") else module.gate_up_proj.nbytes + module.down_proj.nbytes
        for module in kept
    )
    saved = sum(plain) - sum(module.quantized.nbytes for module in kept)
    return int(sum(parameter.nbytes for parameter in model.parameters()) - saved)
