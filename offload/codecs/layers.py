"""Encode the KV of a layer piece by piece, so that it is never copied as a whole in float32."""

import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from offload.codecs.codec import KvCodec

_PIECE_ROWS = 4096  # rows that a thread encodes at a time


def encode_layer(
    kv: Tensor,  # [num_kv_heads, context_len, 2, head_dim] of any float dtype
    codec: KvCodec,
    out: Tensor | None = None,  # like the result, to be written; its rows may be longer: their last bytes do not change
) -> Tensor:
    """Encode to [num_kv_heads, context_len, row_bytes] uint8. Raises CodecError for values that do not fit."""
    num_kv_heads, context_len = kv.shape[:2]
    coded = torch.empty(num_kv_heads, context_len, codec.row_bytes, dtype=torch.uint8) if out is None else out
    pieces = [(head, first) for head in range(num_kv_heads) for first in range(0, context_len, _PIECE_ROWS)]

    def encode(piece: tuple[int, int]) -> None:
        head, first = piece
        rows = slice(first, first + _PIECE_ROWS)
        coded[head, rows, : codec.row_bytes] = torch.from_numpy(codec.encode(kv[head, rows].float().numpy()))

    with ThreadPoolExecutor(_num_cpus()) as pool:
        for _ in pool.map(encode, pieces):
            pass
    return coded


def _num_cpus() -> int:
    """Return how many CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
