"""What a model's weights take, decoded and as a GPU keeps them."""

from typing import Any

import torch

from csattn.models.few_bits import experts_of_layers, linears_of_layers
from csattn.models.quantized import Quantization
from csattn.models.quantized_weight import QuantizedWeight, WeightFormat, rounding_named
from csattn.models.text_part import named_as_text


def weight_bytes(config: Any, item_bytes: int, weights: str | None = None) -> tuple[int, int]:
    """Of the model that a config describes, which is not made: decoded, and as a GPU keeps it.

    weights: as `load_model` takes it. Raises ModelError for a quantization that is not read.
    """
    model = _without_memory(config)
    kept: tuple[WeightFormat, int] | None = None
    of_experts: tuple[WeightFormat, int] | None = None
    skipped: list[str] = []
    if (published := getattr(config, "quantization_config", None)) is not None:
        quantization, left_out = Quantization.read(published), published.get("modules_to_not_convert") or []
        skipped = [named_as_text(name) for name in left_out]
        kept, of_experts = quantization.kept, quantization.kept_experts
    elif weights is not None:
        kept = of_experts = (rounding := rounding_named(weights)), QuantizedWeight.group_size_of(rounding)
    matrices = [(name, kept, tuple(linear.weight.shape)) for name, linear in linears_of_layers(model)]
    for name, _, of in experts_of_layers(model):
        matrices += [
            (name, of_experts, (of.num_experts * 2 * of.intermediate_size, config.hidden_size)),
            (name, of_experts, (of.num_experts * config.hidden_size, of.intermediate_size)),
        ]
    decoded = size = sum(parameter.numel() for parameter in model.parameters()) * item_bytes
    for name, how, (num_out, num_in) in matrices:
        if how is not None and not any(part in name for part in skipped):
            size += QuantizedWeight.size(*how, num_out, num_in) - num_out * num_in * item_bytes
    return decoded, size


def conversion_bytes(config: Any, item_bytes: int) -> int:
    """Host memory while a GGUF file becomes the model that a config describes: some tensors are float32 at a time."""
    sizes: list[int] = [parameter.numel() for parameter in _without_memory(config).parameters()]
    return sum(sizes) * item_bytes + 3 * max(sizes) * torch.float32.itemsize


def _without_memory(config: Any) -> Any:
    """A model of shapes alone."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def device_bytes(model: Any) -> int:
    """Of a loaded model's weights, as a GPU keeps them."""
    kept = [module for module in model.modules() if hasattr(module, "quantized")]
    plain = (
        module.weight.nbytes if hasattr(module, "weight") else module.gate_up_proj.nbytes + module.down_proj.nbytes
        for module in kept
    )
    saved = sum(plain) - sum(module.quantized.nbytes for module in kept)
    return int(sum(parameter.nbytes for parameter in model.parameters()) - saved)
