"""RoPE of queries that a model has not made itself."""

from typing import Any

from torch import Tensor

from csattn.models.families import describe, rope_parameters
from csattn.models.query import rotate
from csattn.models.rope import model_frequencies


def rotate_for(body: Any, layer_idx: int, q: Tensor, positions: Tensor) -> Tensor:
    """What that layer of a model's body does to queries for their positions [q_len], which may be nothing."""
    spec, names = describe(body.config), list(rope_parameters(body.config))
    number = spec.layers[layer_idx].attention.rope
    if number is None:
        return q
    rope = spec.ropes[number]
    if rope.parameters is not None:
        per_position, scale = model_frequencies(body.rotary_emb, names[number])
        angles = (positions.float()[:, None] * per_position).repeat(1, 2)
        q = rotate(q, (scale * angles.cos()).to(q.dtype), (scale * angles.sin()).to(q.dtype), rope.interleaved)
    return q if rope.temper is None else q * rope.temper.scales(positions)[:, None].to(q.dtype)
