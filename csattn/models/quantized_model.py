"""Quantized weights (8 or 4 bits) beside the decoded ones: which of a model's weights have them, and rounding."""

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from csattn.cpu.heap import trim_heap
from csattn.models.description import describe
from csattn.models.families import FAMILIES
from csattn.models.quantized_weight import QuantizedExperts, QuantizedWeight, Rounding, joined
from csattn.models.spec import ExpertsSpec

# names in checkpoints with a matrix for each expert; the groups are layer, expert and matrix
_OF_EXPERT = re.compile(r"^model\.layers\.(\d+)\.\w+\.experts\.(\d+)\.(\w+)\.weight$")
_GATES, _UPS, _DOWNS = ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")
_SAMPLED_ROWS = 8
# By rounding of the layers: that of the output head. FP8 layers move predictions less than an FP8 head would.
HEAD_ROUNDING: dict[Rounding, Rounding] = {"int4": "fp8"}


def linears_of_layers(model: Any) -> list[tuple[str, torch.nn.Linear]]:
    """Return the linear modules of layers that may be quantized, by name.

    Not the experts' routers, nor `kv_b_proj`, which steps multiply latents with in parts, nor, in models with LayerNorm
    (`ModelSpec.centred`), projections into the stream, because steps subtract the mean of their outputs from them.
    """
    centred = ("o_proj", "down_proj") if describe(model.config).centred else ()
    others = ("gate", "router", "router.proj", "kv_b_proj", *centred)
    return [
        (name, module)
        for name, module in model.model.layers.named_modules(prefix="model.layers")
        if isinstance(module, torch.nn.Linear) and not name.endswith(others)
    ]


def experts_of_layers(model: Any) -> list[tuple[str, Any, ExpertsSpec]]:
    """Return the modules with the matrices of all experts of a layer, which may be quantized, by name.

    None in models with LayerNorm, because steps subtract the mean of their outputs from them.
    """
    spec, family = describe(model.config), FAMILIES[model.config.model_type]
    block = ".".join(filter(None, [family.mlp if family.experts_at is None else family.experts_at, "experts"]))
    return [
        (f"model.layers.{i}.{block}", layer.get_submodule(block), of.experts[0])
        for i, (layer, of) in enumerate(zip(model.model.layers, spec.layers, strict=True))
        if of.experts and not spec.centred
    ]


def before_activation(experts: Any) -> torch.nn.Parameter:
    """Return the matrices of gates and ups in a module of experts; without gates, those of ups."""
    return experts.gate_up_proj if hasattr(experts, "gate_up_proj") else experts.up_proj  # type: ignore[no-any-return]


def attach_quantized(model: Any, quantized: dict[str, QuantizedWeight]) -> None:
    """Set the attribute `quantized` of modules, so that products read these matrices; only in models in bfloat16.

    Matrices of experts are removed from the dict.
    """
    if model.dtype != torch.bfloat16:
        return
    for name, module in [*linears_of_layers(model), ("lm_head", model.lm_head)]:
        if f"{name}.weight" in quantized:
            module.quantized = quantized[f"{name}.weight"]
    of_experts = [(found.groups(), name) for name in quantized if (found := _OF_EXPERT.search(name))]
    parts = {key: quantized.pop(name) for key, name in of_experts}
    for name, module, spec in experts_of_layers(model):
        experts = _experts_in_one(name, spec, quantized) or _experts_by_one(name.split(".")[2], spec, parts)
        if experts is not None:
            module.quantized = experts


def drop_stale_quantized(model: Any) -> None:
    """Drop the quantized form of matrices that no longer equal what it decodes to, judged by some of their rows.

    Merged adapters, edits and another dtype change matrices.
    """
    for module in model.modules():
        quantized = getattr(module, "quantized", None)
        if isinstance(quantized, QuantizedWeight) and not _is_decoded(module.weight.data[None], quantized, model.dtype):
            del module.quantized
    inputs_first = FAMILIES[model.config.model_type].inputs_first
    for _, module, spec in experts_of_layers(model):
        if not hasattr(module, "quantized"):
            continue
        quantized, gates_ups, downs = module.quantized, before_activation(module).data, module.down_proj.data
        if inputs_first:
            gates_ups, downs = gates_ups.mT, downs.mT
        places = _gates_then_ups(spec) if spec.activation == "clamped" else None
        if not _is_decoded(gates_ups, quantized.gate_up, model.dtype, places) or not _is_decoded(
            downs, quantized.down, model.dtype
        ):
            del module.quantized


