"""Segments of a request's own rows: attention to a long question and answer becomes sparse as well.

A request's own rows, its tail, are numbered in order of arrival. Once the last row of a whole segment has left the
tail's window, the segment becomes part of a second context, which belongs to this request alone. It has a sketch with a
transform for each segment, made from the segment's rows and nothing else, so rows that are kept and restored get the
same codes. A token that sees tail_len rows of the tail, its own included, attends to three sets of rows:

* near, exactly: the context's sinks and window, and the tail's rows after the last segment in use;
* chosen, exactly: the best rows of the context and, chosen separately, the best rows of its own segments, of which
  OWN_SHARE times as large a share is kept;
* rest, by their codes: all other rows of the context and of its own segments.

A request without a context has only its own segments and the near rows of its tail.

How many segments are in use depends on tail_len alone. So answers depend neither on when a sketch is made nor on how
tokens are divided into steps.
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

# Recent rows get more attention weight than a context's; see bench/log.md.
OWN_SHARE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """When own rows become segments."""

    segment_len: int = 2048
    # At least so many rows of the tail stay near, and at least the window. A segment's sketch is made while that number
    # of rows arrive after it, so a step may bring no more.
    least_near: int = 256

    def __post_init__(self) -> None:
        if self.segment_len < 1 or self.segment_len % BLOCK_KEYS:
            raise ConfigError(f"own segments have multiples of {BLOCK_KEYS} rows, got {self.segment_len}")
        if self.least_near < 1:
            raise ConfigError(f"at least one row stays near, got {self.least_near}")

    def num_near(self, window_len: int) -> int:
        """The number of rows that follow a segment in the tail before the segment is used."""
        return max(window_len, self.least_near)

    def num_segments(self, tail_len: int, window_len: int) -> int:
        """The number of segments in use for a token that sees tail_len rows of the tail."""
        return max(0, tail_len - self.num_near(window_len)) // self.segment_len


def own_keep(config: SearchConfig) -> float:
    """The share of its own segments' rows that a token chooses."""
    return min(1.0, OWN_SHARE * config.keep)


def own_top_k(config: SearchConfig, num_rows: int) -> int:
    """How many of the num_rows rows in its own segments a token chooses for each KV head."""
    return max(1, round(own_keep(config) * num_rows)) if num_rows else 0


@torch.inference_mode()
def make_segments(
    rows: Tensor,  # [num_layers, num_kv_heads, segment_len, 2, head_dim]
    config: SketchConfig,  # of the context
    parallel_map: Map = map,  # over threads, for the work on the CPU
) -> list[SketchIndex]:
    """Make the sketch of one segment in each of these layers.

    If a head's rows contain NaN, infinity or a number above LARGEST_NUMBER, its value_mean is NaN, and so is its
    attention to the rest. On a GPU several layers take little more time than one; the last bits may depend on how many
    are made at once.
    """
    num_layers, num_heads, num_rows, _, head_dim = rows.shape
    heads = rows.flatten(0, 1)
    representable, is_representable = _zero_unrepresentable(heads)
    arrays = sketch_arrays(None, representable, config, parallel_map, [0])
    arrays["value_mean"][~is_representable] = torch.nan
    host = {name: array.cpu().numpy() for name, array in arrays.items()}
    of_layers = (
        {name: host[name][first : first + num_heads] for name in BY_HEAD} | {"segment_starts": host["segment_starts"]}
        for first in range(0, num_layers * num_heads, num_heads)
    )
    num_fine = config.words(head_dim)[0]
    return [SketchIndex(**of_layer, num_fine=num_fine, context_len=num_rows) for of_layer in of_layers]


def _zero_unrepresentable(heads: Tensor) -> tuple[Tensor, Tensor]:
    """Replace numbers that a sketch cannot represent by 0; also return which heads had none: [num_heads] bool."""
    is_representable = heads.isfinite() & (heads.abs() <= LARGEST_NUMBER)  # in float16 this limit is infinity
    return heads.where(is_representable, 0.0), is_representable.flatten(1).all(1)


def making_bytes(rows_shape: Sequence[int], item_bytes: int) -> int:
    """The most device memory that `make_segments` takes, including a copy of the rows, which have this shape.

    On an H100, 16 bytes for each number in bfloat16 and 21 in float32 were measured, besides what libraries allocate.
    """
    return math.prod(rows_shape) * (12 + 3 * item_bytes) + (32 << 20)


def join_segments(parts: Sequence[SketchIndex]) -> SketchIndex:
    """Concatenate the sketches of rows that follow each other; all parts but the last consist of whole blocks."""
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
