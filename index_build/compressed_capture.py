"""Prefill of a layer of compressed rows (DeepSeek-V4) with csattn's own decoding attention, in bounded memory."""

from typing import Any

from torch import Tensor

from csattn.lightning import CompressedAttention, CompressedWeights
from csattn.models.streams import mixed_streams


class CompressedLayer:
    """Runs a decoder layer of `transformers` with several residual streams over a context, chunk by chunk.

    Everything except attention is the layer's own.
    """

    def __init__(self, layer: Any, rotary: Any, hidden_size: int) -> None:
        """rotary: the model's `rotary_emb`."""
        self._layer, self._hidden_size = layer, hidden_size
        self._attention = CompressedAttention(CompressedWeights.of(layer.self_attn, rotary))

    def __call__(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        """Return the layer's output for the next tokens.

        hidden, and the result: [num_tokens, num_streams * hidden_size]. token_ids: [num_tokens] int64.
        """
        layer, streams = self._layer, hidden.view(1, len(hidden), -1, self._hidden_size)
        post, comb, collapsed = layer.attn_hc(streams)
        attended = self._attention.append(layer.input_layernorm(collapsed)[0].to(hidden.dtype))
        streams = _mixed(streams, attended[None], post, comb)
        post, comb, collapsed = layer.ffn_hc(streams)
        given = layer.mlp(layer.post_attention_layernorm(collapsed).to(hidden.dtype), input_ids=token_ids[None])
        return _mixed(streams, given, post, comb).view(hidden.shape)

    def state(self) -> dict[str, Tensor]:
        """Return the state after all tokens so far: the arrays of `CompressedState`."""
        state = self._attention.state
        return {name: getattr(state, name).contiguous() for name in ("window", "rows", "keys", "pending")}


def _mixed(streams: Tensor, given: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Mix the streams in their own dtype, as `DeepseekV4DecoderLayer` does."""
    return mixed_streams(streams, given, post.to(streams.dtype), comb.to(streams.dtype))
