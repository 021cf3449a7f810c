"""A loaded model's weights by their part in a step, where the model has them: nothing is copied but norms."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from csattn.models.families import FAMILIES, Family, describe
from csattn.models.rope import model_frequencies
from csattn.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Linear:
    """x @ weight.T + bias"""

    weight: Tensor  # [num_out, num_in]
    bias: Tensor | None = None  # [num_out]

    def outputs(self, first: int, stop: int) -> "Linear":
        """Those outputs alone."""
        return Linear(self.weight[first:stop], None if self.bias is None else self.bias[first:stop])


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of q and k before RoPE: of each head, or of all heads together."""

    q: Tensor  # [head_dim] or [num_q_heads * head_dim] float32
    k: Tensor  # [head_dim] or [num_kv_heads * head_dim] float32


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Linear layers that come as several have their outputs side by side. Norms are [hidden_size] float32, or None."""

    before_attention: Tensor | None
    qkv: tuple[Linear, ...]
    head_norms: HeadNorms | None
    out: Linear
    behind_attention: Tensor | None
    before_mlp: Tensor | None
    gate_up: tuple[Linear, ...]  # gates, then ups; of an MLP without gates ups alone
    down: Linear
    behind_mlp: Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All on one device, in one dtype, but for norms and frequencies, which are float32."""

    spec: ModelSpec
    embedding: Tensor  # [vocab_size, hidden_size]
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor  # [hidden_size]
    head: Linear  # [vocab_size, hidden_size]; the embedding itself where they are tied
    inverse_frequencies: Tensor  # [rotated dimensions // 2]: RoPE's angle per position
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
        return self.spec.streamed_params * self.dtype.itemsize


def weights_of(model: Any) -> ModelWeights:
    """model: a transformers causal language model. Raises ModelError where its family is not supported."""
    spec, family, body = describe(model.config), FAMILIES[model.config.model_type], model.model
    frequencies, rope_scale = model_frequencies(body.rotary_emb)
    return ModelWeights(
        spec=spec,
        embedding=body.embed_tokens.weight.detach(),
        layers=tuple(layer_weights(layer, spec, family) for layer in body.layers),
        final_norm=_norm(body.norm, family),
        head=_linear(model.lm_head),
        inverse_frequencies=frequencies,
        rope_scale=rope_scale,
    )


def layer_weights(layer: Any, spec: ModelSpec, family: Family) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [None if name is None else _norm(getattr(layer, name), family) for name in family.norms]
    head_norms = None
    if family.qk_norm != "none":
        head_norms = HeadNorms(_norm(attention.q_norm, family), _norm(attention.k_norm, family))
    return LayerWeights(
        before_attention=norms[0],
        qkv=_parts(attention, "qkv_proj", ("q_proj", "k_proj", "v_proj"), [spec.q_width, *2 * [spec.kv_width]]),
        head_norms=head_norms,
        out=_linear(attention.o_proj),
        behind_attention=norms[1],
        before_mlp=norms[2],
        gate_up=_parts(mlp, "gate_up_proj", ("gate_proj", "up_proj") if family.gated else ("up_proj",)),
        down=_linear(mlp.down_proj),
        behind_mlp=norms[3],
    )


def _parts(module: Any, fused: str, names: tuple[str, ...], widths: list[int] | None = None) -> tuple[Linear, ...]:
    """Projections of the same input; some families keep them as one. widths: equal unless said."""
    if not hasattr(module, fused):
        return tuple(_linear(getattr(module, name)) for name in names)
    whole = _linear(getattr(module, fused))
    widths = widths or len(names) * [len(whole.weight) // len(names)]
    ends = [sum(widths[: i + 1]) for i in range(len(widths))]
    return tuple(whole.outputs(end - width, end) for end, width in zip(ends, widths, strict=True))


def _linear(module: Any) -> Linear:
    return Linear(module.weight.detach(), None if module.bias is None else module.bias.detach())


def _norm(module: Any, family: Family) -> Tensor:
    """What a norm multiplies by."""
    weight: Tensor = module.weight.detach().float()
    return 1 + weight if family.offset_norms else weight.clone()
