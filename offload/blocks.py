"""Blocks of bytes that are kept and found again by what they are: in memory within a budget, then in files.

A block has a key, under which it is looked for, and a label, which says to the byte what it is: where two blocks should
have one key, the second is not kept, and neither is taken for the other.
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
    """What a block is, to the byte: all that the block before it is, which they share, and what is its own."""

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
        """Looks at all before them up to what they share."""
        one: Label | None = self
        two: Label | None = other
        while one is not two:
            if one is None or two is None or one.own != two.own:
                return False
            one, two = one.before, two.before
        self.before = other.before  # which is the same: who asks of the next block need not look at these again
        return True


@dataclass(frozen=True, slots=True)
class BlockName:
    """Where a block is looked for, and what it has to be."""

    key: str  # of letters and digits
    label: Label


@dataclass(slots=True)
class _Held:
    label: Label
    data: Bytes
    num_users: int = 0  # readers, and the writer until it is in its file


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """What is kept now, and what came of it."""

    memory_blocks: int
    memory_bytes: int
    disk_blocks: int
    disk_bytes: int
    refused: int  # blocks that found no room, or that the disk did not take


class Blocks:
    """Owns the memory, and a thread that writes behind. Any thread may ask.

    In memory is never more than the budget, what is being read and what waits to be written included: a block that
    finds no room is not kept.
    """

    def __init__(self, memory_bytes: int, files: BlockFiles | None) -> None:
        """files: None keeps nothing beyond this process."""
        self._budget_bytes, self._files = memory_bytes, files
        self._held: OrderedDict[str, _Held] = OrderedDict()  # the least recently used first
        self._num_bytes = self._num_refused = 0
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="csattn-blocks")

    def __repr__(self) -> str:
        return f"<Blocks {len(self._held)} of {self._num_bytes:,}/{self._budget_bytes:,} bytes, and {self._files!r}>"

    def holds(self, name: BlockName) -> bool:
        """Whether the block is there, in memory or by its file's head."""
        with self._lock:
            held = self._held.get(name.key)
            if held is not None:
                return held.label.is_same(name.label)
        return self._files is not None and self._files.holds(name.key, bytes(name.label))

    def put(self, name: BlockName, data: Bytes) -> bool:
        """Keep a block, which is the caller's no more; whether that could be. It is written to its file behind."""
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
        """The first of these blocks, up to the first that is not there as it was written; in memory until the block
        ends. Those that only files have are read, and checked, here."""
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
        """Wait until all that was put is in its file, or refused."""
        self._writer.submit(int).result()

    def close(self) -> None:
        """Write what still waits."""
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
        """In use from now on; None: it is not there. A block that finds no room in memory is read all the same."""
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
            held = self._held.get(name.key)  # another thread may have read it meanwhile
            if held is None:
                held = self._enter(name, data)
            if held is None or not held.label.is_same(name.label):
                return None, data
            held.num_users += 1
            return held, held.data

    def _enter(self, name: BlockName, data: Bytes) -> _Held | None:
        """Among those in memory, for which others have to go; None: there is no room. Under the lock."""
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
