"""RoPE for queries that were predicted, not computed by the model."""

from typing import Any

from torch import Tensor

from csattn.models.description import describe
from csattn.models.families import FAMILIES
from csattn.models.positions import rope_parameters
from csattn.models.query import rotate
from csattn.models.rope import model_frequencies, rotary_of


def rotate_for(body: Any, layer_idx: int, q: Tensor, positions: Tensor) -> Tensor:
    """Apply a layer's RoPE, if it has one, to queries at positions [q_len]. body: the model without its head."""
    spec, names = describe(body.config), list(rope_parameters(body.config))
    number = spec.layers[layer_idx].attention.rope
    if number is None:
        return q
    rope = spec.ropes[number]
    if rope.parameters is not None:
        per_position, scale = model_frequencies(rotary_of(body, names[number]), names[number])
        angles = (positions.float()[:, None] * per_position).repeat(1, 2)
        family = FAMILIES[body.config.model_type]
        if family.norms_after_rope:  # they cancel the factor
            scale = 1.0
        q = rotate(q, (scale * angles.cos()).to(q.dtype), (scale * angles.sin()).to(q.dtype), rope.interleaved)
        if family.norms_after_rope:
            q = q * family.part(body.layers[layer_idx].self_attn, "q_norm").weight
    return q if rope.temper is None else q * rope.temper.scales(positions)[:, None].to(q.dtype)
