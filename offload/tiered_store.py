"""The context's KV in files, with recently used pages in host memory: a context may be larger than memory.

The files are the artifact's own and are never written, so evicting a page only drops it. Reads bypass the page cache
where the file system allows it, so that the budget is all the host memory that the context takes.
"""

from collections.abc import Generator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

from offload.disk import aligned_bytes
from offload.errors import DiskError, TierError, is_out_of_memory
from offload.host_store import row_numbers
from offload.host_tier import HostTier
from offload.kv_store import STREAM_ROWS, pieces_of
from offload.row_files import Bytes, FileSpan, Numbers, RowFiles, start_threads
from offload.tiered_plan import plan_tiers


class TieredStore:
    """Owns the open files, the memory within the budget, and the read-ahead thread. A thread-safe `KvStore`.

    One thread at a time can stream; another waits for it. Disk errors raise DiskError, and never yield wrong rows.
    """

    def __init__(
        self,
        layers: Sequence[FileSpan],  # per layer an array [num_kv_heads, context_len, 2, head_dim]
        shape: tuple[int, int, int],  # num_kv_heads, context_len, head_dim
        dtype: torch.dtype,
        budget_bytes: int,  # of host memory, for everything except the tensors that `gather` returns
        *,
        resident: Sequence[slice] = (),  # row ranges of each layer that stay in memory once they were read
        page_rows: int | None = None,  # rows that are loaded and evicted together; None: as few as the budget allows
        stream_rows: int = STREAM_ROWS,
    ) -> None:
        self.plan = plan_tiers(len(layers), shape, dtype.itemsize, budget_bytes, resident, page_rows, stream_rows)
        self.budget_bytes = budget_bytes
        self._shape, self._dtype, self._num_layers = shape, dtype, len(layers)
        self._resident_ranges = {(rows.start, rows.stop) for rows in resident}
        self._resident: dict[tuple[int, int, int], Tensor] = {}
        self._files, plan = RowFiles(layers), self.plan
        self._buffers: SimpleQueue[tuple[Bytes, Bytes]] = SimpleQueue()
        try:
            self.tier = HostTier(self._files, plan.num_pages, plan.num_slots, plan.page_bytes, plan.scratch_bytes)
            self._buffers.put((aligned_bytes(plan.stream_bytes), aligned_bytes(plan.stream_bytes)))
            self._ahead = start_threads(1, "csattn-read-ahead")
        except BaseException as error:
            self._files.close()
            if not is_out_of_memory(error):
                raise
            raise TierError(
                f"the system has no memory for a host budget of {budget_bytes:,} bytes ({error}); give a smaller one"
            ) from error

    def __repr__(self) -> str:
        return f"<TieredStore {self.tier!r} over {self._files!r}, {self.held_bytes:,}/{self.budget_bytes:,} bytes>"

    @property
    def held_bytes(self) -> int:
        """The host memory in use, buffers included that are used only during a call."""
        return self.plan.fixed_bytes + self.tier.num_used * HostTier.slot_bytes(self.plan.page_bytes)

    def rows(self, layer_idx: int, rows: slice) -> Tensor:
        """Return a range of rows [num_kv_heads, num_rows, 2, head_dim]; it must be resident, or empty."""
        num_kv_heads, _, head_dim = self._shape
        if rows.start >= rows.stop:
            return torch.empty(num_kv_heads, 0, 2, head_dim, dtype=self._dtype)
        if (rows.start, rows.stop) not in self._resident_ranges:
            raise TierError(
                f"rows {rows.start} to {rows.stop} do not stay in host memory, and a selector that reads all rows "
                "cannot run within a host budget: choose another selector, or leave the budget out"
            )
        place = layer_idx, rows.start, rows.stop
        if place not in self._resident:
            pieces = [piece.clone() for piece in self.stream(layer_idx, rows)]
            self._resident[place] = torch.cat(pieces, dim=1)
        return self._resident[place]

    def gather(self, layer_idx: int, kv_indices: Tensor) -> Tensor:
        """See `KvStore.gather`."""
        numbers = row_numbers(self._shape, kv_indices).reshape(-1).numpy()
        out = torch.empty(*kv_indices.shape, 2, self._shape[2], dtype=self._dtype)
        into = out.view(-1).view(torch.uint8).numpy().reshape(-1, self.plan.row_bytes)
        pages, in_page = self._pages_of(layer_idx, numbers)
        wanted, which = np.unique(pages, return_inverse=True)
        with self.tier.hold(layer_idx, wanted, self._starts(wanted)) as slots:
            lies = slots[which]
            there = lies >= 0
            rows = self.tier.memory.reshape(-1, self.plan.row_bytes)
            if there.all():
                np.take(rows, lies * self.plan.page_rows + in_page, axis=0, out=into, mode="clip")
            else:
                into[there] = rows[lies[there] * self.plan.page_rows + in_page[there]]
        if not there.all():
            places = np.flatnonzero(~there)
            places = places[np.argsort(numbers[places], kind="stable")]
            self.tier.read(layer_idx, numbers[places] * self.plan.row_bytes, into, places)
        return out

    def prefetch(self, layer_idx: int, kv_indices: Tensor) -> None:
        """Load rows that will be gathered next into memory, on the read-ahead thread. Returns at once."""
        pages, _ = self._pages_of(layer_idx, row_numbers(self._shape, kv_indices).reshape(-1).numpy())
        self._ahead.submit(self._read_ahead, layer_idx, np.unique(pages))

    def stream(self, layer_idx: int, rows: slice) -> Generator[Tensor, None, None]:
        """Yield a range of rows piece by piece, reading the next one ahead (double buffering): see `KvStore.stream`.

        It evicts nothing: a range that is larger than the budget would evict its own pages before they are used again.
        """
        self._require_layer(layer_idx)
        buffers = self._buffers.get()
        in_flight: list[Future[Tensor]] = []
        try:
            for number, piece in enumerate(pieces_of(rows, self.plan.stream_rows)):
                in_flight.append(self._ahead.submit(self._fill, buffers[number % 2], layer_idx, piece))
                if len(in_flight) > 1:
                    yield in_flight.pop(0).result()
            if in_flight:
                yield in_flight.pop().result()
        finally:
            wait(in_flight)
            self._buffers.put(buffers)

    def close(self) -> None:
        """End the threads, close the files and free the memory. No call may be in progress."""
        self._ahead.shutdown()
        self._files.close()
        self.tier.close()
        self._resident.clear()

    def _fill(self, buffer: Bytes, layer_idx: int, piece: slice) -> Tensor:
        """Fill a buffer with rows of all heads, from cached pages or files: [num_kv_heads, num_rows, 2, head_dim]."""
        plan, (num_kv_heads, context_len, head_dim) = self.plan, self._shape
        num_bytes = (piece.stop - piece.start) * plan.row_bytes
        by_head = buffer[: num_kv_heads * num_bytes].reshape(num_kv_heads, num_bytes)
        numbers, missing = np.arange(num_kv_heads) * context_len + piece.start, np.arange(num_kv_heads)
        if plan.page_rows == plan.stream_rows:
            pages, in_page = self._pages_of(layer_idx, numbers)
            first = int(in_page[0]) * plan.row_bytes
            with self.tier.hold(layer_idx, pages, self._starts(pages), evict=False) as slots:
                for head, slot in enumerate(slots.tolist()):
                    if slot >= 0:
                        by_head[head] = self.tier.memory[slot, first : first + num_bytes]
            missing = np.flatnonzero(slots < 0)
        self.tier.read(layer_idx, numbers[missing] * plan.row_bytes, by_head, missing)
        rows = torch.from_numpy(by_head.reshape(-1)).view(self._dtype)
        return rows.view(num_kv_heads, -1, 2, head_dim)

    def _read_ahead(self, layer_idx: int, pages: Numbers) -> None:
        with suppress(DiskError), self.tier.hold(layer_idx, pages, self._starts(pages)):
            pass  # the gather runs into the same error and raises it

    def _pages_of(self, layer_idx: int, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """Return the page of each row, and its index in the page. numbers: rows counted over a layer's heads."""
        self._require_layer(layer_idx)
        head, row = np.divmod(numbers, self._shape[1])
        page, in_page = np.divmod(row, self.plan.page_rows)
        return (layer_idx * self._shape[0] + head) * self.plan.pages_per_head + page, in_page

    def _require_layer(self, layer_idx: int) -> None:
        if not 0 <= layer_idx < self._num_layers:
            raise TierError(f"the store has layers 0 to {self._num_layers - 1}, not {layer_idx}")

    def _starts(self, pages: Numbers) -> Numbers:
        """Return the offsets of pages in their layer's array, in bytes."""
        head, page = np.divmod(pages, self.plan.pages_per_head)
        row = (head % self._shape[0]) * self._shape[1] + page * self.plan.page_rows
        return np.asarray(row * self.plan.row_bytes)
