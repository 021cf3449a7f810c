"""How much of a model's weights a decode step of one token reads: of experts, only the chosen ones."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from csattn.models.latent_spec import CompressedSpec, LatentSpec
from csattn.models.spec import ModelSpec
from csattn.models.weights import ExpertWeights, Linear, ModelWeights


def streamed_params(spec: ModelSpec) -> int:
    """Return the number of parameters in the matrices that a step reads.

    The output head counts, the row read from the embedding does not.
    """
    columns, others = spec.vocab_size + 3 * spec.num_layers * spec.layer_input_width, 0
    for layer_idx, layer in enumerate(spec.layers):
        if layer.recurrent is not None:
            columns += layer.recurrent.in_width + layer.recurrent.out_width
        elif layer.latent is not None:
            others += _latent_params(layer.latent, spec.hidden_size)
        elif layer.compressed is not None:
            others += _compressed_params(layer.compressed, spec.hidden_size)
        elif not layer.mlp_only:
            heads, has_rows = spec.heads_of(layer_idx), layer.attention.rows_of is None
            columns += heads.qkv_width if has_rows else heads.q_width
            columns += (1 + layer.attention.gated) * heads.q_width
        columns += layer.mlp.intermediate_size * (2 + layer.mlp.gated) if layer.mlp is not None else 0
        columns += sum(x.num_experts + (2 + x.gated) * x.num_chosen * x.intermediate_size for x in layer.experts)
    if spec.streams is not None:
        others += spec.streams.num_params(spec.num_layers, spec.hidden_size)
    return spec.hidden_size * columns + others


def _latent_params(of: LatentSpec, hidden_size: int) -> int:
    of_queries = 0 if of.q_rank is None else of.q_rank * (of.q_width + of.index_q_width)
    of_latents = of.kv_rank * of.num_heads * (of.nope_dim + of.v_dim)
    return hidden_size * (sum(of.in_widths) + of.v_width) + of_queries + of_latents


def _compressed_params(of: CompressedSpec, hidden_size: int) -> int:
    of_heads = of.q_width * (of.q_rank + of.out_rank) + of.out_width * hidden_size
    return of.num_row_params(hidden_size) + of_heads


def streamed_bytes(weights: ModelWeights) -> int:
    """Return the bytes of the weights that a step reads."""
    spec, item_bytes = weights.spec, weights.dtype.itemsize
    saved = sum(
        len(linear.weight) * linear.num_in * item_bytes - linear.quantized.nbytes
        for linear in _linears((weights.head, weights.layers))
        if linear.quantized is not None
    )
    for layer, of_layer in zip(weights.layers, spec.layers, strict=True):
        for experts, of in zip(layer.experts, of_layer.experts, strict=True):
            if experts.quantized is not None:
                plain = (2 + of.gated) * of.num_experts * of.intermediate_size * spec.hidden_size * item_bytes
                saved += (plain - experts.quantized.nbytes) * of.num_chosen // of.num_experts
    others = (spec.vocab_size - len(weights.head.weight)) * spec.hidden_size  # other devices' head rows
    mixes = [mix for layer in weights.layers for mix in (layer.attention_mix, layer.mlp_mix)] + [weights.join]
    of_mixes = sum(mix.matrix.nbytes - mix.matrix.numel() * item_bytes for mix in mixes if mix is not None)
    return (streamed_params(spec) - others) * item_bytes - saved + of_mixes


def _linears(weights: Any) -> Iterator[Linear]:
    """Yield the linear layers in a structure of weights, except those of experts."""
    if isinstance(weights, Linear):
        yield weights
    elif isinstance(weights, tuple):
        for part in weights:
            yield from _linears(part)
    elif is_dataclass(weights) and not isinstance(weights, ExpertWeights):
        for field in fields(weights):
            yield from _linears(getattr(weights, field.name))
