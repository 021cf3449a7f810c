"""Which pages lie in the slots of one tier, which of them are in use, and which was used least recently.

State only, in batches: every call takes arrays of pages or slots, and costs a few numpy calls whatever their number.
"""

import numpy as np
from numpy.typing import NDArray

Pages = NDArray[np.int64]
Slots = NDArray[np.int64]

NOWHERE = -1
_SHARE_LISTED = 8  # one in so many slots is listed for eviction at a time


class Tier:
    """Owns the slots of a tier. Exact LRU, in which a slot that is pinned is never given to another page.

    Not for several threads at once: its owner has the lock.
    """

    BYTES_PER_PAGE = 4  # of the book-keeping
    BYTES_PER_SLOT = 44  # of the book-keeping, and for a moment while the oldest is looked for

    def __init__(self, num_pages: int, num_slots: int):
        self._slot_of = np.full(num_pages, NOWHERE, np.int32)
        self._page_in = np.full(num_slots, NOWHERE, np.int32)
        self._used_at = np.zeros(num_slots, np.int64)  # grows with every use
        self._pins = np.zeros(num_slots, np.int32)
        self._free = np.arange(num_slots - 1, -1, -1, dtype=np.int32)
        self._num_free = num_slots
        self._now = 0
        self._oldest: Slots = np.empty(0, np.int64)  # candidates for eviction, the least recently used first
        self._listed_at = self._oldest  # their `_used_at` when they were listed: differs once a slot is used again
        self._listed_from = 0  # those before have been used since

    def __repr__(self) -> str:
        return f"<Tier {self.num_used}/{len(self._page_in)} slots used, {int((self._pins > 0).sum())} pinned>"

    @property
    def num_used(self) -> int:
        return len(self._page_in) - self._num_free

    def look_up(self, pages: Pages) -> Slots:
        """The slot of each page, NOWHERE where it has none."""
        return self._slot_of[pages].astype(np.int64)

    def page_in(self, slots: Slots) -> Pages:
        return self._page_in[slots].astype(np.int64)

    def use(self, slots: Slots) -> None:
        """Remember that these were used now, the last of them last."""
        self._used_at[slots] = np.arange(self._now, self._now + len(slots))
        self._now += len(slots)

    def pin(self, slots: Slots) -> None:
        """Keep what lies there until it is unpinned as often. No slot twice in one call."""
        self._pins[slots] += 1
        self.use(slots)

    def unpin(self, slots: Slots) -> None:
        assert (self._pins[slots] > 0).all(), f"{self!r} is asked to unpin what is not pinned"
        self._pins[slots] -= 1

    def is_pinned(self, slots: Slots) -> NDArray[np.bool_]:
        return self._pins[slots] > 0

    def put(self, pages: Pages, evict: bool = True) -> Slots:
        """Slots for distinct pages without one: free, then least recently used ones; NOWHERE where all are pinned.

        Pages that lay there before are nowhere now: where they have to be saved, make room with `oldest` first.
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

    def drop(self, pages: Pages) -> None:
        """Free the slots of pages that have one; none may be pinned."""
        slots = self._slot_of[pages]
        slots = slots[slots >= 0]
        assert not self._pins[slots].any(), f"{self!r} is asked to drop a page that is in use"
        self._slot_of[self._page_in[slots]] = NOWHERE
        self._page_in[slots] = NOWHERE
        self._free[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)

    def oldest(self, num_slots: int) -> Slots:
        """The used slots whose use is longest ago, at most so many, pinned ones left out."""
        found = self._still_oldest(num_slots)
        if len(found) < num_slots:  # all others that were listed have been used since, and so have come last
            self._list_oldest(num_slots)
            found = self._still_oldest(num_slots)
        return found

    def _still_oldest(self, num_slots: int) -> Slots:
        """The first of those listed that were not used since; what was, in front of them, is not looked at again."""
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
