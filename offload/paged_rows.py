"""Growing sequences of rows in pages, over tiers: shared prefixes are stored once, and what is not used goes down."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from offload.page_places import PagePlace
from offload.pages import PAGE_SIZE, PageTable, Write
from offload.tiers import Tiers


class PagedRows:
    """Rows of `row_bytes` bytes; what they mean is the caller's. Not for several threads at once."""

    def __init__(self, row_bytes: int, places: Sequence[PagePlace], page_size: int = PAGE_SIZE):
        """places: from the fastest to the slowest, for pages of page_size * row_bytes bytes."""
        self.tiers = Tiers(places)
        self.table = PageTable(self.tiers.num_pages, page_size)
        self._row_bytes = row_bytes

    def __repr__(self) -> str:
        return f"<PagedRows {self.table!r} in {self.tiers!r}>"

    def new_sequence(self) -> int:
        return self.table.new_sequence()

    def fork(self, sequence: int, num_rows: int | None = None) -> int:
        """A sequence that begins with the rows of another, or the first of them, and shares their pages."""
        return self.table.fork(sequence, num_rows)

    def append(self, sequence: int, rows: Tensor) -> None:
        """rows: uint8 [num_rows, row_bytes], on any device.

        Raises OutOfPagesError before anything changes where there are too few pages. Any other error ends the sequence.
        """
        writes = self.table.append(sequence, len(rows))
        try:
            self._fill(writes, rows)
        except BaseException:
            self.free(sequence)
            raise

    def _fill(self, writes: Sequence[Write], rows: Tensor) -> None:
        done = 0
        for write in writes:
            if write.first_row == 0 or write.copied_from is not None:
                self.tiers.add(write.page)
            with self.tiers.hold(write.page) as page:
                if write.copied_from is not None:
                    shared = write.first_row * self._row_bytes
                    with self.tiers.hold(write.copied_from) as source:
                        page[:shared] = source[:shared].to(page.device)
                first = write.first_row * self._row_bytes
                new = rows[done : done + write.num_rows].reshape(-1)
                page[first : first + len(new)] = new.to(page.device)
            done += write.num_rows

    def pages(self, sequence: int) -> Iterator[Tensor]:
        """The rows page after page: uint8 [num_rows, row_bytes], valid until the next is asked for."""
        left = self.table.num_rows(sequence)
        for page in self.table.pages(sequence):
            num_rows = min(left, self.table.page_size)
            with self.tiers.hold(page) as held:
                yield held[: num_rows * self._row_bytes].view(num_rows, self._row_bytes)
            left -= num_rows

    def rows(self, sequence: int) -> Tensor:
        """A copy of all rows in host memory: uint8 [num_rows, row_bytes]."""
        copies = [page.cpu().clone() for page in self.pages(sequence)]
        return torch.cat(copies) if copies else torch.empty(0, self._row_bytes, dtype=torch.uint8)

    def free(self, sequence: int) -> None:
        """End a sequence; the pages that no other shares lose their places."""
        self.tiers.drop(page for page in self.table.free(sequence) if self.tiers.tier_of(page) >= 0)

    def close(self) -> None:
        self.tiers.close()

    def check(self) -> None:
        """Raise AssertionError if a page is lost, misplaced, or kept by nobody."""
        self.table.check()
        self.tiers.check()
        live = {page for sequence in self.table.sequences for page in self.table.pages(sequence)}
        placed = {page for page in range(self.tiers.num_pages) if self.tiers.tier_of(page) >= 0}
        assert live == placed, f"{self!r} keeps pages that nobody has, or has lost some"
