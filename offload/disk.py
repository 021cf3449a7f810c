"""Reads of files at an offset, bypassing the page cache (O_DIRECT) where the file system allows it."""

import errno
import mmap
import os
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from offload.errors import DiskError

BLOCK_BYTES = 4096  # offsets, lengths and memory of direct reads are multiples of it


def aligned_bytes(num_bytes: int) -> NDArray[np.uint8]:
    """Allocate page-aligned memory for direct reads; it takes no physical memory until it is touched."""
    pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, np.uint8, count=num_bytes)


class DiskFile:
    """An open file for reads by any number of threads.

    `direct`: whether reads bypass the page cache. If not, the system may cache what was read in reclaimable memory.
    """

    def __init__(self, path: Path):
        """Open the file for reading. Raises DiskError."""
        self._path = path
        try:
            self._fd, self.direct = _open(path)
        except OSError as error:
            advice = "check the file and its permissions"
            if error.errno in (errno.EMFILE, errno.ENFILE):
                advice = "close other contexts, or raise the limit of open files (`ulimit -n`)"
            raise DiskError(f"cannot open {path}: {_reason(error)}; {advice}") from error
        self._close = weakref.finalize(self, os.close, self._fd)  # also if `close` is never called

    def read(self, into: NDArray[np.uint8], offset: int, at_least: int | None = None) -> None:
        """Fill `into` from `offset` on, both multiples of BLOCK_BYTES. Raises DiskError.

        The file must have `at_least` of these bytes. Default: all.
        """
        wanted, done = len(into) if at_least is None else at_least, 0
        while done < wanted:
            try:
                count = os.preadv(self._fd, [into[done:].data], offset + done)
            except OSError as error:
                raise DiskError(f"cannot read {self._path} at {offset:,}: {_reason(error)}; check its disk") from error
            done += count
            if count == 0 or (self.direct and done < wanted and done % BLOCK_BYTES):
                raise DiskError(
                    f"{self._path} ends at byte {offset + done:,} and should extend to {offset + wanted:,}: it was "
                    "shortened while it was in use; build it again"
                )

    def close(self) -> None:
        """Close the file. No read may be in progress."""
        self._close()
        self._fd = -1


def _open(path: Path) -> tuple[int, bool]:
    """Open with O_DIRECT if it works: some file systems refuse it at `open`, others at the first read."""
    flags, direct = os.O_RDONLY | os.O_CLOEXEC, getattr(os, "O_DIRECT", 0)
    if direct:
        fd = -1
        try:
            fd = os.open(path, flags | direct)
            os.preadv(fd, [aligned_bytes(BLOCK_BYTES).data], 0)
            return fd, True
        except OSError as error:
            if fd >= 0:
                os.close(fd)
            if error.errno != errno.EINVAL:
                raise
    fd = os.open(path, flags)
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # turns the system's read-ahead off
    return fd, False


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
