"""Do pages keep what sequences wrote, whatever happens to them? Random operations, everything checked after each.

    python -m bench.pages [--operations 100000] [--seed 0] [--json FILE]

Sequences are begun, forked, lengthened and ended; pages are demoted, promoted and pinned. After every operation the
page table, the tiers and one sequence's bytes are compared with a model that keeps plain copies.
"""

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bench.timing import finish, gate, machine
from offload.errors import OutOfPagesError
from offload.page_places import FilePlace, MemoryPlace
from offload.paged_rows import PagedRows

ROW_BYTES, PAGE_SIZE = 12, 5  # small and odd, so that pages fill, split and move often
PAGE_BYTES = ROW_BYTES * PAGE_SIZE
OPERATIONS = ("begin", "fork", "append", "free", "demote", "promote", "pin", "unpin")
MAX_SEQUENCES = 8
SHARES = (0.05, 0.15, 0.35, 0.15, 0.1, 0.1, 0.05, 0.05)


class Fuzz:
    """Paged rows in three tiers beside a model of them."""

    def __init__(self, rng: np.random.Generator, directory: Path):
        self.rng = rng
        device = MemoryPlace(6 * PAGE_BYTES, PAGE_BYTES, "cuda" if torch.cuda.is_available() else "cpu")
        host, disk = MemoryPlace(9 * PAGE_BYTES, PAGE_BYTES), FilePlace(17 * 4096, PAGE_BYTES, directory)
        self.paged = PagedRows(ROW_BYTES, [device, host, disk], PAGE_SIZE)
        self.model: dict[int, NDArray[np.uint8]] = {}  # what each sequence's rows are
        self.pinned: list[int] = []
        self.done: Counter[str] = Counter()

    def step(self) -> None:
        """One random operation, and all checks."""
        name = str(self.rng.choice(OPERATIONS, p=SHARES))
        try:
            getattr(self, name)()
            self.done[name] += 1
        except OutOfPagesError:
            self.done["refused"] += 1
        self.check()

    def begin(self) -> None:
        if len(self.model) == MAX_SEQUENCES:
            self.free()
        self.model[self.paged.new_sequence()] = np.empty((0, ROW_BYTES), np.uint8)

    def fork(self) -> None:
        if len(self.model) == MAX_SEQUENCES:
            self.free()
        if self.model:
            source = self._sequence()
            num_rows = int(self.rng.integers(len(self.model[source]) + 1))
            self.model[self.paged.fork(source, num_rows)] = self.model[source][:num_rows]

    def append(self) -> None:
        if not self.model:
            return
        sequence = self._sequence()
        rows = self.rng.integers(256, size=(int(self.rng.integers(3 * PAGE_SIZE)), ROW_BYTES), dtype=np.uint8)
        if len(self.pinned) > 3 and len(rows):  # a page in use may have to be moved: more would be refused half done
            self.unpin()
        self.paged.append(sequence, torch.from_numpy(rows))
        self.model[sequence] = np.concatenate([self.model[sequence], rows])

    def free(self) -> None:
        if self.model:
            sequence = self._sequence()
            while self.pinned:
                self.unpin()
            del self.model[sequence]
            self.paged.free(sequence)

    def demote(self) -> None:
        if (page := self._page()) is not None:
            self.paged.tiers.demote(page)

    def promote(self) -> None:
        if (page := self._page()) is not None:
            self.paged.tiers.promote(page)

    def pin(self) -> None:
        if (page := self._page()) is not None and len(self.pinned) < 4:
            self.paged.tiers.pin(page)
            self.pinned.append(page)

    def unpin(self) -> None:
        if self.pinned:
            self.paged.tiers.unpin(self.pinned.pop())

    def check(self) -> None:
        self.paged.check()
        if self.model:
            sequence = self._sequence()
            gate(np.array_equal(self.paged.rows(sequence).numpy(), self.model[sequence]), f"{sequence} lost its rows")

    def end(self) -> None:
        """End every sequence: nothing may be left."""
        while self.model:
            self.free()
        self.paged.check()
        table = self.paged.table
        gate(table.num_free == self.paged.tiers.num_pages, f"{table!r} leaks")
        self.paged.close()

    def _sequence(self) -> int:
        return int(self.rng.choice(list(self.model)))

    def _page(self) -> int | None:
        pages = [page for sequence in self.model for page in self.paged.table.pages(sequence)]
        return int(self.rng.choice(pages)) if pages else None


def fuzz(num_operations: int, seed: int, directory: Path) -> dict[str, Any]:
    """Raises at the first thing that is not as it should be."""
    state = Fuzz(np.random.default_rng(seed), directory)
    started = time.perf_counter()
    for _ in range(num_operations):
        state.step()
    state.end()
    return {
        "operations": num_operations,
        "seed": seed,
        "leaked_pages": 0,
        "done": dict(sorted(state.done.items())),
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        result = fuzz(options.operations, options.seed, Path(directory))
    finish({"bench": "pages", **result, "machine": machine()}, options.json)


if __name__ == "__main__":
    main()
