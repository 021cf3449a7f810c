"""Recorded heads of a small model as the heads of a larger shape.

* **Width.** A wide head is one recorded KV head with its query heads, mapped into the larger space by an orthogonal
  map of its own, and scaled so that its scores times the shape's own softmax scale do not change. Which rows matter,
  how unevenly, how slowly that changes from step to step, and how well values can be predicted from keys are therefore
  those of the recorded model.
  (Two recorded heads side by side would fill the width too, but their sum changes more slowly: consecutive steps would
  share 76 % of their rows instead of 63 %, and a slot cache of three times as many rows would hit 96.5 % instead of
  90.5 %.)
* **Groups.** The recorded model has three query heads per KV head. In a shape that has four, the fourth is the first
  one, shifted by half of the recorded steps; in a shape that has more, copies are shifted as far apart as possible. A
  shift by one step would be too small: the copy would choose what the last step chose.
* **Layers.** Layer `i` of a model is wide layer `i % NUM_WIDE_LAYERS`.
* **Length.** A context ends with the recorded rows, because the recorded steps follow them; a shorter one has only the
  last of them. In a longer one, copies of them come first, as many as needed. Noise of a tenth of each dimension's
  standard deviation keeps their scores from tying.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bench.decode.recording import Recording
from csattn.models.spec import ModelSpec

NUM_WIDE_LAYERS = 4
NOISE = 0.1  # of a copy, in standard deviations of the dimension

Which = Literal["own", "predicted"]


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of a layer of the larger shape."""

    num_kv_heads: int
    group_size: int  # query heads per KV head
    head_dim: int  # a power of two
    softmax_scale: float

    @classmethod
    def of(cls, shape: ModelSpec) -> "Heads":
        group_size = shape.num_q_heads // shape.num_kv_heads
        return cls(shape.num_kv_heads, group_size, shape.head_dim, shape.softmax_scale)


def recorded_heads(wide_idx: int, heads: Heads, num_layers: int, num_kv_heads: int) -> list[tuple[int, int]]:
    """Return the recorded (layer, KV head) of each KV head of a wide layer. They repeat only once all are used."""
    first = wide_idx * heads.num_kv_heads
    numbers = range(first, first + heads.num_kv_heads)
    return [divmod(number % (num_layers * num_kv_heads), num_kv_heads) for number in numbers]


def widening(wide_idx: int, head: int, heads: Heads, recorded_dim: int) -> Tensor:
    """Return a map from recorded to wide heads [recorded_dim, head_dim]: rows of a Hadamard matrix with random signs.

    It is orthogonal up to a factor, which keeps scores times the softmax scale unchanged.
    """
    rng, head_dim = np.random.default_rng([wide_idx, head]), heads.head_dim
    i = np.arange(head_dim)
    hadamard = 1 - 2 * (np.bitwise_count(i[:, None] & i) % 2).astype(np.float32)
    rows = rng.permutation(head_dim)[:recorded_dim]
    signs = rng.choice(np.array([-1, 1], np.float32), head_dim)
    scale = (recorded_dim**-0.5 / heads.softmax_scale / head_dim) ** 0.5
    return torch.from_numpy(hadamard[rows] * signs * np.float32(scale))


def wide_rows(recording: Recording, wide_idx: int, heads: Heads) -> Tensor:
    """Return a wide layer's rows of the recorded context: [num_kv_heads, context_len, 2, head_dim] float32."""
    rows, there = [], (recording.num_layers, recording.num_kv_heads)
    for head, (layer, kv_head) in enumerate(recorded_heads(wide_idx, heads, *there)):
        recorded = recording.rows(layer)[kv_head]
        rows.append(recorded @ widening(wide_idx, head, heads, recorded.shape[-1]))
    return torch.stack(rows)


def wide_heads(
    q: Tensor,  # [num_layers, num_q_heads, num_rows, head_dim], recorded; rows in the order of time
    num_kv_heads: int,  # of the recorded model
    wide_idx: int,
    heads: Heads,
) -> Tensor:
    """Return a wide layer's queries [num_q_heads, num_rows, head_dim] float32."""
    recorded_group, num_rows = q.shape[1] // num_kv_heads, q.shape[2]
    num_rounds = -(-heads.group_size // recorded_group)  # of the recorded query heads, to fill a group
    wide = []
    for head, (layer, kv_head) in enumerate(recorded_heads(wide_idx, heads, q.shape[0], num_kv_heads)):
        to_wide = widening(wide_idx, head, heads, q.shape[3])
        for member in range(heads.group_size):
            borrowed = q[layer, kv_head * recorded_group + member % recorded_group].float()
            wide.append(borrowed.roll(member // recorded_group * num_rows // num_rounds, dims=0) @ to_wide)
    return torch.stack(wide)


def wide_queries(recording: Recording, wide_idx: int, heads: Heads, which: Which) -> Tensor:
    """Return a wide layer's queries at each step: [num_steps, num_q_heads, head_dim] float32."""
    recorded = torch.from_numpy(recording.own if which == "own" else recording.predicted)
    return wide_heads(recorded, recording.num_kv_heads, wide_idx, heads).transpose(0, 1).contiguous()


def wide_context_queries(recording: Recording, wide_idx: int, heads: Heads) -> Tensor:
    """Return some of the context's own queries in a wide layer: [num_q_heads, num_sampled, head_dim] float32."""
    return wide_heads(torch.from_numpy(recording.context_q), recording.num_kv_heads, wide_idx, heads)


def tile_rows(
    rows: Tensor,  # [num_kv_heads, recorded_len, 2, head_dim] float32
    context_len: int,
    dtype: torch.dtype,
    seed: int,
) -> Tensor:
    """Return the rows of a context of any length: [num_kv_heads, context_len, 2, head_dim], on the device of `rows`."""
    generator = torch.Generator(rows.device).manual_seed(seed)
    spread = NOISE * rows.std(1, keepdim=True)
    tiled = torch.empty(len(rows), context_len, *rows.shape[2:], dtype=dtype, device=rows.device)
    for stop in range(context_len, 0, -rows.shape[1]):
        copy = rows[:, -min(stop, rows.shape[1]) :]
        if stop < context_len:
            copy = copy + spread * torch.randn(copy.shape, generator=generator, device=rows.device)
        tiled[:, stop - copy.shape[1] : stop] = copy
    return tiled
