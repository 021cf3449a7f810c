"""How many bytes a model's weights take: decoded on the host, quantized on a GPU."""

import re
from copy import deepcopy
from typing import Any, NamedTuple

import torch

from csattn.models import deepseek_files
from csattn.models.mapped_files import has_disk_space
from csattn.models.quantization import Quantization
from csattn.models.quantized_model import HEAD_ROUNDING, before_activation, experts_of_layers, linears_of_layers
from csattn.models.quantized_weight import QuantizedWeight, WeightFormat, rounding_named
from csattn.models.text_part import class_of, named_as_text

# fields of a quantization_config with the modules that are not quantized
_LEFT_OUT = ("modules_to_not_convert", "ignored_layers", "ignore")


class WeightBytes(NamedTuple):
    """Bytes of a model's weights. Of quantized linear layers and experts, a host also keeps the decoded weights."""

    decoded: int  # all weights
    quantized: int  # quantized weights
    linears: int  # quantized linear layers, decoded
    experts: int  # quantized experts, decoded

    @property
    def others(self) -> int:
        """Weights that are not quantized."""
        return self.decoded - self.linears - self.experts

    @property
    def mapped(self) -> int:
        """Decoded weights that a host keeps in mapped files (in bfloat16), if the disk has room; else 0."""
        most = self.linears + 2 * self.experts  # during loading, experts are there twice: in parts, and joined
        return (self.linears + self.experts) * has_disk_space(most)

    @property
    def on_gpu(self) -> int:
        """A GPU keeps quantized weights without the decoded ones."""
        return self.others + self.quantized

    @property
    def on_host(self) -> int:
        """Host memory (in bfloat16), without the weights in mapped files."""
        return self.decoded + self.quantized - self.mapped


def weight_bytes(config: Any, item_bytes: int, weights: str | None = None) -> WeightBytes:
    """Return the sizes of the model that a config describes, without loading it.

    item_bytes: of a weight, 4 or 2; some families have a few in float32. weights: as in `load_model`.
    Raises ModelError for an unsupported quantization.
    """
    model = _meta_model(config, torch.float32 if item_bytes == 4 else torch.bfloat16)
    linear_format: tuple[WeightFormat, int] | None = None
    expert_format: tuple[WeightFormat, int] | None = None
    skipped: list[str] = []
    if (published := getattr(config, "quantization_config", None)) is not None:
        quantization = Quantization.read(published)
        skipped = [named_as_text(name) for field in _LEFT_OUT for name in published.get(field) or []]
        if config.model_type == "deepseek_v4":
            skipped += deepseek_files.PLAIN
        linear_format, expert_format = quantization.linear_format, quantization.expert_format
    elif weights is not None:
        linear_format = expert_format = (rounding := rounding_named(weights)), QuantizedWeight.group_size_of(rounding)
    quantized = linears = experts = 0
    for name, linear in linears_of_layers(model):
        if linear_format is not None and not _is_left_out(name, skipped):
            quantized += QuantizedWeight.size(*linear_format, *linear.weight.shape)
            linears += linear.weight.numel() * item_bytes
    if weights is not None and (of_head := HEAD_ROUNDING.get(rounding_named(weights))) is not None:
        head = model.lm_head.weight
        quantized += QuantizedWeight.size(of_head, QuantizedWeight.group_size_of(of_head), *head.shape)
        linears += 0 if _is_embedding(head, model) else head.numel() * item_bytes
    for name, _, of in experts_of_layers(model):
        if expert_format is None or _is_left_out(name, skipped):
            continue
        for num_out, num_in in (
            ((1 + of.gated) * of.intermediate_size, config.hidden_size),
            (config.hidden_size, of.intermediate_size),
        ):
            quantized += QuantizedWeight.size(*expert_format, of.num_experts * num_out, num_in)
            experts += of.num_experts * num_out * num_in * item_bytes
    # modules that transformers loads in float32; since 5.20 it also creates some in float32
    wide = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    decoded = sum(
        parameter.numel() * (torch.float32 if wide.intersection(name.split(".")) else parameter.dtype).itemsize
        for name, parameter in model.named_parameters()
    )
    return WeightBytes(decoded, quantized, linears, experts)


def _is_left_out(module: str, patterns: list[str]) -> bool:
    """Whether a config names the module as not quantized, by parts of its name or, after `re:`, a pattern."""
    return any(
        re.match(pattern[3:], module) if pattern.startswith("re:") else f".{pattern}." in f".{module}."
        for pattern in patterns
    )


def conversion_bytes(config: Any, item_bytes: int) -> int:
    """Return the host memory that the conversion of a GGUF file takes.

    The largest tensor is there three times in float32, with temporaries (3.5 times in all); all weights stay in memory
    if the disk has no room for mapped files.
    """
    sizes: list[int] = [parameter.numel() for parameter in _meta_model(config, torch.float32).parameters()]
    all_bytes = sum(sizes) * item_bytes
    return all_bytes * (not is_converted_on_disk(all_bytes)) + 7 * max(sizes) * torch.float32.itemsize // 2


def is_converted_on_disk(all_bytes: int) -> bool:
    """Whether a conversion keeps such weights in mapped files: the disk has room for them and for the saved copy."""
    return has_disk_space(all_bytes * 11 // 10)


def _meta_model(config: Any, dtype: torch.dtype) -> Any:
    """Make a model on the meta device: shapes and dtypes without memory."""
    with torch.device("meta"):
        return class_of(config)._from_config(deepcopy(config), dtype=dtype)  # it writes the dtype into the config


def _is_embedding(weight: Any, model: Any) -> bool:
    return weight is model.get_input_embeddings().weight


def device_bytes(model: Any) -> int:
    """Return the bytes of a loaded model's weights as a GPU keeps them: quantized ones without the decoded.

    A head that is also the embedding is kept in both forms.
    """
    modules = [module for module in model.modules() if hasattr(module, "quantized")]
    matrices = ([x.weight] if hasattr(x, "weight") else [before_activation(x), x.down_proj] for x in modules)
    decoded = (matrix for of in matrices for matrix in of if not _is_embedding(matrix, model))
    saved = sum(matrix.nbytes for matrix in decoded) - sum(module.quantized.nbytes for module in modules)
    return int(sum(parameter.nbytes for parameter in model.parameters()) - saved)
