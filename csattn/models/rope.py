"""How fast a position turns each pair of a head's dimensions, from `transformers`' own rotary module."""

from typing import Any

from torch import Tensor

from csattn.models.families import layer_type, rope_parameters


def model_frequencies(rotary: Any, layer_type: str = "") -> tuple[Tensor, float]:
    """Of a loaded model's `rotary_emb`, the angle per position of each pair of dimensions that turn, float32, and the
    factor on cos and sin; layer_type: where it has others for each."""
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
