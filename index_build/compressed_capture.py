"""Prefill of a layer of compressed rows (DeepSeek-V4) with csattn's own decoding attention, in bounded memory."""

from typing import Any

from torch import Tensor

from csattn.lightning import CompressedAttention, CompressedWeights
from csattn.models.streams import mixed_streams


class CompressedLayer:
    """Runs a decoder layer of `transformers` with several residual streams over a context, chunk by chunk.

    Everything except attention is the layer's own.
    """

    def __init__(self, layer: Any, rotary: Any, hidden_size: int, token_ids: Tensor) -> None:
        """rotary: the model's `rotary_emb`; token_ids: [context_len] int64."""
        self._layer, self._hidden_size, self._token_ids = layer, hidden_size, token_ids
        self._attention = CompressedAttention(CompressedWeights.of(layer.self_attn, rotary))

    def __call__(self, hidden: Tensor, tokens: slice) -> Tensor:
        """Return the layer's output for the next tokens, like hidden [num_tokens, num_streams * hidden_size]."""
        layer, streams = self._layer, hidden.view(1, len(hidden), -1, self._hidden_size)
        post, comb, collapsed = layer.attn_hc(streams)
        attended = self._attention.append(layer.input_layernorm(collapsed)[0].to(hidden.dtype))
        streams = _mixed(streams, attended[None], post, comb)
        post, comb, collapsed = layer.ffn_hc(streams)
        normed = layer.post_attention_layernorm(collapsed).to(hidden.dtype)
        given = layer.mlp(normed, input_ids=self._token_ids[None, tokens])
        return _mixed(streams, given, post, comb).view(hidden.shape)

    def state(self) -> dict[str, Tensor]:
        """Return the state after all tokens so far: the arrays of `CompressedState`."""
        state = self._attention.state
        return {name: getattr(state, name).contiguous() for name in ("window", "rows", "keys", "pending")}


def _mixed(streams: Tensor, given: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Mix the streams in their own dtype, as `DeepseekV4DecoderLayer` does."""
    return mixed_streams(streams, given, post.to(streams.dtype), comb.to(streams.dtype))
