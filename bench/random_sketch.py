"""Sketches with random codes, for measuring speed: the time of scores does not depend on the codes' values, and that
of choices only by what it samples."""

import numpy as np
from numpy.typing import NDArray

from csattn.config import SketchConfig
from csattn.sketch import SketchIndex
from csattn.sketch.codes import BLOCK_KEYS, num_blocks, num_coords, pack_marks
from csattn.sketch.index import MARKED_SHARE

PATTERN_WORDS = 1_000_003  # a pattern of prime length saves minutes of random numbers


def random_sketch(context_len: int, num_heads: int, head_dim: int, seed: int) -> SketchIndex:
    """Make a sketch of the default configuration, with normally distributed codes."""
    config, rng = SketchConfig(), np.random.default_rng(seed)
    num_fine, num_coarse = config.words(head_dim)
    starts = np.array(config.segment_starts(context_len), np.int32)
    coords, shape = num_coords(num_fine, num_coarse), (num_heads, len(starts))
    codes = np.empty((num_heads, num_blocks(context_len), num_fine + num_coarse, BLOCK_KEYS), np.uint32)
    codes[:, :, :num_fine] = np.resize(_bell_shaped_words(rng, 4), codes[:, :, :num_fine].shape)
    codes[:, :, num_fine:] = np.resize(_bell_shaped_words(rng, 2), codes[:, :, num_fine:].shape)
    energy = 1 / (1 + np.arange(coords))
    return SketchIndex(
        codes=codes,
        marks=pack_marks(_marks(num_heads, context_len, starts)),
        num_fine=num_fine,
        segment_starts=starts,
        key_mean=rng.standard_normal((*shape, head_dim), dtype=np.float32),
        query_transform=(0.2 * rng.standard_normal((*shape, head_dim, coords)) * np.sqrt(energy)).astype(np.float16),
        value_mean=rng.standard_normal((*shape, head_dim), dtype=np.float32),
        value_transform=(0.1 * rng.standard_normal((*shape, coords, head_dim))).astype(np.float16),
        context_len=context_len,
    )


def _marks(num_heads: int, context_len: int, starts: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Mark as many rows of each segment as a build does, evenly spaced."""
    marked = np.zeros((num_heads, context_len), np.bool_)
    for start, end in zip(starts, [*starts[1:], context_len], strict=True):
        marked[:, start + MARKED_SHARE - 1 : end : MARKED_SHARE] = True
    return marked


def _bell_shaped_words(rng: np.random.Generator, bits: int) -> NDArray[np.uint32]:
    words = np.zeros(PATTERN_WORDS, np.uint32)
    for shift in range(0, 32, bits):
        codes = rng.normal(2 ** (bits - 1), 2 ** (bits - 2), PATTERN_WORDS).clip(0, 2**bits - 1)
        words |= codes.astype(np.uint32) << np.uint32(shift)
    return words
