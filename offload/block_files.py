"""A store of byte blocks as files of one directory, within a budget: a block is found whole, or not at all.

Several processes may share the directory. The least recently used files are removed first; a file's mtime is the time
of its last use. Files are not fsynced: they survive a killed process, but maybe not a power loss. Every read checks the
block's checksum, and an altered block counts as not found.
"""

import hashlib
import logging
import math
import os
import secrets
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SUFFIX, PARTIAL = ".block", ".partial"
_HEAD = struct.Struct("<8sIQ32s12x")  # magic, bytes of the label and of the data, SHA-256 of all that follows
_MAGIC = b"csblock1"
_STALE_S = 3600.0  # a partial file of this age was abandoned
_AHEAD_S = 86400.0  # how far another machine's clock may be ahead
_LOG_EVERY_S = 600.0  # between two log lines on refused writes
_ROOM = 0.9  # share of the budget that an eviction keeps in use, so that not every write scans the directory
_log = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]


class BlockFiles:
    """A directory of blocks. Any thread may read; only one may write."""

    def __init__(self, directory: Path, find_budget: Callable[[int], int]) -> None:
        """find_budget: returns the bytes that all files may take, given the bytes that they take."""
        self._directory, self._find_budget = directory, find_budget
        self._sizes: dict[Path, int] = {}  # from the last scan, and from writes since
        self._new_bytes = 0  # of these writes
        self.num_refused = 0  # blocks that could not be written
        self._last_logged_at = -math.inf  # when a refused write was logged last
        self._scan()

    def __repr__(self) -> str:
        return f"<BlockFiles {len(self._sizes)} of {self.num_bytes:,} bytes in {self._directory}>"

    @property
    def num_blocks(self) -> int:
        return len(self._sizes)

    @property
    def num_bytes(self) -> int:
        return sum(list(self._sizes.values()))

    def holds(self, key: str, label: bytes) -> bool:
        """Return whether the block's file exists, by its header and label: two blocks may have the same key."""
        try:
            with self._path(key).open("rb") as file:
                magic, label_len, data_len, _ = _HEAD.unpack(file.read(_HEAD.size))
                num_bytes = _HEAD.size + label_len + data_len
                if magic != _MAGIC or label_len != len(label) or os.fstat(file.fileno()).st_size != num_bytes:
                    return False
                file.seek(data_len, os.SEEK_CUR)
                return file.read() == label
        except (OSError, struct.error):
            return False

    def read(self, key: str, label: bytes) -> Bytes | None:
        """Return the block's bytes, or None if it is missing or altered.

        An altered file is removed, but not one that did not fit into memory.
        """
        path = self._path(key)
        try:
            data = np.fromfile(path, np.uint8)
        except (OSError, MemoryError):
            return None
        fault = fault_of(data)
        if fault is None:
            label_start = _HEAD.size + _HEAD.unpack(data[: _HEAD.size].tobytes())[2]
            if data[label_start:].tobytes() != label:
                return None  # another block with the same key
            self.use(key)
            return data[_HEAD.size : label_start].copy()  # a view would keep the label in memory
        _log.warning("%s %s: it is removed, and computed again when it is needed", path, fault)
        with suppress(OSError):
            path.unlink()
        self._sizes.pop(path, None)
        return None

    def use(self, key: str) -> None:
        """Mark the block's file, if it exists, as used now."""
        with suppress(OSError):
            os.utime(self._path(key))

    def write(self, key: str, label: bytes, data: Bytes) -> bool:
        """Write a block, and return whether it is stored. The write is atomic: a failure leaves no partial block."""
        path = self._path(key)
        num_bytes = _HEAD.size + len(label) + data.nbytes
        if num_bytes > (budget_bytes := self._find_budget(self.num_bytes)):
            self.num_refused += 1
            return False
        # scans also after so many writes of its own: other processes may have written as much
        if self.num_bytes + num_bytes > budget_bytes or self._new_bytes > (1 - _ROOM) * budget_bytes:
            self._make_room(num_bytes, budget_bytes)
        partial = path.with_name(f"{path.stem}.{secrets.token_hex(4)}{PARTIAL}")
        digest = hashlib.sha256(data.data)
        digest.update(label)
        head = _HEAD.pack(_MAGIC, len(label), data.nbytes, digest.digest())
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                file.write(head)
                file.write(data.data)
                file.write(label)
            partial.replace(path)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            self.num_refused += 1
            if (now := time.monotonic()) >= self._last_logged_at + _LOG_EVERY_S:
                self._last_logged_at = now
                message = "blocks are not written to %s: %s (%d so far)"
                _log.warning(message, self._directory, error.strerror or error, self.num_refused)
            return False
        self._sizes[path] = num_bytes
        self._new_bytes += num_bytes
        return True

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}{SUFFIX}"

    def _make_room(self, num_bytes: int, budget_bytes: int) -> None:
        """Scan the directory and, without room in it, remove the least recently used files, of any process."""
        used_at = self._scan()
        left = self.num_bytes
        if left + num_bytes <= budget_bytes:
            return
        for path in sorted(self._sizes, key=lambda path: used_at.get(path, 0.0)):
            if left + num_bytes <= _ROOM * budget_bytes:
                return
            with suppress(OSError):
                path.unlink()
            left -= self._sizes.pop(path, 0)  # a reader may have removed it

    def _scan(self) -> dict[Path, float]:
        """Scan the directory, remove stale partial files, and return when each block was used last.

        A block whose time is in the future, because the clock was set back, is left out: it is removed first.
        """
        used_at: dict[Path, float] = {}
        sizes: dict[Path, int] = {}
        with suppress(OSError), os.scandir(self._directory) as entries:
            for entry in entries:
                with suppress(OSError):  # another process has removed it
                    status, path = entry.stat(), Path(entry.path)
                    if entry.name.endswith(SUFFIX):
                        sizes[path] = status.st_size
                        if status.st_mtime < time.time() + _AHEAD_S:
                            used_at[path] = status.st_mtime
                    elif entry.name.endswith(PARTIAL) and time.time() - status.st_mtime > _STALE_S:
                        path.unlink()
        self._sizes, self._new_bytes = sizes, 0
        return used_at


def fault_of(data: Bytes) -> str | None:
    """Return what is wrong with a file's bytes, or None."""
    if len(data) < _HEAD.size:
        return "is cut off"
    magic, label_len, data_len, digest = _HEAD.unpack(data[: _HEAD.size].tobytes())
    if magic != _MAGIC or len(data) != _HEAD.size + label_len + data_len:
        return "is no block, or is cut off"
    if hashlib.sha256(data[_HEAD.size :].data).digest() != digest:
        return "is not what was written: its checksum differs"
    return None
