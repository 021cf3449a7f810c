"""The inputs of a model's layers, and a layer's queries from any hidden state: its own, or an earlier layer's."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from csattn.models.families import FAMILIES


def projects_queries(model: Any) -> tuple[str, ...]:
    """Return the names of a layer's submodules that `queries_before_rope` reads."""
    family = FAMILIES[model.config.model_type]
    attention = family.names.get("self_attn", "self_attn")
    return (attention,) if family.norms[0] is None else (family.norms[0], attention)


def embed(model: Any, token_ids: Tensor) -> Tensor:
    """Return the input of a supported model's first layer: [..., hidden_size]."""
    family = FAMILIES[model.config.model_type]
    hidden: Tensor = family.part(model.model, "embed_tokens")(token_ids)
    multiplier = family.embedding_multiplier(model.config)
    return hidden if multiplier == 1.0 else hidden * multiplier


def layer_inputs(model: Any, token_ids: Tensor, layer_idx: int) -> Tensor:
    """Return one layer's per-layer inputs of tokens, beside the stream: [num_tokens, layer_input_width].

    `Gemma4TextModel` computes them for all layers at once, which takes memory.
    """
    body, width = model.model, model.config.hidden_size_per_layer_input
    part, table = slice(layer_idx * width, (layer_idx + 1) * width), body.embed_tokens_per_layer
    projected = linear(body.embed_tokens(token_ids), body.per_layer_model_projection.weight[part])
    projected = body.per_layer_projection_norm(projected * body.per_layer_model_projection_scale)
    own = table.weight[token_ids, part] * table.embed_scale.to(table.weight.dtype)
    return (projected + own) * body.per_layer_input_scale  # type: ignore[no-any-return]


def queries_before_rope(model: Any, layer_idx: int, hidden: Tensor) -> Tensor:
    """Return the queries that the layer's attention would project from this input, before RoPE.

    Weights of norms that multiply after RoPE are left out.
    model: of a supported family. hidden: [q_len, hidden_size] -> [num_q_heads, q_len, head_dim].
    """
    layer, family = model.model.layers[layer_idx], FAMILIES[model.config.model_type]
    attention = family.part(layer, "self_attn")
    if family.norms[0] is not None:
        hidden = getattr(layer, family.norms[0])(hidden)
    if hasattr(attention, "q_proj"):
        q = attention.q_proj(hidden)
        if family.gated_attention == "with_queries":  # each head's query, then its gate
            q = q.view(len(q), -1, 2, attention.head_dim)[:, :, 0].flatten(1)
    else:
        q = attention.qkv_proj(hidden)[:, : model.config.num_attention_heads * attention.head_dim]
    of_heads = q.shape[0], -1, attention.head_dim
    if hasattr(attention, "qk_norm"):
        q = attention.qk_norm(q.view(of_heads))
    elif (norm := family.part(attention, "q_norm")) is None:
        q = q.view(of_heads)
    elif family.norms_after_rope:
        q = rms_norm(q.view(of_heads).float(), of_heads[2:], None, norm.variance_epsilon).to(q.dtype)
    elif family.qk_norm != "projection":
        q = norm(q.view(of_heads))
    else:
        q = norm(q).view(of_heads)
    return q.transpose(0, 1)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Queries:
    """The queries of some tokens in one layer whose rows an indexer may choose."""

    q: Tensor  # [num_tokens, num_heads, width of a row's key]
    index_q: Tensor | None  # [num_tokens, num_index_heads, index_head_dim]; None: the layer has no indexer
    index_weights: Tensor | None  # [num_tokens, num_index_heads] float32


@dataclass(frozen=True, slots=True)
class Rotation:
    """RoPE at some positions. It rotates the first dimensions of each head and leaves the others as they are."""

    cos: Tensor  # [num_tokens, rotated dimensions // 2] float32
    sin: Tensor
    q_scale: Tensor  # [num_tokens] float32: a factor of the queries
    interleaved: bool = False  # as in `rotate`

    def __call__(self, x: Tensor, interleaved: bool | None = None) -> Tensor:
        """Rotate x [num_tokens, ..., head_dim]. interleaved: default: self's."""
        size = len(x), *(x.ndim - 2) * [1], -1
        cos, sin = (part.float().repeat(1, 2).view(size) for part in (self.cos, self.sin))
        return rotate(x, cos, sin, self.interleaved if interleaved is None else interleaved)


def rotate(q: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Apply RoPE to the first dimensions. q: [num_q_heads, q_len, head_dim]; cos, sin: [q_len, rotated dimensions].

    Pairs are dimensions i and i + half, or 2i and 2i + 1 if interleaved.
    """
    rotated, rest = q[..., : cos.shape[-1]], q[..., cos.shape[-1] :]
    if interleaved:
        cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, dim=-1) for t in (cos, sin))
        swapped = torch.stack([-rotated[..., 1::2], rotated[..., 0::2]], dim=-1).flatten(-2)
    else:
        first, second = rotated.chunk(2, dim=-1)
        swapped = torch.cat([-second, first], dim=-1)
    rotated = rotated * cos + swapped * sin
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated
