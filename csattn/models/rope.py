"""RoPE's frequencies and embeddings, from `transformers`' own rotary module."""

from typing import Any

from torch import Tensor

from csattn.models.description import layer_type
from csattn.models.families import FAMILIES
from csattn.models.positions import rope_parameters


def rotary_of(body: Any) -> Any:
    """Return the module that computes a model's RoPE; None: it has none. body: the model without its head."""
    return FAMILIES[body.config.model_type].part(body, "rotary_emb")


def model_frequencies(rotary: Any, layer_type: str = "") -> tuple[Tensor, float]:
    """Return the angle per position of each rotated pair of dimensions, float32, and the factor on cos and sin.

    rotary: as `rotary_of` returns it. layer_type: if it has frequencies for each type of layer.
    """
    prefix = f"{layer_type}_" if layer_type else ""
    return getattr(rotary, f"{prefix}inv_freq").float(), float(getattr(rotary, f"{prefix}attention_scaling"))


def position_embeddings(body: Any, hidden: Tensor, positions: Tensor) -> list[Any]:
    """Return the `position_embeddings` argument of each layer for positions [1, num_tokens]; None without RoPE.

    body: the model without its head. hidden: any tensor of the model's dtype.
    """
    config, rotary = body.config, rotary_of(body)
    if rotary is None:
        return [None] * len(body.layers)
    if hasattr(rotary, "mrope_section"):  # multimodal RoPE: for text, all three positions are the same
        positions = positions.expand(3, -1, -1)
    by_type = {
        name: rotary(hidden, position_ids=positions, **({"layer_type": name} if name else {}))
        for name in rope_parameters(config)
    }
    return [by_type.get(layer_type(config, i), by_type.get("")) for i in range(len(body.layers))]
