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

    __slots__ = ("before", "own")

    def __init__(self, before: "Label | None", own: bytes) -> None:
        self.before, self.own = before, own

    def __bytes__(self) -> bytes:
        parts, label = [], self
        while label.before is not None:
            parts.append(label.own)
            label = label.before
        return b"".join([label.own, *reversed(parts)])

    def is_same(self, other: "Label") -> bool:
        """Compare two chains of labels, back to the first label object that they share."""
        one: Label | None = self
        two: Label | None = other
        while one is not two:
            if one is None or two is None or one.own != two.own:
                return False
            one, two = one.before, two.before
        self.before = other.before  # equal: sharing it lets the comparison of the next block stop here
        return True


@dataclass(frozen=True, slots=True)
class BlockName:
    """The key under which a block is looked up, and the label that it must have."""

    key: str  # letters and digits
    label: Label


@dataclass(slots=True)
class _Held:
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
        self._held: OrderedDict[str, _Held] = OrderedDict()  # the least recently used first
        self._num_bytes = self._num_refused = 0
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="csattn-blocks")

    def __repr__(self) -> str:
        return f"<Blocks {len(self._held)} of {self._num_bytes:,}/{self._budget_bytes:,} bytes, and {self._files!r}>"

    def holds(self, name: BlockName) -> bool:
        """Return whether the block is in memory, or in a file, by the file's header and label."""
        with self._lock:
            held = self._held.get(name.key)
            if held is not None:
                return held.label.is_same(name.label)
        return self._files is not None and self._files.holds(name.key, bytes(name.label))

    def put(self, name: BlockName, data: Bytes) -> bool:
        """Keep a block and own its data; return whether it is kept. Its file is written in the background."""
        with self._lock:
            if name.key in self._held:
                return self._held[name.key].label.is_same(name.label)
            held = self._enter(name, data)
            if held is None:
                self._num_refused += 1
                return False
            if self._files is not None:
                held.num_users += 1
                self._writer.submit(self._write, self._files, name.key, held)
        return True

    @contextmanager
    def hold(self, names: Iterable[BlockName]) -> Iterator[list[Bytes]]:
        """Yield the data of the longest prefix of these blocks that is found; none is evicted within the `with` block.

        Blocks that are only in files are read, and checked, here.
        """
        found: list[tuple[_Held | None, Bytes]] = []
        try:
            for name in names:
                if (block := self._take(name)) is None:
                    break
                found.append(block)
            yield [data for _, data in found]
        finally:
            with self._lock:
                for held, _ in found:
                    if held is not None:
                        held.num_users -= 1

    def flush(self) -> None:
        """Wait until every block that was put is in its file, or refused."""
        self._writer.submit(int).result()

    def close(self) -> None:
        """Write the blocks that still wait, and end the thread."""
        self._writer.shutdown()

    @property
    def counts(self) -> BlockCounts:
        files = self._files
        with self._lock:
            return BlockCounts(
                memory_blocks=len(self._held),
                memory_bytes=self._num_bytes,
                disk_blocks=0 if files is None else files.num_blocks,
                disk_bytes=0 if files is None else files.num_bytes,
                refused=self._num_refused + (0 if files is None else files.num_refused),
            )

    def _take(self, name: BlockName) -> tuple[_Held | None, Bytes] | None:
        """Find a block and mark it as in use; None if it is missing. Without room in memory it is read uncached."""
        with self._lock:
            held = self._held.get(name.key)
            if held is not None:
                if not held.label.is_same(name.label):
                    return None
                self._held.move_to_end(name.key)
                held.num_users += 1
                return held, held.data
        data = None if self._files is None else self._files.read(name.key, bytes(name.label))
        if data is None:
            return None
        with self._lock:
            held = self._held.get(name.key)  # another thread may have read it in the meantime
            if held is None:
                held = self._enter(name, data)
            if held is None or not held.label.is_same(name.label):
                return None, data
            held.num_users += 1
            return held, held.data

    def _enter(self, name: BlockName, data: Bytes) -> _Held | None:
        """Add a block to those in memory, evicting unused ones; None if there is no room. The caller holds the lock."""
        room = self._budget_bytes - self._num_bytes
        going = []
        for key, held in self._held.items():
            if room >= data.nbytes:
                break
            if not held.num_users:
                going.append(key)
                room += held.data.nbytes
        if room < data.nbytes:
            return None
        for key in going:
            self._num_bytes -= self._held.pop(key).data.nbytes
        held = self._held[name.key] = _Held(name.label, data)
        self._num_bytes += data.nbytes
        return held

    def _write(self, files: BlockFiles, key: str, held: _Held) -> None:
        try:
            label = bytes(held.label)
            if not files.holds(key, label):
                files.write(key, label, held.data)
        except Exception:
            _log.exception("block %s is not written", key)
            with self._lock:
                self._num_refused += 1
        finally:
            with self._lock:
                held.num_users -= 1
