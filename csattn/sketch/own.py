"""Segments of a request's own rows: question and answer get sparse as they get long.

A request's own rows, its tail, are numbered as they come. Whole segments of them, once their last row has left the
tail's window, are treated as a second context that belongs to the request alone: they have a sketch, a transform for
each segment, made of the rows and nothing else, so that rows that are kept and put back get the same codes. A token
that sees tail_len rows of the tail, its own included, attends to

* near: the context's sinks and window, and the tail's rows from the last segment in use on: exactly;
* chosen: the best rows of the context, and, by a choice of their own, of its own segments, of which OWN_SHARE times the
  share is kept: exactly;
* rest: all other rows of the context, and all other rows of its own segments: by their codes.

A request without a context has its own segments and what is near of its tail.

How many segments are in use follows from tail_len alone: answers depend neither on when a sketch is made nor on how
tokens are cut into steps.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from csattn.config import SearchConfig, SketchConfig
from csattn.errors import ConfigError
from csattn.sketch.build import sketch_arrays
from csattn.sketch.codes import BLOCK_KEYS
from csattn.sketch.index import BY_HEAD, SketchIndex
from csattn.sketch.reference import LARGEST_NUMBER
from csattn.torch_threads import Map

# Rows that came late weigh more than a context's; see bench/log.md.
OWN_SHARE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """When own rows become segments."""

    segment_len: int = 2048
    # of the tail, at least so many rows stay near, and the window: while as many come, a segment's sketch is made, and
    # no more may come in one step
    least_near: int = 256

    def __post_init__(self) -> None:
        if self.segment_len < 1 or self.segment_len % BLOCK_KEYS:
            raise ConfigError(f"own segments have multiples of {BLOCK_KEYS} rows, got {self.segment_len}")
        if self.least_near < 1:
            raise ConfigError(f"at least one row stays near, got {self.least_near}")

    def num_near(self, window_len: int) -> int:
        """Rows of the tail that come behind a segment before it is in use."""
        return max(window_len, self.least_near)

    def num_segments(self, tail_len: int, window_len: int) -> int:
        """Segments in use for a token that sees so many rows of the tail."""
        return max(0, tail_len - self.num_near(window_len)) // self.segment_len


def own_keep(config: SearchConfig) -> float:
    """The share of its own segments' rows that a token chooses."""
    return min(1.0, OWN_SHARE * config.keep)


def own_top_k(config: SearchConfig, num_rows: int) -> int:
    """Rows that a token chooses for each KV head from so many rows in its own segments."""
    return max(1, round(own_keep(config) * num_rows)) if num_rows else 0


@torch.inference_mode()
def make_segments(
    rows: Tensor,  # [num_layers, num_kv_heads, segment_len, 2, head_dim]
    config: SketchConfig,  # of the context
    side_by_side: Map = map,  # of threads, for what runs on the CPU
) -> list[SketchIndex]:
    """The sketch of a segment in each of these layers. What is told of a head is NaN where its rows hold NaN, infinity
    or a number above LARGEST_NUMBER.

    On a GPU several layers take little more time than one; their last bits may depend on how many are made at once.
    """
    num_layers, num_heads, num_rows, _, head_dim = rows.shape
    heads = rows.flatten(0, 1)
    sound, is_told = _sound(heads)
    arrays = sketch_arrays(None, sound, config, side_by_side, [0])
    arrays["value_mean"][~is_told] = torch.nan
    host = {name: array.cpu().numpy() for name, array in arrays.items()}
    of_layers = (
        {name: host[name][first : first + num_heads] for name in BY_HEAD} | {"segment_starts": host["segment_starts"]}
        for first in range(0, num_layers * num_heads, num_heads)
    )
    num_fine = config.words(head_dim)[0]
    return [SketchIndex(**of_layer, num_fine=num_fine, context_len=num_rows) for of_layer in of_layers]


def _sound(heads: Tensor) -> tuple[Tensor, Tensor]:
    """The rows with zeros for what a sketch cannot take, and which heads have none of that: [num_heads] bool."""
    is_sound = heads.isfinite() & (heads.abs() <= LARGEST_NUMBER)  # a float16 takes that limit for infinity
    return heads.where(is_sound, 0.0), is_sound.flatten(1).all(1)


def making_bytes(rows_shape: Sequence[int], item_bytes: int) -> int:
    """Device memory that `make_segments` takes at most, rows of that shape included that are copied for it.

    On an H100 16 bytes were measured for each number in bfloat16, 21 in float32, and what libraries want.
    """
    return math.prod(rows_shape) * (12 + 3 * item_bytes) + (32 << 20)


def join_segments(parts: Sequence[SketchIndex]) -> SketchIndex:
    """One sketch of rows that follow each other; all but the last part have whole blocks."""
    first = parts[0]
    assert all(part.context_len % BLOCK_KEYS == 0 for part in parts[:-1])
    before = np.cumsum([0, *(part.context_len for part in parts)])
    starts = [part.segment_starts + rows for part, rows in zip(parts, before[:-1], strict=True)]
    arrays = {name: np.concatenate([getattr(part, name) for part in parts], axis=1) for name in BY_HEAD}
    return SketchIndex(
        **arrays,
        num_fine=first.num_fine,
        segment_starts=np.concatenate(starts).astype(np.int32),
        context_len=int(before[-1]),
    )
