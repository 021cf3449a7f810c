"""Bit masks over keys, in words of 32 bits: key 32 * w + i is bit i of word w."""

import numpy as np
from numpy.typing import NDArray


def pack_bits(bits: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """[..., 32 * n] -> [..., n]."""
    return np.packbits(bits, axis=-1, bitorder="little").view("<u4").astype(np.uint32)


def unpack_bits(words: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """The inverse of `pack_bits`."""
    as_bytes = np.ascontiguousarray(words, "<u4").view(np.uint8)
    return np.unpackbits(as_bytes, axis=-1, bitorder="little").view(np.bool_)
