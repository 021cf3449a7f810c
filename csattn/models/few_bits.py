"""Weights in few bits beside the decoded ones: which of a model's are kept so, and rounding to them."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from csattn.cpu.heap import trim_heap
from csattn.models.families import FAMILIES, describe
from csattn.models.quantized_weight import QuantizedExperts, QuantizedWeight, Rounding, joined
from csattn.models.spec import ExpertsSpec

# where checkpoints have a matrix for each expert: layer, expert, matrix
_OF_EXPERT = re.compile(r"^model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight$")
_GATES, _UPS, _DOWNS = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
_SAMPLED_ROWS = 8


def linears_of_layers(model: Any) -> list[tuple[str, torch.nn.Linear]]:
    """Of layers, those that may be kept in few bits: not what chooses experts, nor what loses its mean there, nor what
    steps multiply latents with, in parts."""
    centred = ("o_proj", "down_proj") if describe(model.config).centred else ()
    others = ("gate", "router", "router.proj", "kv_b_proj", *centred)
    return [
        (name, module)
        for name, module in model.model.layers.named_modules(prefix="model.layers")
        if isinstance(module, torch.nn.Linear) and not name.endswith(others)
    ]


def experts_of_layers(model: Any) -> list[tuple[str, Any, ExpertsSpec]]:
    """Of layers, the modules that have all experts' matrices, which may be kept in few bits."""
    spec, family = describe(model.config), FAMILIES[model.config.model_type]
    block = "experts" if family.experts_beside else f"{family.mlp}.experts"
    return [
        (f"model.layers.{i}.{block}", layer.get_submodule(block), of.experts[0])
        for i, (layer, of) in enumerate(zip(model.model.layers, spec.layers, strict=True))
        if of.experts
    ]


def keep(model: Any, quantized: dict[str, QuantizedWeight]) -> None:
    """Have products read matrices in these few bits, where the others are bfloat16: modules get a `quantized`."""
    if model.dtype != torch.bfloat16:
        return
    for name, module in [*linears_of_layers(model), ("lm_head", model.lm_head)]:
        if f"{name}.weight" in quantized:
            module.quantized = quantized[f"{name}.weight"]
    of_experts = [(found.groups(), name) for name in quantized if (found := _OF_EXPERT.search(name))]
    parts = {key: quantized.pop(name) for key, name in of_experts}
    for name, module, spec in experts_of_layers(model):
        kept = _experts_in_one(name, spec, quantized) or _experts_by_one(name.split(".")[2], spec, parts)
        if kept is not None:
            module.quantized = kept


def forget_changed(model: Any) -> None:
    """Have products read matrices where they are not what their few bits decode to, by some of their rows.

    Adapters that were merged, edits and another dtype change them.
    """
    for module in model.modules():
        kept = getattr(module, "quantized", None)
        if isinstance(kept, QuantizedWeight) and not _is_decoded(module.weight.data[None], kept, model.dtype):
            del module.quantized
    inputs_first = FAMILIES[model.config.model_type].inputs_first
    for _, module, spec in experts_of_layers(model):
        if not hasattr(module, "quantized"):
            continue
        kept, gates_ups, downs = module.quantized, module.gate_up_proj.data, module.down_proj.data
        if inputs_first:
            gates_ups, downs = gates_ups.mT, downs.mT
        places = _gates_then_ups(spec) if spec.activation == "clamped" else None
        if not _is_decoded(gates_ups, kept.gate_up, model.dtype, places) or not _is_decoded(
            downs, kept.down, model.dtype
        ):
            del module.quantized


def drop_few_bits(model: Any) -> None:
    """Of a model that only prefills, which multiplies with decoded weights: its few bits take memory for nothing."""
    for module in model.modules():
        if hasattr(module, "quantized"):
            del module.quantized
    trim_heap()


def _is_decoded(
    weight: Tensor,  # [num_matrices, num_out, num_in], which are kept one below the other
    kept: QuantizedWeight,
    dtype: torch.dtype,  # of the model, in which some matrices are float32
    places: Tensor | None = None,  # [num_matrices * num_out]: which row of the weight each that is kept is, if not its
) -> bool:
    num_matrices, num_out, _ = weight.shape
    rows = torch.arange(0, len(kept), max(1, len(kept) // max(_SAMPLED_ROWS, 2 * num_matrices)))
    at = rows if places is None else places[rows]
    there = weight[at // num_out, at % num_out]
    return dtype == torch.bfloat16 and torch.equal(there.to("cpu", dtype), kept.outputs(rows).decoded(dtype))


def _experts_in_one(name: str, spec: ExpertsSpec, quantized: dict[str, QuantizedWeight]) -> QuantizedExperts | None:
    """Of a checkpoint that has all experts in one tensor."""
    if not {(gate_up := f"{name}.gate_up_proj"), (down := f"{name}.down_proj")} <= quantized.keys():
        return None
    gates_ups = quantized.pop(gate_up)
    if spec.activation == "clamped":  # they alternate
        gates_ups = gates_ups.outputs(_gates_then_ups(spec))
    return QuantizedExperts(gates_ups, quantized.pop(down))


def _experts_by_one(
    layer: str, spec: ExpertsSpec, parts: dict[tuple[str, ...], QuantizedWeight]
) -> QuantizedExperts | None:
    """Of one that has a matrix for each. parts: by layer, expert, and name of the matrix."""

    def some(*kinds: tuple[str, ...]) -> list[QuantizedWeight]:
        keys = ((layer, str(expert), name) for expert in range(spec.num_experts) for x in kinds for name in x)
        return [parts.pop(key) for key in keys if key in parts]

    gates_ups, downs = some(_GATES, _UPS), some(_DOWNS)
    if (len(gates_ups), len(downs)) != (2 * spec.num_experts, spec.num_experts):
        return None
    return QuantizedExperts.of(gates_ups, downs)


def _gates_then_ups(spec: ExpertsSpec) -> Tensor:
    """Of the rows of all experts' gates and ups in turn, each expert's gates, then its ups."""
    rows = torch.arange(2 * spec.intermediate_size)
    in_order = torch.cat([rows[::2], rows[1::2]])
    return (torch.arange(spec.num_experts)[:, None] * len(rows) + in_order).flatten()


def round_weights(model: Any, rounding: Rounding, beside: Callable[[Tensor], Tensor] | None = None) -> None:
    """Round the weights of its layers' linear modules and experts to few bits.

    beside: where they have their decoded weights; None: in memory.
    """
    beside = beside or (lambda decoded: decoded)
    quantized = {}
    for name, module in linears_of_layers(model):
        weight = QuantizedWeight.rounded(module.weight.data, rounding)
        module.weight.data = beside(weight.decoded(module.weight.dtype))
        quantized[f"{name}.weight"] = weight
    inputs_first = FAMILIES[model.config.model_type].inputs_first
    for name, module, _ in experts_of_layers(model):
        for part in ("gate_up_proj", "down_proj"):
            parameter = getattr(module, part)
            matrices = parameter.data.mT if inputs_first else parameter.data
            whole = joined([QuantizedWeight.rounded(matrix, rounding) for matrix in matrices])
            assert whole is not None, "they are of a kind"
            decoded = whole.decoded(matrices.dtype).view(matrices.shape)
            parameter.data = beside(decoded.mT if inputs_first else decoded)
            quantized[f"{name}.{part}"] = whole
    keep(model, quantized)
