"""A model's weights as the decode loop on a device reads them: q, k and v in one matrix, gates and ups in one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from csattn.errors import ModelError
from csattn.models.rope import rotary_frequencies
from csattn.models.spec import LayerSpec, ModelSpec
from csattn.models.weights import HeadNorms, LayerWeights, Linear, ModelWeights, weights_of

DTYPES = (torch.float32, torch.bfloat16)


def take_weights(
    model: Any,  # a transformers causal language model of a supported family
    device: torch.device | str,
    dtype: torch.dtype | None = None,  # the model's own unless said
    consume: bool = False,  # free each of the model's layers once it is copied: the model cannot run again
) -> ModelWeights:
    """Copy a loaded model's weights to the device.

    Raises ModelError where the decode loop does not reproduce the model.
    """
    there = weights_of(model)
    require_dtype(dtype or model.dtype)

    def move(*parts: Tensor) -> Tensor:
        moved = [part.to(device, dtype or model.dtype, copy=len(parts) == 1) for part in parts]
        return moved[0] if len(parts) == 1 else torch.cat(moved)

    layers = []
    waiting = list(there.layers)
    there = replace(there, layers=())  # whose weights are not to be held any longer than needed
    for layer in model.model.layers:
        layers.append(_moved(waiting.pop(0), move, device))
        if consume:
            for parameter in layer.parameters():
                parameter.data = parameter.data.new_empty(0)
    embedding = move(there.embedding)
    tied = there.head.weight.data_ptr() == there.embedding.data_ptr()
    return replace(
        there,
        embedding=embedding,
        layers=tuple(layers),
        final_norm=there.final_norm.to(device),
        head=Linear(embedding) if tied else _joined([there.head], move),
        inverse_frequencies=there.inverse_frequencies.to(device),
    )


def random_weights(
    spec: ModelSpec, device: torch.device | str, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> ModelWeights:
    """Weights that keep activations near one; repeatable on the same kind of device."""
    require_dtype(dtype)
    generator = torch.Generator(device).manual_seed(seed)
    into_stream = (2 * spec.num_layers) ** -0.5  # each layer adds to the stream twice

    def matrix(num_out: int, num_in: int, gain: float = 1.0) -> Tensor:
        empty = torch.empty(num_out, num_in, dtype=dtype, device=device)
        return empty.normal_(std=gain * num_in**-0.5, generator=generator)

    def linear(num_out: int, num_in: int, bias: bool = False, gain: float = 1.0) -> Linear:
        zeros = torch.zeros(num_out, dtype=dtype, device=device) if bias else None
        return Linear(matrix(num_out, num_in, gain), zeros)

    def norm(size: int, there: bool = True) -> Tensor | None:
        return torch.ones(size, device=device) if there else None

    def layer(of: LayerSpec) -> LayerWeights:
        attention, mlp, hidden_size = of.attention, of.mlp, spec.hidden_size
        sizes = {"none": None, "head": (spec.head_dim,) * 2, "projection": (spec.q_width, spec.kv_width)}
        of_heads = sizes[attention.qk_norm]
        return LayerWeights(
            before_attention=norm(hidden_size, of.pre_norm),
            qkv=(linear(spec.qkv_width, hidden_size, attention.qkv_bias),),
            head_norms=of_heads and HeadNorms(*(torch.ones(size, device=device) for size in of_heads)),
            out=linear(hidden_size, spec.q_width, attention.out_bias, into_stream),
            behind_attention=norm(hidden_size, of.post_norm),
            before_mlp=norm(hidden_size, of.pre_norm),
            gate_up=(linear((1 + mlp.gated) * mlp.intermediate_size, hidden_size, mlp.bias),),
            down=linear(hidden_size, mlp.intermediate_size, mlp.bias, into_stream),
            behind_mlp=norm(hidden_size, of.post_norm),
        )

    layers = tuple(layer(of) for of in spec.layers)
    embedding = matrix(spec.vocab_size, spec.hidden_size, spec.hidden_size**0.5)
    frequencies, rope_scale = rotary_frequencies(spec.rope, spec.head_dim, spec.max_positions)
    return ModelWeights(
        spec=spec,
        embedding=embedding,
        layers=layers,
        final_norm=torch.ones(spec.hidden_size, device=device),
        head=Linear(embedding if spec.tied_embedding else matrix(spec.vocab_size, spec.hidden_size)),
        inverse_frequencies=frequencies.to(device),
        rope_scale=rope_scale,
    )


def require_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ModelError(
            f"the decode loop runs in float32 or bfloat16, not {str(dtype).removeprefix('torch.')}: the residual "
            "stream of some models outgrows float16; load the model with dtype='bfloat16'"
        )


def _moved(layer: LayerWeights, move: Callable[..., Tensor], device: torch.device | str) -> LayerWeights:
    norms = {
        name: None if (norm := getattr(layer, name)) is None else norm.to(device)
        for name in ("before_attention", "behind_attention", "before_mlp", "behind_mlp")
    }
    heads = layer.head_norms
    return LayerWeights(
        qkv=(_joined(layer.qkv, move),),
        head_norms=None if heads is None else HeadNorms(heads.q.to(device), heads.k.to(device)),
        out=_joined([layer.out], move),
        gate_up=(_joined(layer.gate_up, move),),
        down=_joined([layer.down], move),
        **norms,
    )


def _joined(linears: Sequence[Linear], move: Callable[..., Tensor]) -> Linear:
    """One matrix of them all."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return Linear(move(*(linear.weight for linear in linears)), move(*biases) if biases else None)
