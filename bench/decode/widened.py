"""Recorded heads of a small model as the heads of a larger shape: 8 KV heads of 4 query heads, 128 wide.

* **Width.** A wide head is one recorded KV head with its query heads, turned into the larger space by an orthogonal
  map of its own, and scaled so that its scores after the wider head's smaller softmax scale are what they were. Which
  rows matter, how unevenly, and how slowly that changes from step to step are therefore the recorded model's own.
  (Two recorded heads side by side fill the width too, but their sum changes more slowly: consecutive steps would
  share 76 % of their rows instead of 63 %, and a slot cache of three times as many rows would hit 96.5 % instead of
  90.5 %.)
* **Groups.** The recorded model has three query heads per KV head, the shape has four: the fourth is the first one
  half the recorded steps away. A step earlier would be too close: it would hold what the last step selected.
* **Layers.** Layer `i` of a model is wide layer `i % NUM_WIDE_LAYERS`.
* **Length.** The context is the recorded one again and again; each copy's keys differ from the first one's by
  noise of a tenth of each dimension's spread, so that copies do not tie.

Values do not steer what a step does; they are random.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NUM_WIDE_LAYERS = 8
NUM_KV_HEADS, GROUP_SIZE, HEAD_DIM = 8, 4, 128
NOISE = 0.1  # of a copy's keys, in standard deviations of the dimension

Which = Literal["own", "predicted"]


@dataclass(frozen=True, slots=True)
class Recording:
    """What a small model's attention saw in a few of its layers."""

    keys: NDArray[np.int8]  # [num_layers, num_kv_heads, context_len, head_dim], after RoPE
    key_steps: NDArray[np.float32]  # [num_layers, num_kv_heads, 1, head_dim]: a key is int8 times this
    own: NDArray[np.float16]  # [num_layers, num_q_heads, num_steps, head_dim], after RoPE
    predicted: NDArray[np.float16]  # likewise, told from the input of the layer before
    layer_ids: NDArray[np.int64]  # [num_layers], which layers of the model these are
    text_sha256: str

    @property
    def context_len(self) -> int:
        return int(self.keys.shape[2])

    @property
    def num_steps(self) -> int:
        return int(self.own.shape[2])


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


def wide_keys(recording: Recording, wide_idx: int) -> Tensor:
    """A wide layer's keys over the recorded context: [NUM_KV_HEADS, context_len, HEAD_DIM] float32."""
    keys = []
    for head, (layer, kv_head) in enumerate(recorded_heads(wide_idx, *recording.keys.shape[:2])):
        recorded = torch.from_numpy(recording.keys[layer, kv_head] * recording.key_steps[layer, kv_head])
        keys.append(recorded @ widening(wide_idx, head, recorded.shape[-1]))
    return torch.stack(keys)


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
    return wide_heads(recorded, recording.keys.shape[1], wide_idx).transpose(0, 1).contiguous()


def tile_keys(
    keys: Tensor,  # [num_heads, recorded_len, head_dim] float32
    context_len: int,
    dtype: torch.dtype,
    seed: int,
) -> Tensor:
    """The keys of a context of any length: [num_heads, context_len, head_dim], on the device of `keys`."""
    num_heads, recorded_len, head_dim = keys.shape
    generator = torch.Generator(keys.device).manual_seed(seed)
    spread = NOISE * keys.std(1, keepdim=True)
    tiled = torch.empty(num_heads, context_len, head_dim, dtype=dtype, device=keys.device)
    for start in range(0, context_len, recorded_len):
        copy = keys[:, : context_len - start]
        if start:
            copy = copy + spread * torch.randn(copy.shape, generator=generator, device=keys.device)
        tiled[:, start : start + copy.shape[1]] = copy
    return tiled
