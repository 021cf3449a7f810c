"""How fast files can be read without the page cache: sequentially, and in random blocks."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from offload.disk import BLOCK_BYTES, DiskFile, aligned_bytes

_SECONDS = 1.5  # of each measurement


def disk_speed(paths: Sequence[Path], num_readers: int = 8) -> dict[str, object]:
    """Return the best rates over several numbers of readers. paths: files of some megabytes."""
    files = [DiskFile(path) for path in paths]
    blocks = [path.stat().st_size // BLOCK_BYTES for path in paths]
    try:
        sequential = [_rate(files, blocks, readers, 256, False) for readers in (1, 2, num_readers)]
        random = [_rate(files, blocks, readers, 1, True) for readers in (1, num_readers, 2 * num_readers)]
    finally:
        for file in files:
            file.close()
    return {
        "direct": all(file.direct for file in files),
        "sequential_mbps": round(max(sequential) / 1e6, 1),
        "random_4k_mbps": round(max(random) / 1e6, 1),
        "random_4k_per_s": round(max(random) / BLOCK_BYTES),
    }


def _rate(files: list[DiskFile], blocks: list[int], num_readers: int, blocks_each: int, shuffled: bool) -> float:
    """Return the bytes per second read in parts of blocks_each blocks."""
    parts = [
        (file, first * BLOCK_BYTES)
        for file, count in zip(files, blocks, strict=True)
        for first in range(0, count - blocks_each + 1, blocks_each)
    ]
    if shuffled:
        order = np.random.default_rng(0).permutation(len(parts))
        parts = [parts[i] for i in order]
    deadline = time.perf_counter() + _SECONDS

    def read(own_share: list[tuple[DiskFile, int]]) -> int:
        into, num_bytes = aligned_bytes(blocks_each * BLOCK_BYTES), 0
        for file, offset in own_share:
            if time.perf_counter() > deadline:
                break
            file.read(into, offset)
            num_bytes += len(into)
        return num_bytes

    started = time.perf_counter()
    with ThreadPoolExecutor(num_readers) as readers:
        total = sum(readers.map(read, [parts[i::num_readers] for i in range(num_readers)]))
    return total / (time.perf_counter() - started)
