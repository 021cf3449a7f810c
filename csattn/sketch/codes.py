"""How the codes of a sketch lie in memory: eight of a key's 4-bit codes in a word, 64 keys side by side."""

import numpy as np
from numpy.typing import NDArray

CODE_BITS = 4
LARGEST_CODE = 2**CODE_BITS - 1  # of a stored code u; it stands for the odd number 2 u - 15
BLOCK_KEYS = 64  # a sketch is padded to whole blocks; codes of padding are 0
WORD_CODES = 8


def num_blocks(num_keys: int) -> int:
    return -(-num_keys // BLOCK_KEYS)


def num_words(num_coords: int) -> int:
    """Words of a key."""
    return -(-num_coords // WORD_CODES)


def pack_codes(
    codes: NDArray[np.uint8],  # [..., num_keys, num_coords], in [0, 15]
) -> NDArray[np.uint32]:
    """Lay out as [..., num_blocks, num_words, BLOCK_KEYS].

    Byte b of word w holds coordinate 8 w + b in its low half and 8 w + 4 + b in its high half.
    """
    *lead, num_keys, num_coords = codes.shape
    blocks, words = num_blocks(num_keys), num_words(num_coords)
    room = [(0, 0)] * len(lead) + [(0, blocks * BLOCK_KEYS - num_keys), (0, words * WORD_CODES - num_coords)]
    halves = np.pad(codes, room).reshape(*lead, blocks, BLOCK_KEYS, words, 2, 4)
    as_bytes = halves[..., 0, :] | halves[..., 1, :] << CODE_BITS
    return np.ascontiguousarray(np.ascontiguousarray(as_bytes).view("<u4")[..., 0].swapaxes(-1, -2), np.uint32)


def unpack_codes(
    packed: NDArray[np.uint32],  # [..., num_blocks, num_words, BLOCK_KEYS]
    num_keys: int,
    num_coords: int,
) -> NDArray[np.uint8]:
    """The inverse of `pack_codes`: [..., num_keys, num_coords]."""
    *lead, blocks, words, _ = packed.shape
    as_bytes = np.ascontiguousarray(packed.swapaxes(-1, -2), "<u4")[..., None].view(np.uint8)
    codes = np.stack([as_bytes & LARGEST_CODE, as_bytes >> CODE_BITS], axis=-2)
    return codes.reshape(*lead, blocks * BLOCK_KEYS, words * WORD_CODES)[..., :num_keys, :num_coords]
