"""Copies a model's weights to a device, laid out for the decode loop: one matrix for q, k, v, one for gates and ups."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from csattn.errors import ModelError
from csattn.models.module_weights import weights_of
from csattn.models.quantized_weight import joined
from csattn.models.share import share_of_head, share_of_layer, share_of_spec
from csattn.models.weights import ExpertWeights, LayerWeights, Linear, ModelWeights, by_expert
from csattn.share import Share

DTYPES = (torch.float32, torch.bfloat16)
_MATRICES = ("up_k", "up_v", "table")  # tensors to convert to the model's dtype; other plain tensors stay float32


def take_weights(
    model: Any,  # a transformers causal language model of a supported family
    device: torch.device | str,
    share: Share | None = None,  # this device's share, if several devices share the model; None: all of it
) -> ModelWeights:
    """Copy a loaded model's weights to the device.

    Raises ModelError if the decode loop does not reproduce the model.
    """
    there = weights_of(model)
    require_dtype(model.dtype)
    waiting = list(there.layers)
    there = replace(there, layers=())  # each layer's weights are released once they are copied
    return lay_out(there, (waiting.pop(0) for _ in there.spec.layers), device, model.dtype, share)


def lay_out(
    there: ModelWeights,  # without layers
    layers: Iterator[LayerWeights],  # all of them, each of which is asked for when the one before is copied
    device: torch.device | str,
    dtype: torch.dtype,  # of matrices
    share: Share | None,  # as in `take_weights`
) -> ModelWeights:
    """Copy weights to the device, as steps read them. Raises ConfigError for a model that cannot be shared out."""
    whole, to, copied = there.spec, _Mover(device, dtype), []
    for layer_idx, of_layer in enumerate(whole.layers):
        part = next(layers)
        if share is not None:
            part = share_of_layer(part, whole.heads_of(layer_idx), of_layer, share)
        copied.append(to.moved(_centred(part) if whole.centred else part))
        del part
    embedding = to.matrix(there.embedding)
    tied = there.head.weight.data_ptr() == there.embedding.data_ptr() and there.head.quantized is None
    bias = there.head.bias
    head = Linear(embedding, None if bias is None else to.matrix(bias)) if tied else there.head
    if share is not None:
        head = share_of_head(head, share)
    return replace(
        there,
        spec=whole if share is None else share_of_spec(whole, share.num_devices),
        embedding=embedding,
        layers=tuple(copied),
        head=head if tied else to.joined([head]),
        **{name: to.moved(getattr(there, name)) for name in ("final_norm", "ropes", "inputs", "join")},
    )


def require_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ModelError(
            f"the decode loop runs in float32 or bfloat16, not {str(dtype).removeprefix('torch.')}: the residual "
            "stream of some models outgrows float16; load the model with dtype='bfloat16'"
        )


@dataclass(frozen=True, slots=True)
class _Mover:
    """Copies weights to the device: matrices in `dtype`, other numbers in their own dtype."""

    device: torch.device | str
    dtype: torch.dtype

    def moved(self, weights: Any) -> Any:
        """Return a copy of the same structure. A tuple of linear layers becomes a tuple of one that joins them."""
        if isinstance(weights, Tensor):
            return weights.to(self.device)
        if isinstance(weights, Linear):
            return self.joined([weights])
        if isinstance(weights, ExpertWeights):
            return self._experts(weights)
        if isinstance(weights, tuple):
            are_linear = bool(weights) and all(isinstance(part, Linear) for part in weights)
            return (self.joined(weights),) if are_linear else tuple(map(self.moved, weights))
        if not is_dataclass(weights):
            return weights
        of_fields = {field.name: getattr(weights, field.name) for field in fields(weights)}
        moved = {
            name: self.matrix(of_field).contiguous() if name in _MATRICES else self.moved(of_field)
            for name, of_field in of_fields.items()
        }
        return replace(weights, **moved)  # type: ignore[type-var]  # an instance

    def matrix(self, *parts: Tensor) -> Tensor:
        """Return one matrix of all parts, one below the other."""
        moved = [part.to(self.device, self.dtype, copy=len(parts) == 1) for part in parts]
        return moved[0] if len(parts) == 1 else torch.cat(moved)

    def joined(self, linears: Sequence[Linear]) -> Linear:
        """Return one linear layer of them all. If only some have biases, the others' are zeros."""
        bias = None
        if any(linear.bias is not None for linear in linears):
            bias = self.matrix(
                *(torch.zeros(len(x.weight), dtype=torch.float32) if x.bias is None else x.bias for x in linears)
            )
        quantized = [linear.quantized.to(self.device) for linear in linears if linear.quantized is not None]
        if len(quantized) == len(linears) and (whole := joined(quantized)) is not None:
            return Linear(whole.words, bias, whole)
        return Linear(self.matrix(*(linear.weight for linear in linears)), bias)

    def _experts(self, experts: ExpertWeights) -> ExpertWeights:
        """Copy experts, with each expert's gates and ups in one matrix; `gates` and `ups` are views of it."""

        def join(first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
            both = torch.empty((len(first), 2 * first.shape[1], *first.shape[2:]), dtype=self.dtype, device=self.device)
            parts = both.chunk(2, dim=1)
            for part, rows in zip(parts, (first, second), strict=True):
                part.copy_(rows)
            return parts

        ups: Tensor | None
        if (quantized := experts.quantized) is None:
            gates, ups = (self.matrix(experts.gates), None) if experts.ups is None else join(experts.gates, experts.ups)
            down = self.matrix(experts.down).contiguous()
        else:
            quantized = quantized.to(self.device)
            matrices = quantized.gate_up.words, quantized.down.words
            gates, ups, down = by_expert(*matrices, len(experts.gates), experts.ups is not None)
        gate_bias, up_bias = None, None
        if experts.gate_bias is not None and experts.up_bias is not None:
            gate_bias, up_bias = join(experts.gate_bias, experts.up_bias)
        return ExpertWeights(
            router=self.joined([experts.router]),
            gates=gates,
            ups=ups,
            down=down,
            gate_bias=gate_bias,
            up_bias=up_bias,
            down_bias=None if experts.down_bias is None else self.matrix(experts.down_bias),
            quantized=quantized,
            **{name: self.moved(getattr(experts, name)) for name in ("choice_bias", "scales", "by_token", "norms")},
        )


def _centred(layer: LayerWeights) -> LayerWeights:
    """Centre the layer's output matrices: what it adds to the stream then has a mean of 0, and keeps the stream's."""

    def matrix(weight: Tensor) -> Tensor:
        return (weight - weight.float().mean(0)).to(weight.dtype)

    def outputs(linear: Linear | None) -> Linear | None:
        if linear is None:
            return None
        bias = None if linear.bias is None else linear.bias - linear.bias.mean()
        return Linear(matrix(linear.weight), bias)

    assert all(experts.down_bias is None for experts in layer.experts), "no model with LayerNorm has such biases"
    experts = tuple(replace(of, down=torch.stack([matrix(each) for each in of.down])) for of in layer.experts)
    return replace(layer, out=outputs(layer.out), down=outputs(layer.down), experts=experts)
