"""How fast a position turns each pair of a head's dimensions, from `transformers`' own rotary module."""

from typing import Any

from torch import Tensor

from csattn.models.families import layer_type, rope_parameters


def rotary_frequencies(
    rope_parameters: dict[str, Any],  # as in a transformers config
    head_dim: int,
    max_positions: int,
) -> tuple[Tensor, float]:
    """The angle per position of each pair of dimensions that turn, float32, and the factor on cos and sin."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = dict(rope_parameters)
    num_turned = int(head_dim * (parameters.pop("partial_rotary_factor", None) or 1.0))
    config = LlamaConfig(
        head_dim=num_turned,
        hidden_size=num_turned,
        num_attention_heads=1,
        max_position_embeddings=max_positions,
        rope_parameters=parameters,
    )
    return model_frequencies(LlamaRotaryEmbedding(config))


def model_frequencies(rotary: Any, layer_type: str = "") -> tuple[Tensor, float]:
    """Likewise of a loaded model's `rotary_emb`; layer_type: where it has others for each."""
    prefix = f"{layer_type}_" if layer_type else ""
    return getattr(rotary, f"{prefix}inv_freq").float(), float(getattr(rotary, f"{prefix}attention_scaling"))


def position_embeddings(body: Any, hidden: Tensor, positions: Tensor) -> list[Any]:
    """What each layer of a model's body is told of positions [1, num_tokens]. hidden: anything of the model's dtype."""
    config = body.config
    if hasattr(body.rotary_emb, "mrope_section"):  # of text, the three grids' positions are the same
        positions = positions.expand(3, -1, -1)
    by_type = {
        name: body.rotary_emb(hidden, position_ids=positions, **({"layer_type": name} if name else {}))
        for name in rope_parameters(config)
    }
    return [by_type.get(layer_type(config, i), by_type.get("")) for i in range(len(body.layers))]
