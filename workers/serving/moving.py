"""An artifact's files between the disk and the system's page cache: read before they are needed, dropped after.

Nothing here fails: who reads them in earnest meets the error again, and tells of it.
"""

import ctypes
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

_PIECE_BYTES = 4 << 20  # of whole pages


def read_index(artifact: Path) -> None:
    """All that is read of a context but its rows."""
    for path in _files(artifact):
        if ".kv." not in path.name:
            _read(path, lambda: False)


def read_rows(artifact: Path, is_over: Callable[[], bool]) -> None:
    """Layer by layer, until they are no longer wanted."""
    for path in _files(artifact):
        if ".kv." in path.name:
            _read(path, is_over)


def drop_pages(artifact: Path) -> None:
    """Give back the memory of what is no longer mapped, by this process or another."""
    if not hasattr(os, "posix_fadvise"):  # not on macOS
        return
    for path in _files(artifact):
        with suppress(OSError), path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _files(artifact: Path) -> list[Path]:
    """In their order; none of an artifact that is gone."""
    try:
        return sorted(artifact.iterdir())
    except OSError:
        return []


def _read(path: Path, is_over: Callable[[], bool]) -> None:
    """What of it is not in memory."""
    # who shortens a file, say
    with suppress(OSError, ValueError), path.open("rb", buffering=0) as file:
        for start in _missing(path, os.fstat(file.fileno()).st_size):
            if is_over():
                return
            os.pread(file.fileno(), _PIECE_BYTES, start)


def _missing(path: Path, num_bytes: int) -> list[int]:
    """Where pieces begin of which some pages are not in memory; all pieces, where that is not told."""
    starts = range(0, num_bytes, _PIECE_BYTES)
    if not num_bytes or not _is_told(path):
        return list(starts)
    is_there = np.zeros(-(-num_bytes // mmap.PAGESIZE), np.uint8)
    mapped = np.memmap(path, np.uint8, "r", shape=num_bytes)
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    if mincore(*map(ctypes.c_void_p, (mapped.ctypes.data, num_bytes, is_there.ctypes.data))):
        return list(starts)
    in_piece = _PIECE_BYTES // mmap.PAGESIZE
    return [start for number, start in enumerate(starts) if not (is_there[number * in_piece :][:in_piece] & 1).all()]


def _is_told(path: Path) -> bool:
    """Linux tells a file's owner and who may write it which pages are in memory, and all others that all are."""
    return path.stat().st_uid == os.geteuid() or os.access(path, os.W_OK)
