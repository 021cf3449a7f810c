"""Sketches of synthetic keys: some directions matter more than others, and values partly depend on keys."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from csattn.sketch import SketchIndex
from csattn.sketch.codes import BLOCK_KEYS, coord_bits, pack_codes, pack_marks
from csattn.sketch.reference import encode, fit

Floats = NDArray[np.float32]


def make_heads(
    rng: np.random.Generator, num_kv_heads: int, group_size: int, num_rows: int, head_dim: int
) -> tuple[Floats, Floats, Floats]:
    """Return q [num_q_heads, num_rows, head_dim], and k and v [num_kv_heads, num_rows, head_dim]."""
    shape = num_kv_heads, num_rows, head_dim
    spectrum = 1.0 / (1.0 + np.arange(head_dim))
    turn = np.stack([np.linalg.qr(rng.standard_normal((head_dim, head_dim)))[0] for _ in range(num_kv_heads)])
    k = 4.0 * rng.standard_normal(shape) * spectrum @ turn + 3.0 * rng.standard_normal((num_kv_heads, 1, head_dim))
    v = 0.2 * k @ rng.standard_normal((num_kv_heads, head_dim, head_dim)) + rng.standard_normal(shape)
    q = rng.standard_normal((num_kv_heads * group_size, num_rows, head_dim)) * 2.0
    q += 2.0 * rng.standard_normal((num_kv_heads * group_size, 1, head_dim))
    return q.astype(np.float32), k.astype(np.float32), v.astype(np.float32)


def make_sketch(
    q: Floats,  # [num_q_heads, num_rows, head_dim]
    k: Floats,  # [num_kv_heads, num_rows, head_dim]
    v: Floats,
    num_fine: int = 2,
    num_coarse: int = 1,
    segment_starts: tuple[int, ...] = (0,),
) -> SketchIndex:
    """Return the sketch that the reference builds of these heads."""
    bits = coord_bits(num_fine, num_coarse)
    assert all(start % BLOCK_KEYS == 0 for start in segment_starts)
    num_heads, num_rows, _ = k.shape
    ends = *segment_starts[1:], num_rows
    codes = np.zeros((num_heads, num_rows, len(bits)), np.uint8)
    marked = np.zeros((num_heads, num_rows), np.bool_)
    transforms = []
    for head, queries in enumerate(q.reshape(num_heads, -1, q.shape[-1])):
        of_head = []
        for start, end in zip(segment_starts, ends, strict=True):
            made = fit(queries, k[head, start:end], v[head, start:end], bits)
            codes[head, start:end] = encode(
                k[head, start:end], made.key_mean, made.key_exponent, made.key_transform, bits
            )
            marked[head, start + made.marked] = True
            of_head.append(made)
        transforms.append(of_head)

    def stacked(name: str) -> Any:
        return np.stack([np.stack([getattr(made, name) for made in of_head]) for of_head in transforms])

    return SketchIndex(
        codes=pack_codes(codes, num_fine, num_coarse),
        marks=pack_marks(marked),
        num_fine=num_fine,
        segment_starts=np.array(segment_starts, np.int32),
        key_mean=stacked("key_mean"),
        query_transform=stacked("query_transform"),
        value_mean=stacked("value_mean"),
        value_transform=stacked("value_transform"),
        context_len=num_rows,
    )
