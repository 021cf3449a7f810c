"""Blocks of bytes in files of one directory, within a budget: each there as a whole, or not found.

Several processes may share the directory. What was used least recently goes first, and a file's time says when it was
used. A file is not flushed to the disk by itself: a process that is killed loses nothing of it, a machine that loses
power may. Either way it is read with its checksum, and what is not as it was written is not found.
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
_HEAD = struct.Struct("<8sIQ32s12x")  # what this is, bytes of the label and of the data, SHA-256 of all that follows
_MAGIC = b"csblock1"
_STALE_S = 3600.0  # a file that nobody has finished in so long never will be
_AHEAD_S = 86400.0  # that another machine's clock may be
_SILENT_S = 600.0  # from one line of the log on what the disk does not take to the next
_ROOM = 0.9  # of the budget, that is kept when something has to go: so that not every write looks at all files
_log = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]


class BlockFiles:
    """Any thread may read; one writes."""

    def __init__(self, directory: Path, find_budget: Callable[[int], int]) -> None:
        """find_budget: what all may take together, while they take so much."""
        self._directory, self._find_budget = directory, find_budget
        self._sizes: dict[Path, int] = {}  # as last looked at, and what was written since
        self.num_refused = 0  # blocks that the disk did not take
        self._told_at = -math.inf  # when the log was told of one
        self._look()

    def __repr__(self) -> str:
        return f"<BlockFiles {len(self._sizes)} of {self.num_bytes:,} bytes in {self._directory}>"

    @property
    def num_blocks(self) -> int:
        return len(self._sizes)

    @property
    def num_bytes(self) -> int:
        return sum(list(self._sizes.values()))

    def holds(self, key: str, label: bytes) -> bool:
        """Whether there is a file of that block, by its head; a key may be another block's as well."""
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
        """The block's bytes, if they are there and as they were written. A file that was altered is removed, but not
        one that memory has no room for."""
        path = self._path(key)
        try:
            data = np.fromfile(path, np.uint8)
        except (OSError, MemoryError):
            return None
        fault = fault_of(data)
        if fault is None:
            label_start = _HEAD.size + _HEAD.unpack(data[: _HEAD.size].tobytes())[2]
            if data[label_start:].tobytes() != label:
                return None  # another block's
            with suppress(OSError):
                os.utime(path)
            return data[_HEAD.size : label_start].copy()  # not a view, which would hold on to the label
        _log.warning("%s %s: it is removed, and computed again when it is needed", path, fault)
        with suppress(OSError):
            path.unlink()
        self._sizes.pop(path, None)
        return None

    def write(self, key: str, label: bytes, data: Bytes) -> bool:
        """Whether it is there now. Nothing is half there, whatever the disk or this process comes to."""
        path = self._path(key)
        num_bytes = _HEAD.size + len(label) + data.nbytes
        if num_bytes > (budget_bytes := self._find_budget(self.num_bytes)):
            return False
        if self.num_bytes + num_bytes > budget_bytes:
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
            if (now := time.monotonic()) >= self._told_at + _SILENT_S:
                self._told_at = now
                told = "blocks are not written to %s: %s (%d so far)"
                _log.warning(told, self._directory, error.strerror or error, self.num_refused)
            return False
        self._sizes[path] = num_bytes
        return True

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}{SUFFIX}"

    def _make_room(self, num_bytes: int, budget_bytes: int) -> None:
        """Remove what was used least recently, by whichever process."""
        used_at = self._look()
        left = self.num_bytes
        for path in sorted(self._sizes, key=lambda path: used_at.get(path, 0.0)):
            if left + num_bytes <= _ROOM * budget_bytes:
                return
            with suppress(OSError):
                path.unlink()
            left -= self._sizes.pop(path, 0)  # a reader may have removed it meanwhile

    def _look(self) -> dict[Path, float]:
        """What is there, and when it was used last; not at all where the clock has been set back since."""
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
        self._sizes = sizes
        return used_at


def fault_of(data: Bytes) -> str | None:
    """What is wrong with a file's bytes, if anything is."""
    if len(data) < _HEAD.size:
        return "is cut off"
    magic, label_len, data_len, digest = _HEAD.unpack(data[: _HEAD.size].tobytes())
    if magic != _MAGIC or len(data) != _HEAD.size + label_len + data_len:
        return "is no block, or is cut off"
    if hashlib.sha256(data[_HEAD.size :].data).digest() != digest:
        return "is not what was written: its checksum differs"
    return None
