"""Prefill of an MLA layer with csattn's own decoding attention, which holds no scores of a whole chunk in memory."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from csattn.models.latent import attend_latents, choose_rows, latent_queries, latent_rows, latent_values, query_latents
from csattn.models.latent_spec import LatentSpec
from csattn.models.module_weights import latent_weights
from csattn.models.query import Rotation
from csattn.models.spec import RopeSpec
from csattn.models.weights import Linear


class LatentLayer:
    """Runs a decoder layer of `transformers` over a context, chunk by chunk. Norms and MLP are the layer's own."""

    def __init__(
        self,
        layer: Any,
        spec: LatentSpec,
        softmax_scale: float,
        rope: RopeSpec,
        angles: tuple[Tensor, Tensor],  # cosines and sines, [1, context_len, rope_dim] each
        rows: Tensor,  # [context_len, width], written
        chosen: Tensor | None,  # [context_len, top_k] int32: the previous layer's choice; written if this layer chooses
    ) -> None:
        self._layer, self._spec, self._scale, self._rope, self._angles = layer, spec, softmax_scale, rope, angles
        self._weights = latent_weights(layer.self_attn, spec)
        self._rows, self._chosen = rows, chosen

    def __call__(self, hidden: Tensor, tokens: slice) -> Tensor:
        """Return the layer's output for these tokens, like hidden [num_tokens, hidden_size]."""
        spec, weights, layer = self._spec, self._weights, self._layer
        cos, sin = (x[0, tokens, : spec.rope_dim // 2] for x in self._angles)
        q_scale, temper = torch.ones(len(hidden), device=hidden.device), self._rope.temper
        if temper is not None:
            q_scale = temper.scales(torch.arange(tokens.start, tokens.stop, device=hidden.device))
        rope = Rotation(cos, sin, q_scale, self._rope.interleaved)
        inputs = _products(layer.input_layernorm(hidden), weights.inputs)
        projected = inputs
        if weights.queries:
            projected = _products(query_latents(inputs, weights, spec), weights.queries)
        self._rows[tokens] = latent_rows(inputs, weights, spec, rope, self._rows.shape[1]).to(self._rows.dtype)
        queries, seen = latent_queries(inputs, projected, weights, spec, rope), self._rows[: tokens.stop]
        chosen = None
        if self._chosen is not None:
            if spec.indexer is not None:
                lens = torch.arange(tokens.start + 1, tokens.stop + 1, dtype=torch.int32, device=seen.device)
                self._chosen[tokens] = choose_rows(queries, seen, lens, spec)
            chosen = self._chosen[tokens]
        attended = attend_latents(queries.q.to(seen.dtype), seen, chosen, spec, self._scale)
        hidden = hidden + layer.self_attn.o_proj(latent_values(attended, weights).to(hidden.dtype))
        hidden_out: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden)[None])[0]
        return hidden_out

    def state(self) -> None:
        """Return None: rows are kept, not a state."""


def _products(x: Tensor, linears: tuple[Linear, ...]) -> Tensor:
    """Return the products of x with all weights, concatenated, float32."""
    return torch.cat(
        [functional.linear(x.to(each.weight.dtype), each.weight, each.bias).float() for each in linears], dim=-1
    )
