"""A two-level, content-addressed cache of byte blocks: in memory within a budget (LRU), then in files.

A block has a key, under which it is looked up, and a label, which identifies it exactly. If the keys of two blocks
collide, the second is not kept, and neither is taken for the other.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from offload.block_files import BlockFiles, Bytes

_log = logging.getLogger(__name__)


class Label:
    """Identifies a block exactly: the label of the preceding block, which is shared, and the block's own bytes."""

    __slots__ = ("parent", "suffix")

    def __init__(self, parent: "Label | None", suffix: bytes) -> None:
        self.parent, self.suffix = parent, suffix

    def __bytes__(self) -> bytes:
        parts, label = [], self
        while label.parent is not None:
            parts.append(label.suffix)
            label = label.parent
        return b"".join([label.suffix, *reversed(parts)])

    def is_same(self, other: "Label") -> bool:
        """Compare two chains of labels, back to the first label object that they share."""
        one: Label | None = self
        two: Label | None = other
        while one is not two:
            if one is None or two is None or one.suffix != two.suffix:
                return False
            one, two = one.parent, two.parent
        self.parent = other.parent  # equal: sharing it lets the comparison of the next block stop here
        return True


@dataclass(frozen=True, slots=True)
class BlockName:
    """The key under which a block is looked up, and the label that it must have."""

    key: str  # letters and digits
    label: Label


@dataclass(slots=True)
class _Entry:
    label: Label
    data: Bytes
    num_users: int = 0  # readers, and the writer until the block is in its file; a block in use is not evicted


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """How many blocks and bytes are kept, and how many blocks were refused."""

    memory_blocks: int
    memory_bytes: int
    disk_blocks: int
    disk_bytes: int
    refused: int  # blocks for which memory had no room, or that could not be written


class Blocks:
    """Owns the blocks in memory, and a write-behind thread for the files. Thread-safe.

    Memory never exceeds the budget, blocks in use and blocks that wait to be written included: a block for which there
    is no room is not kept.
    """

    def __init__(self, memory_bytes: int, files: BlockFiles | None) -> None:
        """files: None keeps blocks in memory only."""
        self._budget_bytes, self._files = memory_bytes, files
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the least recently used first
        self._num_bytes = self._num_refused = 0
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="csattn-blocks")

    def __repr__(self) -> str:
        return f"<Blocks {len(self._entries)} of {self._num_bytes:,}/{self._budget_bytes:,} bytes, and {self._files!r}>"

    def holds(self, name: BlockName) -> bool:
        """Return whether the block is in memory, or in a file, by the file's header and label."""
        with self._lock:
            entry = self._entries.get(name.key)
            if entry is not None:
                return entry.label.is_same(name.label)
        return self._files is not None and self._files.holds(name.key, bytes(name.label))

    def put(self, name: BlockName, data: Bytes) -> bool:
        """Keep a block and own its data; return whether it is kept. Its file is written in the background."""
        with self._lock:
            if name.key in self._entries:
                return self._entries[name.key].label.is_same(name.label)
            entry = self._enter(name, data)
            if entry is None:
                self._num_refused += 1
                return False
            if self._files is not None:
                entry.num_users += 1
                self._writer.submit(self._write, self._files, name.key, entry)
        return True

    @contextmanager
    def hold(self, names: Iterable[BlockName]) -> Iterator[list[Bytes]]:
        """Yield the data of the longest prefix of these blocks that is found; none is evicted within the `with` block.

        Blocks that are only in files are read, and checked, here.
        """
        found: list[tuple[_Entry | None, Bytes]] = []
        try:
            for name in names:
                if (block := self._take(name)) is None:
                    break
                found.append(block)
            yield [data for _, data in found]
        finally:
            with self._lock:
                for entry, _ in found:
                    if entry is not None:
                        entry.num_users -= 1

    def close(self) -> None:
        """Write the blocks that still wait, and end the thread."""
        self._writer.shutdown()

    @property
    def counts(self) -> BlockCounts:
        files = self._files
        with self._lock:
            return BlockCounts(
                memory_blocks=len(self._entries),
                memory_bytes=self._num_bytes,
                disk_blocks=0 if files is None else files.num_blocks,
                disk_bytes=0 if files is None else files.num_bytes,
                refused=self._num_refused + (0 if files is None else files.num_refused),
            )

    def _take(self, name: BlockName) -> tuple[_Entry | None, Bytes] | None:
        """Find a block and mark it as in use; None if it is missing. Without room in memory it is read uncached."""
        with self._lock:
            entry = self._entries.get(name.key)
            if entry is not None:
                if not entry.label.is_same(name.label):
                    return None
                self._entries.move_to_end(name.key)
                entry.num_users += 1
        if entry is not None:
            if self._files is not None:
                self._files.use(name.key)
            return entry, entry.data
        data = None if self._files is None else self._files.read(name.key, bytes(name.label))
        if data is None:
            return None
        with self._lock:
            entry = self._entries.get(name.key)  # another thread may have read it in the meantime
            if entry is None:
                entry = self._enter(name, data)
            if entry is None or not entry.label.is_same(name.label):
                return None, data
            entry.num_users += 1
            return entry, entry.data

    def _enter(self, name: BlockName, data: Bytes) -> _Entry | None:
        """Add a block to those in memory, evicting unused ones; None if there is no room. The caller holds the lock."""
        room = self._budget_bytes - self._num_bytes
        going = []
        for key, entry in self._entries.items():
            if room >= data.nbytes:
                break
            if not entry.num_users:
                going.append(key)
                room += entry.data.nbytes
        if room < data.nbytes:
            return None
        for key in going:
            self._num_bytes -= self._entries.pop(key).data.nbytes
        entry = self._entries[name.key] = _Entry(name.label, data)
        self._num_bytes += data.nbytes
        return entry

    def _write(self, files: BlockFiles, key: str, entry: _Entry) -> None:
        try:
            label = bytes(entry.label)
            if not files.holds(key, label):
                files.write(key, label, entry.data)
        except Exception:
            _log.exception("block %s is not written", key)
            with self._lock:
                self._num_refused += 1
        finally:
            with self._lock:
                entry.num_users -= 1
