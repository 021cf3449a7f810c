"""The memory layout of a sketch's codes: words with a key's fine and coarse codes, interleaved in blocks of 64 keys."""

import numpy as np
from numpy.typing import NDArray

from csattn.bits import pack_bits, unpack_bits

BLOCK_KEYS = 64  # a sketch is padded to whole blocks, with codes of 0
FINE_BITS, COARSE_BITS = 4, 2  # of a coordinate's code
FINE_CODES, COARSE_CODES = 32 // FINE_BITS, 32 // COARSE_BITS  # in a word


def num_blocks(num_keys: int) -> int:
    return -(-num_keys // BLOCK_KEYS)


def num_coords(num_fine: int, num_coarse: int) -> int:
    """The number of coordinates in num_fine words of 4-bit codes and num_coarse words of 2-bit codes."""
    return FINE_CODES * num_fine + COARSE_CODES * num_coarse


def coord_bits(num_fine: int, num_coarse: int) -> NDArray[np.int64]:
    """The number of bits of each coordinate's code, fine ones first: [num_coords]."""
    return np.repeat([FINE_BITS, COARSE_BITS], [FINE_CODES * num_fine, COARSE_CODES * num_coarse])


def pack_codes(
    codes: NDArray[np.uint8],  # [..., num_keys, num_coords], each below 2**bits of its coordinate
    num_fine: int,
    num_coarse: int,
) -> NDArray[np.uint32]:
    """Pack codes into words [..., num_blocks, num_fine + num_coarse, BLOCK_KEYS].

    Bits b, b + 1, ... of byte i of a word hold coordinate 4 * (b / bits) + i of the word. So one shift and one mask
    extract four codes, those of neighbouring coordinates, from a word.
    """
    *lead, num_keys, _ = codes.shape
    blocks, split = num_blocks(num_keys), FINE_CODES * num_fine
    padded = np.pad(codes, [(0, 0)] * len(lead) + [(0, blocks * BLOCK_KEYS - num_keys), (0, 0)])
    words = [_pack(padded[..., :split], FINE_BITS), _pack(padded[..., split:], COARSE_BITS)]
    by_key = np.concatenate(words, axis=-1).reshape(*lead, blocks, BLOCK_KEYS, num_fine + num_coarse)
    return np.ascontiguousarray(by_key.swapaxes(-1, -2))


def unpack_codes(
    packed: NDArray[np.uint32],  # [..., num_blocks, num_fine + num_coarse, BLOCK_KEYS]
    num_keys: int,
    num_fine: int,
) -> NDArray[np.uint8]:
    """The inverse of `pack_codes`: [..., num_keys, num_coords]."""
    *lead, blocks, words, _ = packed.shape
    by_key = packed.swapaxes(-1, -2).reshape(*lead, blocks * BLOCK_KEYS, words)[..., :num_keys, :]
    return np.concatenate(
        [_unpack(by_key[..., :num_fine], FINE_BITS), _unpack(by_key[..., num_fine:], COARSE_BITS)], axis=-1
    )


def pack_marks(marked: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """[num_heads, num_keys] -> [num_heads, num_blocks, 2]: key 32 j + i of a block is bit i of its word j."""
    num_heads, num_keys = marked.shape
    padded = np.pad(marked, [(0, 0), (0, num_blocks(num_keys) * BLOCK_KEYS - num_keys)])
    return pack_bits(padded).reshape(num_heads, -1, BLOCK_KEYS // 32)


def unpack_marks(marks: NDArray[np.uint32], num_keys: int) -> NDArray[np.bool_]:
    """The inverse of `pack_marks`."""
    return unpack_bits(marks.reshape(len(marks), -1))[:, :num_keys]


def _pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Pack [..., n] codes into [..., n * bits / 32] words."""
    grouped = codes.reshape(*codes.shape[:-1], codes.shape[-1] * bits // 32, 8 // bits, 4)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    as_bytes = np.bitwise_or.reduce(grouped << shifts, axis=-2)
    return np.ascontiguousarray(as_bytes, np.uint8).view("<u4")[..., 0].astype(np.uint32)


def _unpack(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    as_bytes = np.ascontiguousarray(words, "<u4")[..., None].view(np.uint8)[..., None, :]
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes = (as_bytes >> shifts) & np.uint8(2**bits - 1)
    return codes.reshape(*words.shape[:-1], words.shape[-1] * 32 // bits)
