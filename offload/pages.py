"""Which pages hold the rows of which sequence: fixed-size pages, shared by reference count where prefixes are the same.

Every page knows the page before it, so pages form trees, and a sequence is a length and the page of its last row.
A page is referred to by the pages that follow it and by the sequences that end in it; without a reference it is free.
So sharing a prefix is one more reference, whatever its length, and freeing touches only pages that nobody else needs.
State only: bytes lie in `tiers`, and `paged_rows` puts the two together.
"""

from dataclasses import dataclass

from offload.errors import OutOfPagesError, UnknownSequenceError

PAGE_SIZE = 256  # rows

_NONE = -1  # before a sequence's first page
_FREE = -2


@dataclass(frozen=True, slots=True)
class Write:
    """Rows of a page that an append has to fill."""

    page: int
    first_row: int  # in the page
    num_rows: int
    copied_from: int | None = None  # a shared page, whose rows before `first_row` have to be copied first


@dataclass(slots=True)
class _Sequence:
    num_rows: int
    last: int  # page of the last row; _NONE without rows


class PageTable:
    """Owns the numbers of `num_pages` pages of `page_size` rows and gives them to sequences.

    Forking is O(1), appending O(1) per page it begins, freeing O(1) per page it frees. Not for several threads at once.
    """

    def __init__(self, num_pages: int, page_size: int = PAGE_SIZE):
        assert num_pages >= 0 and page_size >= 1, f"{num_pages} pages of {page_size} rows cannot be"
        self.page_size = page_size
        self._before = [_FREE] * num_pages  # the page before this one
        self._depth = [0] * num_pages  # pages up to this one, itself included
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._sequences: dict[int, _Sequence] = {}
        self._next_id = 0

    def __repr__(self) -> str:
        used = len(self._before) - len(self._free)
        return f"<PageTable {used}/{len(self._before)} pages used, {len(self._sequences)} sequences>"

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def sequences(self) -> list[int]:
        return list(self._sequences)

    def num_rows(self, sequence: int) -> int:
        return self._sequence(sequence).num_rows

    def pages(self, sequence: int) -> list[int]:
        """The sequence's pages in the order of its rows: O(1) per page."""
        page, pages = self._sequence(sequence).last, []
        while page != _NONE:
            pages.append(page)
            page = self._before[page]
        return pages[::-1]

    def new_sequence(self) -> int:
        """An empty sequence's number; numbers are never used again."""
        return self._add(_Sequence(0, _NONE))

    def fork(self, sequence: int, num_rows: int | None = None) -> int:
        """A new sequence that shares the rows of another, or the first `num_rows` of them: no page is copied."""
        source = self._sequence(sequence)
        num_rows = source.num_rows if num_rows is None else num_rows
        assert 0 <= num_rows <= source.num_rows, f"cannot share {num_rows} rows of {source.num_rows}"
        last, depth = source.last, -(-num_rows // self.page_size)
        while last != _NONE and self._depth[last] > depth:
            last = self._before[last]
        if last != _NONE:
            self._references[last] += 1
        return self._add(_Sequence(num_rows, last))

    def append(self, sequence: int, num_rows: int) -> list[Write]:
        """Lengthen a sequence; the caller fills what is returned. Raises OutOfPagesError before anything changes."""
        grown = self._sequence(sequence)
        used = grown.num_rows % self.page_size  # rows of the last page; 0: it is full, or there is none
        room = min(num_rows, self.page_size - used) if used else 0
        copies = bool(room) and self._references[grown.last] > 1
        num_new = -(-(num_rows - room) // self.page_size)
        if num_new + copies > len(self._free):
            raise OutOfPagesError(
                f"{num_rows:,} more rows need {num_new + copies} pages of {self.page_size} rows and {len(self._free)} "
                f"of {len(self._before)} are free; end a sequence, or give a tier more memory"
            )
        writes = []
        if room:
            shared = grown.last if copies else None
            if copies:
                self._references[grown.last] -= 1
                before = self._before[grown.last]
                grown.last = self._take(before)
                if before != _NONE:
                    self._references[before] += 1
            writes.append(Write(grown.last, used, room, shared))
        for left in range(num_rows - room, 0, -self.page_size):
            grown.last = self._take(grown.last)  # the sequence's reference to the page before is the new page's now
            writes.append(Write(grown.last, 0, min(left, self.page_size)))
        grown.num_rows += num_rows
        return writes

    def free(self, sequence: int) -> list[int]:
        """End a sequence; the pages that nobody refers to any more."""
        page, freed = self._sequence(sequence).last, []
        del self._sequences[sequence]
        while page != _NONE:
            self._references[page] -= 1
            if self._references[page]:
                break
            freed.append(page)
            before, self._before[page] = self._before[page], _FREE
            page = before
        self._free.extend(freed)
        return freed

    def check(self) -> None:
        """Raise AssertionError if a page is lost, is free and used, or has other references than it should."""
        references = [0] * len(self._before)
        for page, before in enumerate(self._before):
            if before == _FREE:
                continue
            assert self._depth[page] == (1 if before == _NONE else self._depth[before] + 1), f"page {page} is misplaced"
            if before != _NONE:
                references[before] += 1
        for number, sequence in self._sequences.items():
            num_pages = -(-sequence.num_rows // self.page_size)
            depth = 0 if sequence.last == _NONE else self._depth[sequence.last]
            assert depth == num_pages, f"sequence {number} has {sequence.num_rows} rows on {depth} pages"
            if sequence.last != _NONE:
                references[sequence.last] += 1
        assert references == self._references, f"{self!r} has counted its references wrongly"
        free = {page for page, before in enumerate(self._before) if before == _FREE}
        assert len(self._free) == len(free) and free == set(self._free), f"{self!r} has lost a page, or frees it twice"
        assert all(bool(count) != (page in free) for page, count in enumerate(references)), f"{self!r} leaks a page"

    def _add(self, sequence: _Sequence) -> int:
        self._next_id += 1
        self._sequences[self._next_id] = sequence
        return self._next_id

    def _take(self, before: int) -> int:
        """A free page that follows the given one, with one reference."""
        page = self._free.pop()
        self._before[page], self._references[page] = before, 1
        self._depth[page] = 1 if before == _NONE else self._depth[before] + 1
        return page

    def _sequence(self, number: int) -> _Sequence:
        if number not in self._sequences:
            raise UnknownSequenceError(f"there is no sequence {number}: it was ended, or never begun")
        return self._sequences[number]
