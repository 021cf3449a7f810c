"""Pages in tiers, from the fastest to the slowest: every page lies in exactly one, and moves as it is used.

Where a tier is full, what was used least recently goes down a tier. A move writes the page to its new place before its
old one is given up, so that a disk that fails leaves every page where it was.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from torch import Tensor

from offload.errors import OutOfPagesError, TierError
from offload.page_places import PagePlace
from offload.tier import NOWHERE, Tier


class Tiers:
    """Owns the places and knows which page lies where. Pages are numbers below `num_pages`.

    Not for several threads at once. A page that is held or pinned stays where it is.
    """

    def __init__(self, places: Sequence[PagePlace]):
        self._places = list(places)
        # one slot stays free, or pages of full tiers could not change places
        self.num_pages = sum(place.num_slots for place in places) - (len(places) > 1)
        in_memory = sum(place.num_slots for place in places if place.is_memory)
        if not places or not places[0].is_memory or in_memory < 2 or not all(p.num_slots for p in places):
            raise TierError(
                f"tiers need memory at the top, room for a page in each and for two in memory, got {self._places}; "
                "give each tier a larger budget, or leave it out"
            )
        self._tiers = [Tier(self.num_pages, place.num_slots) for place in places]
        self._tier_of = [NOWHERE] * self.num_pages
        self._lowest_memory = sum(place.is_memory for place in places) - 1

    def __repr__(self) -> str:
        used = ", ".join(f"{tier.num_used}/{place.num_slots}" for tier, place in self._both)
        return f"<Tiers {used} pages>"

    @property
    def _both(self) -> list[tuple[Tier, PagePlace]]:
        return list(zip(self._tiers, self._places, strict=True))

    def tier_of(self, page: int) -> int:
        """0 is the fastest; NOWHERE for a page that was not added."""
        return self._tier_of[page]

    def add(self, page: int) -> None:
        """Give a page a place, as high as may be. What its bytes are is not said."""
        assert self._tier_of[page] == NOWHERE, f"page {page} has a place"
        for tier in range(len(self._tiers)):
            if self._make_room(tier):
                self._tiers[tier].put(np.array([page]))
                self._tier_of[page] = tier
                return
        raise OutOfPagesError(f"no page of {self!r} can make room: all of them are in use; end a request")

    def drop(self, pages: Iterable[int]) -> None:
        """Forget pages and what they hold."""
        for page in pages:
            self._tiers[self._tier_of[page]].drop(np.array([page]))
            self._tier_of[page] = NOWHERE

    def use(self, pages: Iterable[int]) -> None:
        """Remember that a selection named these: they will stay longer."""
        for page in pages:
            tier = self._tiers[self._tier_of[page]]
            tier.use(tier.look_up(np.array([page])))

    def pin(self, page: int, lowest: int | None = None) -> None:
        """Bring a page into memory, to that tier or higher, and keep it there: sinks and recent rows, say."""
        lowest = self._lowest_memory if lowest is None else lowest
        assert 0 <= lowest <= self._lowest_memory, f"tier {lowest} is no memory"
        if self._tier_of[page] > lowest and not any(self._move(page, tier) for tier in range(lowest, -1, -1)):
            raise OutOfPagesError(f"page {page} cannot come up: {self!r} is full of pages in use; end a request")
        tier = self._tiers[self._tier_of[page]]
        tier.pin(tier.look_up(np.array([page])))

    def unpin(self, page: int) -> None:
        tier = self._tiers[self._tier_of[page]]
        tier.unpin(tier.look_up(np.array([page])))

    def promote(self, page: int) -> bool:
        """Move a page up a tier; whether that could be."""
        return self._tier_of[page] > 0 and self._move(page, self._tier_of[page] - 1)

    def demote(self, page: int) -> bool:
        """Move a page down a tier; whether that could be."""
        return self._tier_of[page] + 1 < len(self._tiers) and self._move(page, self._tier_of[page] + 1)

    @contextmanager
    def hold(self, page: int, lowest: int | None = None) -> Iterator[Tensor]:
        """The page's bytes where they lie, to read and to write: uint8 [page_bytes]; pinned until the block ends."""
        self.pin(page, lowest)
        try:
            tier = self._tier_of[page]
            yield self._places[tier].read(self._slot(page))
        finally:
            self.unpin(page)

    def close(self) -> None:
        for place in self._places:
            place.close()

    def check(self) -> None:
        """Raise AssertionError if a page has no place or two."""
        for number, tier in enumerate(self._tiers):
            tier.check()
            inside = np.flatnonzero(tier.look_up(np.arange(self.num_pages)) >= 0)
            assert all(self._tier_of[page] == number for page in inside.tolist()), f"{self!r} misplaced a page"
        placed = sum(tier != NOWHERE for tier in self._tier_of)
        assert placed == sum(tier.num_used for tier in self._tiers), f"{self!r} lost a page"

    def _move(self, page: int, target: int) -> bool:
        """To another tier, whose least recently used page makes room if it must; whether that could be."""
        source, slot = self._tier_of[page], np.array([self._slot(page)])
        if self._tiers[source].is_pinned(slot)[0]:
            return False
        self._tiers[source].pin(slot)  # or it might be the one that makes room
        try:
            has_room = self._make_room(target)
        finally:
            self._tiers[source].unpin(slot)
        if not has_room:
            return False
        new_slot = self._tiers[target].put(np.array([page]), evict=False)
        try:
            self._places[target].write(int(new_slot[0]), self._places[source].read(int(slot[0])))
        except BaseException:
            self._tiers[target].drop(np.array([page]))
            raise
        self._tiers[source].drop(np.array([page]))
        self._tier_of[page] = target
        return True

    def _slot(self, page: int) -> int:
        return int(self._tiers[self._tier_of[page]].look_up(np.array([page]))[0])

    def _make_room(self, tier: int) -> bool:
        """Move pages towards the nearest free slot, below if there is one, until this tier has one."""
        if self._tiers[tier].num_free:
            return True
        free = [number for number, other in enumerate(self._tiers) if other.num_free]
        below, above = [number for number in free if number > tier], [number for number in free if number < tier]
        if not free:
            return False
        end, step = (below[0], 1) if below else (above[-1], -1)
        chain = [number for number in range(tier, end, step) if len(self._tiers[number].oldest(1))]
        if not chain or chain[0] != tier:  # tiers between, all of whose pages are in use, are passed over
            return False
        for source, target in reversed(list(zip(chain, [*chain[1:], end], strict=True))):
            oldest = self._tiers[source].page_in(self._tiers[source].oldest(1))
            self._move(int(oldest[0]), target)
        return True
