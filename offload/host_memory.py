"""Large allocations of host memory as anonymous mappings, touched by several threads to fault pages in quickly."""

import mmap
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_PIECE_BYTES = 64 << 20  # bytes that a thread fills at a time
_MAX_THREADS = 16


def allocate_rows(num_layers: int, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
    """Allocate zeros of that shape for each layer; every layer is page-aligned."""
    layers = [_map_pages(torch.Size(shape).numel() * dtype.itemsize) for _ in range(num_layers)]
    _copy_in_pieces([np.broadcast_to(np.uint8(0), len(layer)) for layer in layers], layers)
    return [torch.from_numpy(layer).view(dtype).view(*shape) for layer in layers]


def copy_rows(layers: Sequence[Tensor]) -> list[Tensor]:
    """Copy layers into newly mapped memory; the sources may be read-only memory maps."""
    sources = [layer.reshape(-1).view(torch.uint8).numpy() for layer in layers]
    copies = [_map_pages(len(source)) for source in sources]
    _copy_in_pieces(sources, copies)
    return [torch.from_numpy(c).view(s.dtype).view(s.shape) for c, s in zip(copies, layers, strict=True)]


def sparse_zeros(num_bytes: int) -> NDArray[np.uint8]:
    """Allocate zeros that take 4 KiB of memory per page written; numpy's take a huge page of 2 MiB."""
    return _map_pages(num_bytes, "MADV_NOHUGEPAGE")


def _map_pages(num_bytes: int, advice: str = "MADV_HUGEPAGE") -> NDArray[np.uint8]:
    # private, because shared mappings, mmap's default, never get huge pages
    pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, advice):
        with suppress(OSError):  # a kernel without huge pages refuses both
            pages.madvise(getattr(mmap, advice))
    return np.frombuffer(pages, np.uint8, count=num_bytes)


def _copy_in_pieces(sources: Sequence[NDArray[np.uint8]], targets: Sequence[NDArray[np.uint8]]) -> None:
    """Copy in threads. numpy's copies release the GIL and, unlike torch's, start no threads."""
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        pieces = [
            pool.submit(np.copyto, target[begin : begin + _PIECE_BYTES], source[begin : begin + _PIECE_BYTES])
            for source, target in zip(sources, targets, strict=True)
            for begin in range(0, len(target), _PIECE_BYTES)
        ]
        for piece in pieces:
            piece.result()
