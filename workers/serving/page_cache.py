"""Moves an artifact's files into the system's page cache before they are needed, and out of it afterwards.

Nothing here raises: whoever reads the files for their content meets the error again, and reports it.
"""

import ctypes
import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

_PIECE_BYTES = 4 << 20  # a multiple of the page size


def read_index(artifact: Path) -> None:
    """Read all files of an artifact but its KV rows."""
    for path in _files(artifact):
        if ".kv." not in path.name:
            _read(path, lambda: False)


def read_rows(artifact: Path, is_over: Callable[[], bool]) -> None:
    """Read the KV rows, layer by layer, until is_over() is true."""
    for path in _files(artifact):
        if ".kv." in path.name:
            _read(path, is_over)


def drop_pages(artifact: Path) -> None:
    """Drop the artifact's pages from the page cache, except those that any process still maps."""
    if not hasattr(os, "posix_fadvise"):  # not on macOS
        return
    for path in _files(artifact):
        with suppress(OSError), path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _files(artifact: Path) -> list[Path]:
    """The artifact's files, sorted by name; none if it is gone."""
    try:
        return sorted(artifact.iterdir())
    except OSError:
        return []


def _read(path: Path, is_over: Callable[[], bool]) -> None:
    """Read the pieces of a file that are not in memory."""
    # errors if another process shortens or removes the file meanwhile
    with suppress(OSError, ValueError), path.open("rb", buffering=0) as file:
        for start in _missing(path, os.fstat(file.fileno()).st_size):
            if is_over():
                return
            os.pread(file.fileno(), _PIECE_BYTES, start)


def _missing(path: Path, num_bytes: int) -> list[int]:
    """Offsets of the pieces with pages that are not in memory; of all pieces if mincore cannot be relied on."""
    starts = range(0, num_bytes, _PIECE_BYTES)
    if not num_bytes or not _reports_residency(path):
        return list(starts)
    is_resident = np.zeros(-(-num_bytes // mmap.PAGESIZE), np.uint8)
    mapped = np.memmap(path, np.uint8, "r", shape=num_bytes)
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    if mincore(*map(ctypes.c_void_p, (mapped.ctypes.data, num_bytes, is_resident.ctypes.data))):
        return list(starts)
    in_piece = _PIECE_BYTES // mmap.PAGESIZE
    return [start for number, start in enumerate(starts) if not (is_resident[number * in_piece :][:in_piece] & 1).all()]


def _reports_residency(path: Path) -> bool:
    """Whether mincore reports truthfully: Linux does so for a file's owner and writers; to others, all is resident."""
    return path.stat().st_uid == os.geteuid() or os.access(path, os.W_OK)
