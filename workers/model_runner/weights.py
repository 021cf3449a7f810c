"""A model's weights as the decode loop reads them: q, k and v in one matrix, gates and ups in one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from csattn.errors import ModelError
from csattn.models.families import require_supported
from csattn.models.rope import model_frequencies, rotary_frequencies
from workers.model_runner.ops import HeadNorms
from workers.model_runner.shapes import ModelShape, shape_of

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices are [rows of the output, rows of the input], as torch's linear layers have them."""

    input_norm: Tensor  # [hidden_size]
    qkv: Tensor  # [(num_q_heads + 2 * num_kv_heads) * head_dim, hidden_size]
    qkv_bias: Tensor | None
    head_norms: HeadNorms | None
    out: Tensor  # [hidden_size, num_q_heads * head_dim]
    mlp_norm: Tensor  # [hidden_size]
    gate_up: Tensor  # [2 * intermediate_size, hidden_size]: gates, then ups
    down: Tensor  # [hidden_size, intermediate_size]


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All on one device, in one dtype."""

    shape: ModelShape
    embedding: Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden_size]
    head: Tensor  # [vocab_size, hidden_size]; the embedding itself where they are tied
    inverse_frequencies: Tensor  # [head_dim // 2] float32: RoPE's angle per position
    rope_scale: float  # on cos and sin

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def streamed_bytes(self) -> int:
        """Bytes of weights that every decode step reads."""
        return self.shape.streamed_params * self.dtype.itemsize


def take_weights(
    model: Any,  # a transformers causal language model of a supported family
    device: torch.device | str,
    dtype: torch.dtype | None = None,  # the model's own unless said
    consume: bool = False,  # free each of the model's layers once it is copied: the model cannot run again
) -> ModelWeights:
    """Copy a loaded model's weights to the device.

    Raises ModelError where the decode loop does not reproduce the model.
    """
    require_supported(model.config)
    require_plain(model)
    shape = shape_of(model.config)
    require_dtype(dtype or model.dtype)

    def move(*parts: Tensor) -> Tensor:
        moved = [part.detach().to(device, dtype or model.dtype, copy=len(parts) == 1) for part in parts]
        return moved[0] if len(parts) == 1 else torch.cat(moved)

    layers = []
    for layer in model.model.layers:
        layers.append(_take_layer(layer, move))
        if consume:
            for parameter in layer.parameters():
                parameter.data = parameter.data.new_empty(0)
    embedding = move(model.model.embed_tokens.weight)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    frequencies, rope_scale = model_frequencies(model.model.rotary_emb)
    return ModelWeights(
        shape=shape,
        embedding=embedding,
        layers=tuple(layers),
        final_norm=move(model.model.norm.weight),
        head=embedding if tied else move(model.lm_head.weight),
        inverse_frequencies=frequencies.to(device),
        rope_scale=rope_scale,
    )


def random_weights(
    shape: ModelShape, device: torch.device | str, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> ModelWeights:
    """Weights that keep activations near one; repeatable on the same kind of device."""
    require_dtype(dtype)
    generator = torch.Generator(device).manual_seed(seed)
    into_stream = (2 * shape.num_layers) ** -0.5  # each layer adds to the stream twice

    def matrix(num_out: int, num_in: int, gain: float = 1.0) -> Tensor:
        empty = torch.empty(num_out, num_in, dtype=dtype, device=device)
        return empty.normal_(std=gain * num_in**-0.5, generator=generator)

    def ones(size: int) -> Tensor:
        return torch.ones(size, dtype=dtype, device=device)

    layers = tuple(
        LayerWeights(
            input_norm=ones(shape.hidden_size),
            qkv=matrix(shape.qkv_width, shape.hidden_size),
            qkv_bias=torch.zeros(shape.qkv_width, dtype=dtype, device=device) if shape.qkv_bias else None,
            head_norms=HeadNorms(ones(shape.head_dim), ones(shape.head_dim)) if shape.qk_norm else None,
            out=matrix(shape.hidden_size, shape.q_width, into_stream),
            mlp_norm=ones(shape.hidden_size),
            gate_up=matrix(2 * shape.intermediate_size, shape.hidden_size),
            down=matrix(shape.hidden_size, shape.intermediate_size, into_stream),
        )
        for _ in range(shape.num_layers)
    )
    embedding = matrix(shape.vocab_size, shape.hidden_size, shape.hidden_size**0.5)
    frequencies, rope_scale = rotary_frequencies(shape.rope, shape.head_dim, shape.max_positions)
    return ModelWeights(
        shape=shape,
        embedding=embedding,
        layers=layers,
        final_norm=ones(shape.hidden_size),
        head=embedding if shape.tied_embedding else matrix(shape.vocab_size, shape.hidden_size),
        inverse_frequencies=frequencies.to(device),
        rope_scale=rope_scale,
    )


def require_dtype(dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        raise ModelError(
            f"the decode loop runs in float32 or bfloat16, not {str(dtype).removeprefix('torch.')}: the residual "
            "stream of some models outgrows float16; load the model with dtype='bfloat16'"
        )


def require_plain(model: Any) -> None:
    """Refuse what the four families allow and no published model of theirs has."""
    activation = model.config.hidden_act
    if activation != "silu":
        raise ModelError(f"the decode loop computes gated SiLU, this model's MLP has {activation!r}")
    layer = model.model.layers[0]
    biased = [
        name
        for name, linear in (("o_proj", layer.self_attn.o_proj), ("down_proj", layer.mlp.down_proj))
        if linear.bias is not None
    ]
    if biased:
        raise ModelError(f"the decode loop has no bias in {' and '.join(biased)}, which this model has")


def _take_layer(layer: Any, move: Callable[..., Tensor]) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    has_bias = attention.q_proj.bias is not None
    has_norms = hasattr(attention, "q_norm")
    return LayerWeights(
        input_norm=move(layer.input_layernorm.weight),
        qkv=move(*(projection.weight for projection in projections)),
        qkv_bias=move(*(projection.bias for projection in projections)) if has_bias else None,
        head_norms=HeadNorms(move(attention.q_norm.weight), move(attention.k_norm.weight)) if has_norms else None,
        out=move(attention.o_proj.weight),
        mlp_norm=move(layer.post_attention_layernorm.weight),
        gate_up=move(mlp.gate_proj.weight, mlp.up_proj.weight),
        down=move(mlp.down_proj.weight),
    )
