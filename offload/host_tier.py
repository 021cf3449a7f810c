"""The host-memory tier over files: a page cache (LRU) within a budget, whose pages are filled by their first reader."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from offload.disk import aligned_bytes
from offload.row_files import Bytes, Numbers, RowFiles
from offload.tier import NOWHERE, Tier

_LOADING, _READY, _FAILED = np.uint8(0), np.uint8(1), np.uint8(2)
NUM_SCRATCHES = 2  # scratch buffers for concurrent reads: a step's and a prefetch's


class HostTier:
    """Owns the memory of `num_slots` pages and the state of each. Thread-safe.

    A page that is being read or filled is pinned and never evicted. Decisions are made under one lock; the disk is read
    outside it. A thread that needs a page that another thread is filling waits for it.
    """

    def __init__(self, files: RowFiles, num_pages: int, num_slots: int, page_bytes: int, scratch_bytes: int):
        self._files = files
        self.memory = aligned_bytes(num_slots * page_bytes).reshape(num_slots, page_bytes)
        self._tier = Tier(num_pages, num_slots)
        self._states = np.zeros(num_slots, np.uint8)
        self._changed = threading.Condition()  # guards the tier and the states
        self._scratch: SimpleQueue[Bytes] = SimpleQueue()
        for _ in range(NUM_SCRATCHES):
            self._scratch.put(aligned_bytes(scratch_bytes))
        self.num_hits = self.num_misses = self.bytes_read = 0

    def __repr__(self) -> str:
        return f"<HostTier {self._tier.num_used}/{len(self.memory)} pages of {self.memory.shape[1]:,} bytes>"

    @staticmethod
    def slot_bytes(page_bytes: int) -> int:
        """Return the memory that a slot takes, with its bookkeeping."""
        return page_bytes + Tier.BYTES_PER_SLOT + 1

    @property
    def num_used(self) -> int:
        return self._tier.num_used

    @contextmanager
    def hold(self, layer_idx: int, pages: Numbers, starts: Numbers, evict: bool = True) -> Iterator[Numbers]:
        """Yield the slots of these pages, filled and pinned within the `with` block; NOWHERE for pages without a slot.

        A page has none if no slot is free or may be evicted, or if another thread failed to read it. pages: distinct;
        starts: their offsets in the layer's array, in bytes; both ascending. evict: whether other pages may be evicted.
        """
        with self._changed:
            slots, fresh = self._claim(pages, evict)
        try:
            self._fill(layer_idx, slots[fresh], starts[fresh])
            with self._changed:
                pinned = slots[slots >= 0]
                self._changed.wait_for(lambda: bool((self._states[pinned] != _LOADING).all()))
                usable = slots.copy()
                usable[slots >= 0] = np.where(self._states[pinned] == _READY, pinned, NOWHERE)
            yield usable
        finally:
            with self._changed:
                self._release(slots, fresh)

    def read(self, layer_idx: int, starts: Numbers, out: Bytes, places: Numbers) -> None:
        """Read from the file, bypassing the tier: out[places[i]] = the bytes from starts[i] on."""
        scratch = self._scratch.get()
        try:
            num_bytes = self._files.read(layer_idx, starts, out, places, scratch)
        finally:
            self._scratch.put(scratch)
        with self._changed:
            self.bytes_read += num_bytes

    def close(self) -> None:
        """Free the memory. No page may be in use."""
        self.memory = self.memory[:0]
        self._scratch = SimpleQueue()

    def _claim(self, pages: Numbers, evict: bool) -> tuple[Numbers, NDArray[np.bool_]]:
        """Pin the cached pages, and assign and pin slots for the others; return all slots, and which ones to fill."""
        slots = self._tier.look_up(pages)
        missing = slots < 0
        failed = ~missing & (self._states[slots] == _FAILED)  # its last user drops it; it is not filled again
        slots[failed] = NOWHERE
        self._tier.pin(slots[slots >= 0])
        slots[missing] = self._tier.assign(pages[missing], evict)
        fresh = missing & (slots >= 0)
        self._tier.pin(slots[fresh])
        self._states[slots[fresh]] = _LOADING
        num_missing = int(missing.sum())
        self.num_hits += len(pages) - num_missing
        self.num_misses += num_missing
        return slots, fresh

    def _fill(self, layer_idx: int, slots: Numbers, starts: Numbers) -> None:
        """Read the pages that this caller has claimed, and wake the threads that wait for them."""
        if not len(slots):
            return
        self.read(layer_idx, starts, self.memory, slots)
        with self._changed:
            self._states[slots] = _READY
            self._changed.notify_all()

    def _release(self, slots: Numbers, fresh: NDArray[np.bool_]) -> None:
        """Unpin, and mark pages that could not be read as failed: threads that wait for them then bypass the tier."""
        unread = slots[fresh][self._states[slots[fresh]] == _LOADING]
        if len(unread):
            self._states[unread] = _FAILED
            self._changed.notify_all()
        slots = slots[slots >= 0]
        self._tier.unpin(slots)
        self._tier.drop(slots[(self._states[slots] == _FAILED) & ~self._tier.is_pinned(slots)])
