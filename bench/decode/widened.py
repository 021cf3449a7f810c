"""Recorded heads of a small model as the heads of a larger shape: 8 KV heads of 4 query heads, 128 wide.

* **Width.** A wide head is one recorded KV head with its query heads, turned into the larger space by an orthogonal
  map of its own, and scaled so that its scores after the wider head's smaller softmax scale are what they were. Which
  rows matter, how unevenly, and how slowly that changes from step to step are therefore the recorded model's own, and
  so is what values can be told from keys.
  (Two recorded heads side by side fill the width too, but their sum changes more slowly: consecutive steps would
  share 76 % of their rows instead of 63 %, and a slot cache of three times as many rows would hit 96.5 % instead of
  90.5 %.)
* **Groups.** The recorded model has three query heads per KV head, the shape has four: the fourth is the first one
  half the recorded steps away. A step earlier would be too close: it would hold what the last step selected.
* **Layers.** Layer `i` of a model is wide layer `i % NUM_WIDE_LAYERS`.
* **Length.** A context ends with the recorded rows, which the recorded steps follow; a shorter one has the last of
  them. What a longer one has before them is made up: copies, again and again, that differ by noise of a tenth of each
  dimension's spread, so that they do not tie.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from bench.decode.recording import Recording

NUM_WIDE_LAYERS = 4
NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM = 8, 4, 128
NOISE = 0.1  # of a copy, in standard deviations of the dimension

Which = Literal["own", "predicted"]


def recorded_heads(wide_idx: int, num_layers: int, num_kv_heads: int) -> list[tuple[int, int]]:
    """The recorded (layer, KV head) that each KV head of a wide layer comes from: different ones in one layer."""
    first = wide_idx * NUM_KV_HEADS
    return [divmod((first + head) % (num_layers * num_kv_heads), num_kv_heads) for head in range(NUM_KV_HEADS)]


def widening(wide_idx: int, head: int, recorded_dim: int) -> Tensor:
    """A map from recorded to wide heads [recorded_dim, HEAD_DIM]: rows of a Hadamard matrix, signs changed.

    Orthogonal up to the factor that keeps scores times head_dim ** -0.5 as they were.
    """
    rng = np.random.default_rng([wide_idx, head])
    i = np.arange(HEAD_DIM)
    hadamard = 1 - 2 * (np.bitwise_count(i[:, None] & i) % 2).astype(np.float32)
    rows = rng.permutation(HEAD_DIM)[:recorded_dim]
    signs = rng.choice(np.array([-1, 1], np.float32), HEAD_DIM)
    scale = (HEAD_DIM / recorded_dim) ** 0.25 / HEAD_DIM**0.5
    return torch.from_numpy(hadamard[rows] * signs * np.float32(scale))


def wide_rows(recording: Recording, wide_idx: int) -> Tensor:
    """A wide layer's rows of the recorded context: [NUM_KV_HEADS, context_len, 2, HEAD_DIM] float32."""
    rows = []
    for head, (layer, kv_head) in enumerate(recorded_heads(wide_idx, recording.num_layers, recording.num_kv_heads)):
        recorded = recording.rows(layer)[kv_head]
        rows.append(recorded @ widening(wide_idx, head, recorded.shape[-1]))
    return torch.stack(rows)


def wide_heads(
    q: Tensor,  # [num_layers, num_q_heads, num_rows, head_dim], recorded; rows follow one another in time
    num_kv_heads: int,  # of the recorded model
    wide_idx: int,
) -> Tensor:
    """A wide layer's queries [NUM_KV_HEADS * GROUP_SIZE, num_rows, HEAD_DIM] float32."""
    recorded_group, num_rows = q.shape[1] // num_kv_heads, q.shape[2]
    heads = []
    for head, (layer, kv_head) in enumerate(recorded_heads(wide_idx, q.shape[0], num_kv_heads)):
        to_wide = widening(wide_idx, head, q.shape[3])
        for member in range(GROUP_SIZE):
            borrowed = q[layer, kv_head * recorded_group + member % recorded_group].float()
            heads.append(borrowed.roll(member // recorded_group * num_rows // 2, dims=0) @ to_wide)
    return torch.stack(heads)


def wide_queries(recording: Recording, wide_idx: int, which: Which) -> Tensor:
    """What a wide layer's search gets at each step: [num_steps, num_q_heads, HEAD_DIM] float32."""
    recorded = torch.from_numpy(recording.own if which == "own" else recording.predicted)
    return wide_heads(recorded, recording.num_kv_heads, wide_idx).transpose(0, 1).contiguous()


def wide_context_queries(recording: Recording, wide_idx: int) -> Tensor:
    """Some of the context's own queries in a wide layer: [num_q_heads, num_sampled, HEAD_DIM] float32."""
    return wide_heads(torch.from_numpy(recording.context_q), recording.num_kv_heads, wide_idx)


def tile_rows(
    rows: Tensor,  # [num_kv_heads, recorded_len, 2, head_dim] float32
    context_len: int,
    dtype: torch.dtype,
    seed: int,
) -> Tensor:
    """The rows of a context of any length: [num_kv_heads, context_len, 2, head_dim], on the device of `rows`."""
    generator = torch.Generator(rows.device).manual_seed(seed)
    spread = NOISE * rows.std(1, keepdim=True)
    tiled = torch.empty(len(rows), context_len, *rows.shape[2:], dtype=dtype, device=rows.device)
    for stop in range(context_len, 0, -rows.shape[1]):
        copy = rows[:, -min(stop, rows.shape[1]) :]
        if stop < context_len:
            copy = copy + spread * torch.randn(copy.shape, generator=generator, device=rows.device)
        tiled[:, stop - copy.shape[1] : stop] = copy
    return tiled
