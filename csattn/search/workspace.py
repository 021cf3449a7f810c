"""What a search writes to: the caller's selections, and scratch memory that is used again and again."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.selection import Selection

# kernels write whole blocks: up to 128 keys of the context, and 64 of the tail from any key on
PADDING = 256


@dataclass(frozen=True, slots=True)
class TokenSelections:
    """One layer's selections of several tokens."""

    kv_indices: NDArray[np.int32]  # [num_tokens, num_index_heads, top_k], each row as in Selection
    valid_len: NDArray[np.int32]  # [num_tokens, num_index_heads]

    def __len__(self) -> int:
        return len(self.kv_indices)

    def __getitem__(self, token: int) -> Selection:
        return Selection(self.kv_indices[token], self.valid_len[token])


def empty_selection(num_index_heads: int, top_k: int) -> Selection:
    """A selection of no rows, with room for top_k per head."""
    return Selection(np.full((num_index_heads, top_k), -1, np.int32), np.zeros(num_index_heads, np.int32))


def empty_token_selections(num_tokens: int, num_index_heads: int, top_k: int) -> TokenSelections:
    """Selections of no rows for several tokens, with room for top_k per head."""
    shape = num_tokens, num_index_heads
    return TokenSelections(np.full((*shape, top_k), -1, np.int32), np.zeros(shape, np.int32))


@dataclass(slots=True)
class SearchWorkspace:
    """Scratch memory of one thread's searches, over any layers: it grows to the largest search it has served.

    Sharing one among layers is not only smaller: it stays in the cache.
    """

    _memory: NDArray[np.uint8] = field(default_factory=lambda: np.empty(0, np.uint8))

    def arrays(
        self, score_type: np.dtype[Any], group_size: int, num_keys: int
    ) -> tuple[NDArray[Any], int, NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Scores [group_size * stride], stride, and three int32 arrays [stride], with whatever was left in them."""
        stride = -(-num_keys // PADDING) * PADDING + PADDING
        score_bytes = score_type.itemsize * group_size * stride
        self.reserve(score_bytes + 3 * 4 * stride)
        scores = self._memory[:score_bytes].view(score_type)
        worth, copied, copied_worth = (
            self._memory[start : start + 4 * stride].view(np.int32)
            for start in range(score_bytes, score_bytes + 3 * 4 * stride, 4 * stride)
        )
        return scores, stride, worth, copied, copied_worth

    def reserve(self, num_bytes: int) -> NDArray[np.uint8]:
        """At least num_bytes of scratch memory, with whatever was left in it."""
        if len(self._memory) < num_bytes:
            self._memory = np.empty(num_bytes + num_bytes // 4, np.uint8)  # a tail grows by single rows
        return self._memory

    def __repr__(self) -> str:
        return f"<SearchWorkspace {len(self._memory)} bytes>"
