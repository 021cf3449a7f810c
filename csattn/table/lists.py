"""The table as Top-L lists: of each centroid the L keys that it scores highest, with these scores."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.bits import pack_bits, unpack_bits

CHUNK_KEYS = 1024
SCORE_UNIT = 16  # the scores of a list are filled up to whole ones, and read by them
LARGEST_SCORE = 65504.0  # what a float16 holds: scores beyond it are stored as that


@dataclass(frozen=True, slots=True)
class ListTable:
    """Lists in the order of keys: a bit for each key says whether it is listed, and then has the list's next score.

    Such a list takes less than the numbers of its keys would, and is added up from one end to the other. No stored
    score is -0.0 (see `search`).
    """

    # [num_index_heads, num_subspaces, num_centroids, num_chunks, CHUNK_KEYS / 32]: bit i of word w is key 32 * w + i
    listed: NDArray[np.uint32]
    starts: NDArray[np.int32]  # [num_index_heads, num_subspaces, num_centroids, num_chunks]: of a chunk's scores
    scores: NDArray[np.float16]  # [num_index_heads, num_subspaces, num_centroids, list_len up to whole units]
    least: NDArray[np.float16]  # [num_index_heads, num_subspaces, num_centroids]: of each list's scores
    list_len: int
    context_len: int

    def of_heads(self, heads: slice) -> "ListTable":
        """The lists of some heads only: views, no copies."""
        own = {name: array[heads] for name, array in self.arrays.items()}
        return ListTable(**own, list_len=self.list_len, context_len=self.context_len)

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """By their names."""
        return {"listed": self.listed, "starts": self.starts, "scores": self.scores, "least": self.least}

    def entries(self, head: int, subspace: int, centroid: int) -> tuple[NDArray[np.int64], NDArray[np.float16]]:
        """A list's keys, ascending, and their scores: both [list_len]."""
        where = head, subspace, centroid
        return np.flatnonzero(unpack_bits(self.listed[where])), self.scores[where][: self.list_len]


def ordinals(bits: Any) -> Any:
    """Of scores, as the int16 bits of their float16, numpy's or torch's: integers in their order; -0.0 is below 0.0.

    There must be no NaN. The bits come back the same way.
    """
    return bits ^ (bits >> 15 & 0x7FFF)


def num_chunks(context_len: int) -> int:
    return -(-context_len // CHUNK_KEYS)


def score_room(list_len: int) -> int:
    """What a list's scores are filled up to."""
    return -(-list_len // SCORE_UNIT) * SCORE_UNIT


def list_shapes(list_len: int, context_len: int) -> dict[str, tuple[int, ...]]:
    """What the arrays of a table, by their names, have of each list."""
    chunks = num_chunks(context_len)
    return {"listed": (chunks, CHUNK_KEYS // 32), "starts": (chunks,), "scores": (score_room(list_len),), "least": ()}


def list_bytes(list_len: int, context_len: int) -> int:
    """What a search reads of a list."""
    return num_chunks(context_len) * (CHUNK_KEYS // 8 + 4) + 2 * score_room(list_len)


def lists_of(listed: NDArray[np.bool_], scores: NDArray[np.float16]) -> ListTable:
    """Lists of keys [num_index_heads, num_subspaces, num_centroids, context_len], of each of these equally many.

    scores: of all keys, likewise; of those that are not listed they may be anything.
    """
    *lists, context_len = listed.shape
    list_len = int(np.count_nonzero(listed)) // max(1, int(np.prod(lists)))
    chunks = np.zeros((*lists, num_chunks(context_len) * CHUNK_KEYS), np.bool_)
    chunks[..., :context_len] = listed
    chunks = chunks.reshape(*lists, -1, CHUNK_KEYS)
    counts = np.count_nonzero(chunks, axis=-1).astype(np.int32)
    held = np.zeros((*lists, score_room(list_len)), np.float16)
    held[..., :list_len] = scores[listed].reshape(*lists, list_len)
    # by integers: numpy takes a hundred times as long to compare float16
    least = ordinals(held[..., :list_len].view(np.int16)).min(axis=-1, initial=np.iinfo(np.int16).max)
    return ListTable(
        listed=pack_bits(chunks),
        starts=np.cumsum(counts, axis=-1, dtype=np.int32) - counts,
        scores=held,
        least=ordinals(least).view(np.float16),
        list_len=list_len,
        context_len=context_len,
    )
