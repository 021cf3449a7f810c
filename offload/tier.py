"""The bookkeeping of a page cache: which page is in each slot, which slots are pinned, and the LRU order.

It holds no data. Calls are batched: each takes arrays of pages or slots and costs a few numpy calls.
"""

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int64]
Slots = NDArray[np.int64]

NOWHERE = -1
_SHARE_LISTED = 8  # candidates for eviction are listed for one in so many slots at a time


class Tier:
    """Owns the slots of a tier: exact LRU, except that pinned slots are never evicted.

    Not thread-safe: the owner holds a lock.
    """

    BYTES_PER_PAGE = 4  # of the bookkeeping
    BYTES_PER_SLOT = 44  # of the bookkeeping, including temporaries of the search for the oldest

    def __init__(self, num_pages: int, num_slots: int):
        self._slot_of = np.full(num_pages, NOWHERE, np.int32)
        self._page_in = np.full(num_slots, NOWHERE, np.int32)
        self._used_at = np.zeros(num_slots, np.int64)  # value of `_now` at the last use
        self._pins = np.zeros(num_slots, np.int32)
        self._free = np.arange(num_slots - 1, -1, -1, dtype=np.int32)
        self._num_free = num_slots
        self._now = 0
        self._oldest: Slots = np.empty(0, np.int64)  # candidates for eviction, the least recently used first
        self._listed_at = self._oldest  # their `_used_at` when they were listed: differs once a slot is used again
        self._listed_from = 0  # candidates before this index have been used since

    def __repr__(self) -> str:
        return f"<Tier {self.num_used}/{len(self._page_in)} slots used, {int((self._pins > 0).sum())} pinned>"

    @property
    def num_used(self) -> int:
        return len(self._page_in) - self._num_free

    def look_up(self, pages: Pages) -> Slots:
        """Return the slot of each page, NOWHERE for pages without one."""
        return self._slot_of[pages].astype(np.int64)

    def use(self, slots: Slots) -> None:
        """Mark slots as just used, in this order."""
        self._used_at[slots] = np.arange(self._now, self._now + len(slots))
        self._now += len(slots)

    def pin(self, slots: Slots) -> None:
        """Mark slots as used and protect them until they are unpinned as often. No slot twice in one call."""
        self._pins[slots] += 1
        self.use(slots)

    def unpin(self, slots: Slots) -> None:
        assert (self._pins[slots] > 0).all(), f"{self!r} is asked to unpin what is not pinned"
        self._pins[slots] -= 1

    def is_pinned(self, slots: Slots) -> NDArray[np.bool_]:
        return self._pins[slots] > 0

    def assign(self, pages: Pages, evict: bool = True) -> Slots:
        """Assign slots to distinct pages without one: free ones first, then (if `evict`) least recently used ones.

        Returns NOWHERE for pages that get none. Pages that were in these slots are dropped.
        """
        slots = np.full(len(pages), NOWHERE, np.int64)
        taken = min(len(pages), self._num_free)
        self._num_free -= taken
        slots[:taken] = self._free[self._num_free : self._num_free + taken]
        if evict and taken < len(pages):
            victims = self.oldest(len(pages) - taken)
            self._slot_of[self._page_in[victims]] = NOWHERE
            slots[taken : taken + len(victims)] = victims
        found = slots >= 0
        self._slot_of[pages[found]] = slots[found]
        self._page_in[slots[found]] = pages[found]
        self.use(slots[found])
        return slots

    def drop(self, slots: Slots) -> None:
        """Free slots that hold a page; none may be pinned."""
        assert not self._pins[slots].any(), f"{self!r} is asked to drop a page that is in use"
        self._slot_of[self._page_in[slots]] = NOWHERE
        self._page_in[slots] = NOWHERE
        self._free[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)

    def oldest(self, num_slots: int) -> Slots:
        """Return the least recently used slots that hold a page and are not pinned, at most `num_slots`."""
        found = self._still_oldest(num_slots)
        if len(found) < num_slots:  # all other candidates were used since they were listed: list anew
            self._list_oldest(num_slots)
            found = self._still_oldest(num_slots)
        return found

    def _still_oldest(self, num_slots: int) -> Slots:
        """Return the first candidates not used since they were listed; used ones at the front are never rechecked."""
        found, end = self._oldest[:0], self._listed_from
        while len(found) < num_slots and end < len(self._oldest):
            begin, end = end, min(end + 2 * num_slots + 64, len(self._oldest))
            slots = self._oldest[begin:end]
            unused = self._used_at[slots] == self._listed_at[begin:end]
            unused &= (self._pins[slots] == 0) & (self._page_in[slots] >= 0)
            if not len(found) and not unused.any():
                self._listed_from = end
            found = np.concatenate([found, slots[unused]])
        return found[:num_slots]

    def _list_oldest(self, at_least: int) -> None:
        slots = np.flatnonzero((self._page_in >= 0) & (self._pins == 0))
        wanted = max(at_least, len(self._page_in) // _SHARE_LISTED)
        if wanted < len(slots):
            slots = slots[np.argpartition(self._used_at[slots], wanted)[:wanted]]
        self._oldest = slots[np.argsort(self._used_at[slots])]
        self._listed_at = self._used_at[self._oldest]
        self._listed_from = 0
