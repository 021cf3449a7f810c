"""The table as dense rows: a 4- or 8-bit score of every key for every centroid (L = N)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

KEYS_PER_BLOCK = 64  # rows are padded to whole blocks; a block of 4-bit codes is 32 bytes, of 8-bit codes 64


@dataclass(frozen=True, slots=True)
class RowTable:
    """Score of key i for a centroid = scales[...] * code(i), code in [-7, 7] (4 bits) or [-127, 127] (8 bits).

    8 bits: `codes[..., i]` is the code, int8. 4 bits: byte j of block b holds code + 8 of key 64*b + j in its
    low half and of key 64*b + 32 + j in its high half, uint8. Padding keys have code 0.
    """

    codes: NDArray[np.int8] | NDArray[np.uint8]  # [num_index_heads, num_subspaces, num_centroids, row_bytes]
    scales: NDArray[np.float32]  # [num_index_heads, num_subspaces, num_centroids]
    context_len: int

    @property
    def score_bits(self) -> int:
        return 8 if self.codes.dtype == np.int8 else 4

    @property
    def largest_code(self) -> int:
        return 127 if self.score_bits == 8 else 7


def row_bytes(context_len: int, score_bits: int) -> int:
    """Bytes of one row, padding included."""
    num_blocks = -(-context_len // KEYS_PER_BLOCK)
    return num_blocks * KEYS_PER_BLOCK * score_bits // 8


def pack_codes(codes: NDArray[np.int8], score_bits: int) -> NDArray[np.int8] | NDArray[np.uint8]:
    """Lay out codes [..., context_len] int8 as rows [..., row_bytes]."""
    context_len = codes.shape[-1]
    padding = -context_len % KEYS_PER_BLOCK
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, padding)])
    if score_bits == 8:
        return padded
    blocks = (padded.view(np.uint8) + np.uint8(8)).reshape(*codes.shape[:-1], -1, 2, KEYS_PER_BLOCK // 2)
    return (blocks[..., 0, :] | blocks[..., 1, :] << 4).reshape(*codes.shape[:-1], -1)


def unpack_codes(rows: NDArray[np.int8] | NDArray[np.uint8], context_len: int) -> NDArray[np.int8]:
    """The codes [..., context_len] int8 of rows [..., row_bytes]: the inverse of `pack_codes`."""
    if rows.dtype == np.int8:
        return rows[..., :context_len].astype(np.int8)
    blocks = rows.reshape(*rows.shape[:-1], -1, 1, KEYS_PER_BLOCK // 2)
    halves = np.concatenate([blocks & 15, blocks >> 4], axis=-2).astype(np.int8) - np.int8(8)
    return halves.reshape(*rows.shape[:-1], -1)[..., :context_len]