def drop_quantized(model: Any) -> None:
    """Drop all quantized weights of a model that only prefills: it multiplies with decoded weights."""
    for module in model.modules():
        if hasattr(module, "quantized"):
            del module.quantized
    trim_heap()


def _is_decoded(
    weight: Tensor,  # [num_matrices, num_out, num_in]; `quantized` has the matrices stacked
    quantized: QuantizedWeight,
    dtype: torch.dtype,  # the model's; some of its matrices may be float32
    places: Tensor | None = None,  # [num_matrices * num_out]: the row of the weight for each row quantized
) -> bool:
    num_matrices, num_out, _ = weight.shape
    rows = torch.arange(0, len(quantized), max(1, len(quantized) // max(_SAMPLED_ROWS, 2 * num_matrices)))
    at = rows if places is None else places[rows]
    there = weight[at // num_out, at % num_out]
    return dtype == torch.bfloat16 and torch.equal(there.to("cpu", dtype), quantized.outputs(rows).decoded(dtype))


def _experts_in_one(name: str, spec: ExpertsSpec, quantized: dict[str, QuantizedWeight]) -> QuantizedExperts | None:
    """Take the experts' matrices from a checkpoint with all experts in one tensor; None if it has no such tensor."""
    gate_up, down = f"{name}.{'gate_up_proj' if spec.gated else 'up_proj'}", f"{name}.down_proj"
    if not {gate_up, down} <= quantized.keys():
        return None
    gates_ups = quantized.pop(gate_up)
    if spec.activation == "clamped":  # gates and ups alternate
        gates_ups = gates_ups.outputs(_gates_then_ups(spec))
    return QuantizedExperts(gates_ups, quantized.pop(down))


def _experts_by_one(
    layer: str, spec: ExpertsSpec, parts: dict[tuple[str, ...], QuantizedWeight]
) -> QuantizedExperts | None:
    """Take them from a checkpoint with a matrix for each expert; None if any is missing, or they differ in kind.

    parts: by layer, expert, and name of the matrix. Those of the layer are removed.
    """

    def some(*kinds: tuple[str, ...]) -> list[QuantizedWeight]:
        keys = ((layer, str(expert), name) for expert in range(spec.num_experts) for x in kinds for name in x)
        return [parts.pop(key) for key in keys if key in parts]

    gates_ups, downs = some(_GATES, _UPS) if spec.gated else some(_UPS), some(_DOWNS)
    if (len(gates_ups), len(downs)) != ((1 + spec.gated) * spec.num_experts, spec.num_experts):
        return None
    return QuantizedExperts.of(gates_ups, downs)


def _gates_then_ups(spec: ExpertsSpec) -> Tensor:
    """Return the permutation of rows from alternating gates and ups to each expert's gates, then its ups."""
    rows = torch.arange(2 * spec.intermediate_size)
    in_order = torch.cat([rows[::2], rows[1::2]])
    return (torch.arange(spec.num_experts)[:, None] * len(rows) + in_order).flatten()


def round_weights(model: Any, rounding: Rounding, store_decoded: Callable[[Tensor], Tensor] | None = None) -> None:
    """Quantize the weights of linear modules and experts in a model's layers by rounding.

    With int4 also the output head, which may be the embedding, to FP8: it takes much of a small model's step.
    store_decoded: stores decoded weights, like `to_mapped_file`; None: in memory.
    """
    store_decoded = store_decoded or (lambda decoded: decoded)
    quantized = {}
    heads = [("lm_head", model.lm_head)] if rounding in HEAD_ROUNDING else []
    for name, module in [*linears_of_layers(model), *heads]:
        of_module = HEAD_ROUNDING[rounding] if module is model.lm_head else rounding
        weight = QuantizedWeight.rounded(module.weight.data, of_module)
        module.weight.data = store_decoded(weight.decoded(module.weight.dtype))
        quantized[f"{name}.weight"] = weight
    inputs_first = FAMILIES[model.config.model_type].inputs_first
    for name, module, spec in experts_of_layers(model):
        for part in ("gate_up_proj" if spec.gated else "up_proj", "down_proj"):
            parameter = getattr(module, part)
            matrices = parameter.data.mT if inputs_first else parameter.data
            whole = joined([QuantizedWeight.rounded(matrix, rounding) for matrix in matrices])
            assert whole is not None, "they are of a kind"
            decoded = whole.decoded(matrices.dtype).view(matrices.shape)
            parameter.data = store_decoded(decoded.mT if inputs_first else decoded)
            quantized[f"{name}.{part}"] = whole
    attach_quantized(model, quantized)
