"""RoPE's frequencies and embeddings, from `transformers`' own rotary module."""

from typing import Any

from torch import Tensor

from csattn.models.description import layer_type
from csattn.models.families import FAMILIES
from csattn.models.positions import rope_name, rope_parameters


def rotary_of(body: Any, name: str = "") -> Any:
    """Return the module that computes the RoPE with that name; None: there is none. body: the model without its head.

    name: as in `rope_parameters`.
    """
    if hasattr(body, "rotary_embs"):  # one for each base, in their order
        return body.rotary_embs[list(rope_parameters(body.config)).index(name)]
    return FAMILIES[body.config.model_type].part(body, "rotary_emb")


def model_frequencies(rotary: Any, layer_type: str = "") -> tuple[Tensor, float]:
    """Return the angle per position of each rotated pair of dimensions, float32, and the factor on cos and sin.

    rotary: as `rotary_of` returns it. layer_type: the RoPE's name; the module may have frequencies for each.
    """
    prefix = f"{layer_type}_" if hasattr(rotary, f"{layer_type}_inv_freq") else ""
    return getattr(rotary, f"{prefix}inv_freq").float(), float(getattr(rotary, f"{prefix}attention_scaling"))


def position_embeddings(body: Any, hidden: Tensor, positions: Tensor) -> list[Any]:
    """Return the `position_embeddings` argument of each layer for positions [1, num_tokens]; None without RoPE.

    body: the model without its head. hidden: any tensor of the model's dtype.
    """
    config, names = body.config, list(rope_parameters(body.config))
    if not names or (rotary := rotary_of(body, names[0])) is None:
        return [None] * len(body.layers)
    if hasattr(rotary, "mrope_section"):  # multimodal RoPE: for text, all three positions are the same
        positions = positions.expand(3, -1, -1)
    has_types = hasattr(rotary, f"{names[0]}_inv_freq")
    by_name: dict[str | None, Any] = {
        name: rotary_of(body, name)(hidden, position_ids=positions, **({"layer_type": name} if has_types else {}))
        for name in names
    }
    return [by_name.get(rope_name(config, i, layer_type(config, i))) for i in range(len(body.layers))]
