"""How fast a position turns each pair of a head's dimensions, from `transformers`' own rotary module."""

from typing import Any

from torch import Tensor


def rotary_frequencies(
    rope_parameters: dict[str, Any],  # as in a transformers config
    head_dim: int,
    max_positions: int,
) -> tuple[Tensor, float]:
    """The angle per position [head_dim // 2] float32, and the factor on cos and sin."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=max_positions,
        rope_parameters=dict(rope_parameters),
    )
    return model_frequencies(LlamaRotaryEmbedding(config))


def model_frequencies(rotary: Any) -> tuple[Tensor, float]:
    """Likewise of a loaded model's `rotary_emb`."""
    return rotary.inv_freq.float(), float(rotary.attention_scaling)
