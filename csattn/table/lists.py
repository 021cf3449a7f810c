"""The table of Top-L lists: for each centroid, the L keys that it scores highest, with these scores."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.bits import pack_bits, unpack_bits

CHUNK_KEYS = 1024
SCORE_UNIT = 16  # a list's scores are padded to a multiple of it, and read in vectors of it
LARGEST_SCORE = 65504.0  # the largest float16: scores beyond it are clipped to it


@dataclass(frozen=True, slots=True)
class ListTable:
    """Lists in the order of keys: a bit for each key, and the scores of the keys whose bit is set.

    The bits take less memory than key indices would, and a search adds a list up in one sequential pass. No stored
    score is -0.0, which marks keys in no list (see `csattn.search`).
    """

    # [num_index_heads, num_subspaces, num_centroids, num_chunks, CHUNK_KEYS / 32]: bit i of word w is key 32 * w + i
    listed: NDArray[np.uint32]
    starts: NDArray[np.int32]  # [num_index_heads, num_subspaces, num_centroids, num_chunks]: each chunk's first score
    scores: NDArray[np.float16]  # [num_index_heads, num_subspaces, num_centroids, list_len padded to SCORE_UNIT]
    least: NDArray[np.float16]  # [num_index_heads, num_subspaces, num_centroids]: each list's lowest score
    list_len: int
    context_len: int

    def of_heads(self, heads: slice) -> "ListTable":
        """Return the lists of some index heads, as views."""
        own = {name: array[heads] for name, array in self.arrays.items()}
        return ListTable(**own, list_len=self.list_len, context_len=self.context_len)

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """The arrays by name."""
        return {"listed": self.listed, "starts": self.starts, "scores": self.scores, "least": self.least}

    def entries(self, head: int, subspace: int, centroid: int) -> tuple[NDArray[np.int64], NDArray[np.float16]]:
        """Return a list's keys, ascending, and their scores: both [list_len]."""
        where = head, subspace, centroid
        return np.flatnonzero(unpack_bits(self.listed[where])), self.scores[where][: self.list_len]


def ordinals(bits: Any) -> Any:
    """Map float16 scores, given as their int16 bits, to integers in the same order; -0.0 is below 0.0.

    bits: an array of numpy or torch, without NaN. The function is its own inverse.
    """
    return bits ^ (bits >> 15 & 0x7FFF)


def num_chunks(context_len: int) -> int:
    return -(-context_len // CHUNK_KEYS)


def score_room(list_len: int) -> int:
    """Return the padded length of a list's scores."""
    return -(-list_len // SCORE_UNIT) * SCORE_UNIT


def list_shapes(list_len: int, context_len: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of one list in each array of a table, by the array's name."""
    chunks = num_chunks(context_len)
    return {"listed": (chunks, CHUNK_KEYS // 32), "starts": (chunks,), "scores": (score_room(list_len),), "least": ()}


def list_bytes(list_len: int, context_len: int) -> int:
    """Return the bytes that a search reads of a list."""
    return num_chunks(context_len) * (CHUNK_KEYS // 8 + 4) + 2 * score_room(list_len)


def lists_of(listed: NDArray[np.bool_], scores: NDArray[np.float16]) -> ListTable:
    """Make the lists of the keys whose `listed` is set; all lists must have the same length.

    listed, scores: [num_index_heads, num_subspaces, num_centroids, context_len]; scores of other keys are not used.
    """
    *lists, context_len = listed.shape
    list_len = int(np.count_nonzero(listed)) // max(1, int(np.prod(lists)))
    chunks = np.zeros((*lists, num_chunks(context_len) * CHUNK_KEYS), np.bool_)
    chunks[..., :context_len] = listed
    chunks = chunks.reshape(*lists, -1, CHUNK_KEYS)
    counts = np.count_nonzero(chunks, axis=-1).astype(np.int32)
    held = np.zeros((*lists, score_room(list_len)), np.float16)
    held[..., :list_len] = scores[listed].reshape(*lists, list_len)
    # compare integers: numpy takes a hundred times as long to compare float16
    least = ordinals(held[..., :list_len].view(np.int16)).min(axis=-1, initial=np.iinfo(np.int16).max)
    return ListTable(
        listed=pack_bits(chunks),
        starts=np.cumsum(counts, axis=-1, dtype=np.int32) - counts,
        scores=held,
        least=ordinals(least).view(np.float16),
        list_len=list_len,
        context_len=context_len,
    )
