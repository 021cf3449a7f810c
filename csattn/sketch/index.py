"""The sketch of one layer of a context: everything that a step reads of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from csattn.sketch.codes import unpack_marks

MARKED_SHARE = 400  # one in so many rows of a segment is marked
# Arrays whose first axis is the head and whose second the block or segment: sketches of rows that follow each other are
# concatenated along the second.
BY_HEAD = "codes", "marks", "key_mean", "query_transform", "value_mean", "value_transform"


@dataclass(frozen=True)
class SketchIndex:
    """The codes of all rows, and for each segment the transforms from queries to coordinates and from codes to values.

    Arrays may be read-only memory maps, shared by all requests. `reference` defines what they mean.
    """

    # [num_kv_heads, num_blocks, num_fine + num_coarse, BLOCK_KEYS] words: see `codes.pack_codes`
    codes: NDArray[np.uint32]
    # [num_kv_heads, num_blocks, 2] words: bit i of word j is 1 if key 32 j + i of the block is marked. A marked key is
    # reproduced so badly by its codes that it is read whatever its score. Every head has equally many.
    marks: NDArray[np.uint32]
    num_fine: int  # words of 4-bit codes; the others are of 2-bit codes
    segment_starts: NDArray[np.int32]  # [num_segments] ascending from 0; a segment's rows share a transform
    key_mean: NDArray[np.float32]  # [num_kv_heads, num_segments, head_dim]
    query_transform: NDArray[np.float16]  # [num_kv_heads, num_segments, head_dim, num_coords]
    value_mean: NDArray[np.float32]  # [num_kv_heads, num_segments, head_dim]
    value_transform: NDArray[np.float16]  # [num_kv_heads, num_segments, num_coords, head_dim]
    context_len: int
    # [num_q_heads, head_dim + 1, head_dim]: predicts the next layer's query before RoPE as [early, 1] @ next_query[h],
    # where early is the query that the next layer would compute from this layer's input. None in the last layer.
    next_query: NDArray[np.float32] | None = None

    @property
    def num_heads(self) -> int:
        return int(self.codes.shape[0])

    @property
    def head_dim(self) -> int:
        return int(self.key_mean.shape[2])

    @property
    def num_coarse(self) -> int:
        """The number of words of 2-bit codes."""
        return int(self.codes.shape[2]) - self.num_fine

    @property
    def num_coords(self) -> int:
        return int(self.query_transform.shape[3])

    @property
    def num_segments(self) -> int:
        return len(self.segment_starts)

    @property
    def num_bytes(self) -> int:
        """The bytes that choosing rows and attending by codes read."""
        return sum(getattr(self, name).nbytes for name in BY_HEAD)

    def uses_marks(self, top_k: int) -> bool:
        """Whether marked rows are chosen first: only if they are at most half of the top_k chosen rows."""
        return min_top_k_for_marks(self.context_len, self.segment_starts.tolist()) <= top_k

    def marked_rows(self, head: int) -> NDArray[np.bool_]:
        """Whether each row is marked in this head: [context_len]."""
        marked: NDArray[np.bool_] = unpack_marks(self.marks[head][None], self.context_len)[0]
        return marked

    def segment(self, number: int) -> slice:
        """The rows of a segment."""
        ends = [*self.segment_starts[1:].tolist(), self.context_len]
        return slice(int(self.segment_starts[number]), ends[number])


def num_marked(context_len: int, segment_starts: Sequence[int]) -> int:
    """The number of marked rows in each head."""
    return sum((stop - start) // MARKED_SHARE for start, stop in pairwise((*segment_starts, context_len)))


def min_top_k_for_marks(context_len: int, segment_starts: Sequence[int]) -> int:
    """The smallest top_k with which `SketchIndex.uses_marks` is true."""
    return 2 * num_marked(context_len, segment_starts)
