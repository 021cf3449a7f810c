"""A model's weights as the decode loop on a device reads them: q, k and v in one matrix, gates and ups in one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from csattn.errors import ModelError
from csattn.models.quantized_weight import joined
from csattn.models.share import share_of_head, share_of_layer, share_of_spec
from csattn.models.weights import (
    DeltaWeights,
    ExpertNorms,
    ExpertWeights,
    Frequencies,
    HeadNorms,
    InputWeights,
    LatentWeights,
    LayerInputWeights,
    LayerWeights,
    Linear,
    ModelWeights,
    by_expert,
    weights_of,
)
from csattn.share import Share

DTYPES = (torch.float32, torch.bfloat16)


def take_weights(
    model: Any,  # a transformers causal language model of a supported family
    device: torch.device | str,
    share: Share | None = None,  # of the model, for one of several devices; None: all of it
) -> ModelWeights:
    """Copy a loaded model's weights to the device.

    Raises ModelError where the decode loop does not reproduce the model.
    """
    there = weights_of(model)
    whole, centred = there.spec, there.spec.centred
    require_dtype(model.dtype)

    def move(*parts: Tensor) -> Tensor:
        moved = [part.to(device, model.dtype, copy=len(parts) == 1) for part in parts]
        return moved[0] if len(parts) == 1 else torch.cat(moved)

    layers = []
    waiting = list(there.layers)
    there = replace(there, layers=())  # whose weights are not to be held any longer than needed
    for layer_idx, of_layer in enumerate(whole.layers):
        part = waiting.pop(0)
        if share is not None:
            part = share_of_layer(part, whole.heads_of(layer_idx), of_layer, share)
        layers.append(_moved(part, move, device, centred))
    embedding = move(there.embedding)
    tied = there.head.weight.data_ptr() == there.embedding.data_ptr()
    head = Linear(embedding) if tied else there.head
    if share is not None:
        head = share_of_head(head, share)
    return replace(
        there,
        spec=whole if share is None else share_of_spec(whole, share.num_devices),
        embedding=embedding,
        layers=tuple(layers),
        final_norm=there.final_norm.to(device),
        head=head if tied else _joined([head], move, device),
        ropes=tuple(Frequencies(rope.angles.to(device), rope.scale) for rope in there.ropes),
        inputs=None if (inputs := there.inputs) is None else _moved_inputs(inputs, move, device),
    )


def require_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ModelError(
            f"the decode loop runs in float32 or bfloat16, not {str(dtype).removeprefix('torch.')}: the residual "
            "stream of some models outgrows float16; load the model with dtype='bfloat16'"
        )


def _moved(
    layer: LayerWeights,
    move: Callable[..., Tensor],
    device: torch.device | str,
    centred: bool,  # what is added to the stream leaves its mean at 0
) -> LayerWeights:
    norms = {
        name: None if (norm := getattr(layer, name)) is None else norm.to(device)
        for name in ("before_attention", "behind_attention", "before_mlp", "behind_mlp")
    }
    heads = layer.head_norms
    return LayerWeights(
        qkv=(_joined(layer.qkv, move, device),) if layer.qkv else (),
        gates=(_joined(layer.gates, move, device),) if layer.gates else (),
        delta=None if layer.delta is None else _moved_delta(layer.delta, move, device),
        latent=None if layer.latent is None else _moved_latent(layer.latent, move, device),
        head_norms=None if heads is None else _moved_head_norms(heads, device),
        sinks=None if layer.sinks is None else layer.sinks.to(device),
        out=_joined([_centred(layer.out) if centred else layer.out], move, device),
        gate_up=(_joined(layer.gate_up, move, device),) if layer.gate_up else (),
        down=None if layer.down is None else _joined([_centred(layer.down) if centred else layer.down], move, device),
        experts=tuple(_moved_experts(experts, move, device) for experts in layer.experts),
        scale=layer.scale,
        layer_input=None if (of := layer.layer_input) is None else _moved_layer_input(of, move, device),
        **norms,
    )


def _moved_inputs(inputs: InputWeights, move: Callable[..., Tensor], device: torch.device | str) -> InputWeights:
    projection, table = _joined([inputs.projection], move, device), move(inputs.table)
    return replace(inputs, projection=projection, norm=inputs.norm.to(device), table=table)


def _moved_layer_input(
    of: LayerInputWeights, move: Callable[..., Tensor], device: torch.device | str
) -> LayerInputWeights:
    gate, projection = (_joined([linear], move, device) for linear in (of.gate, of.projection))
    return LayerInputWeights(gate, projection, of.norm.to(device))


def _moved_head_norms(norms: HeadNorms, device: torch.device | str) -> HeadNorms:
    return HeadNorms(norms.q.to(device), norms.k.to(device), None if norms.v is None else norms.v.to(device))


def _moved_delta(delta: DeltaWeights, move: Callable[..., Tensor], device: torch.device | str) -> DeltaWeights:
    numbers = (x.to(device) for x in (delta.conv, delta.decay, delta.decay_bias, delta.norm))
    return DeltaWeights((_joined(delta.inputs, move, device),), *numbers)


def _moved_latent(latent: LatentWeights, move: Callable[..., Tensor], device: torch.device | str) -> LatentWeights:
    return LatentWeights(
        inputs=(_joined(_all_biased(latent.inputs), move, device),),
        queries=(_joined(_all_biased(latent.queries), move, device),) if latent.queries else (),
        up_k=move(latent.up_k).contiguous(),
        up_v=move(latent.up_v).contiguous(),
        q_norm=None if latent.q_norm is None else latent.q_norm.to(device),
        kv_norm=latent.kv_norm.to(device),
        index_norm=None if latent.index_norm is None else latent.index_norm.to(device),
    )


def _all_biased(linears: Sequence[Linear]) -> list[Linear]:
    """The same with zeros where some have biases and others not."""
    if all(linear.bias is None for linear in linears):
        return list(linears)
    return [
        linear if linear.bias is not None else replace(linear, bias=torch.zeros(len(linear.weight)))
        for linear in linears
    ]


def _moved_experts(experts: ExpertWeights, move: Callable[..., Tensor], device: torch.device | str) -> ExpertWeights:
    """Of each expert gates and ups in one matrix, of which those are views."""

    def join(first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        like = move(first[:1, :1])
        both = like.new_empty(len(first), 2 * first.shape[1], *first.shape[2:])
        parts = both.chunk(2, dim=1)
        for part, rows in zip(parts, (first, second), strict=True):
            part.copy_(rows)
        return parts

    if (kept := experts.quantized) is None:
        gates, ups = join(experts.gates, experts.ups)
        down = move(experts.down).contiguous()
    else:
        kept = kept.to(device)
        gates, ups, down = by_expert(kept.gate_up.words, kept.down.words, len(experts.gates))
    gate_bias, up_bias = None, None
    if experts.gate_bias is not None and experts.up_bias is not None:
        gate_bias, up_bias = join(experts.gate_bias, experts.up_bias)
    return ExpertWeights(
        router=_joined([experts.router], move, device),
        gates=gates,
        ups=ups,
        down=down,
        choice_bias=None if experts.choice_bias is None else experts.choice_bias.to(gates.device),
        gate_bias=gate_bias,
        up_bias=up_bias,
        down_bias=None if experts.down_bias is None else move(experts.down_bias),
        scales=None if experts.scales is None else experts.scales.to(gates.device),
        norms=None if (norms := experts.norms) is None else _moved_expert_norms(norms, gates.device),
        quantized=kept,
    )


def _moved_expert_norms(norms: ExpertNorms, device: torch.device) -> ExpertNorms:
    return ExpertNorms(*(norm.to(device) for norm in (norms.router, norms.before, norms.behind, norms.behind_mlp)))


def _centred(linear: Linear) -> Linear:
    """Its outputs less their mean."""
    bias = None if linear.bias is None else linear.bias - linear.bias.mean()
    return Linear((linear.weight - linear.weight.float().mean(0)).to(linear.weight.dtype), bias)


def _joined(linears: Sequence[Linear], move: Callable[..., Tensor], device: torch.device | str) -> Linear:
    """One matrix of them all."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    bias = move(*biases) if biases else None
    quantized = [linear.quantized.to(device) for linear in linears if linear.quantized is not None]
    if len(quantized) == len(linears) and (whole := joined(quantized)) is not None:
        return Linear(whole.words, bias, whole)
    return Linear(move(*(linear.weight for linear in linears)), bias)
