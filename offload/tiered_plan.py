"""Divide a host budget for a context whose KV is in files: arithmetic only, before anything is allocated."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from offload.disk import BLOCK_BYTES
from offload.errors import TierError
from offload.host_tier import NUM_SCRATCHES, HostTier
from offload.row_files import RowFiles
from offload.tier import Tier

_MAX_SCRATCH_BYTES = 2 << 20  # enough to keep a disk busy
_MAX_PAGES = 1 << 31  # page numbers are int32


@dataclass(frozen=True, slots=True, kw_only=True)
class TieredPlan:
    """The sizes of all parts. A page is `page_rows` rows of one KV head of a layer; the last page may have fewer."""

    num_kv_heads: int
    context_len: int
    row_bytes: int  # K and V
    page_rows: int
    stream_rows: int
    num_pages: int
    num_slots: int  # pages that fit into the budget
    scratch_bytes: int  # of one read
    resident_bytes: int
    fixed_bytes: int  # part of the budget that is not for pages

    @property
    def page_bytes(self) -> int:
        return self.page_rows * self.row_bytes

    @property
    def pages_per_head(self) -> int:
        return -(-self.context_len // self.page_rows)

    @property
    def stream_bytes(self) -> int:
        """The bytes of one piece of a stream, all heads."""
        return self.num_kv_heads * self.stream_rows * self.row_bytes


def plan_tiers(
    num_layers: int,
    shape: tuple[int, int, int],  # num_kv_heads, context_len, head_dim
    itemsize: int,
    budget_bytes: int,
    resident: Sequence[slice],
    page_rows: int | None,
    stream_rows: int,
) -> TieredPlan:
    """Divide the budget. Raises TierError if it does not suffice for one page.

    page_rows: None: one row, because selected rows are scattered; more if the bookkeeping of such pages would take much
    of the budget, or if the budget is too small for what small pages need besides.
    """
    for name, num_rows in (("page_rows", page_rows), ("stream_rows", stream_rows)):
        if num_rows is not None and num_rows < 1:
            raise TierError(f"{name} is {num_rows}; give at least 1")
    plan = partial(_plan, num_layers, shape, itemsize, budget_bytes, resident, stream_rows)
    if page_rows is not None:
        return plan(page_rows)
    for rows in (1 << power for power in range(stream_rows.bit_length() - 1)):
        num_pages = num_layers * shape[0] * -(-shape[1] // rows)
        if num_pages * Tier.BYTES_PER_PAGE <= budget_bytes // 16 and num_pages < _MAX_PAGES:
            with suppress(TierError):
                return plan(rows)
    return plan(stream_rows)


def _plan(
    num_layers: int,
    shape: tuple[int, int, int],
    itemsize: int,
    budget_bytes: int,
    resident: Sequence[slice],
    stream_rows: int,
    page_rows: int,
) -> TieredPlan:
    num_kv_heads, context_len, head_dim = shape
    row_bytes, num_heads = 2 * head_dim * itemsize, num_layers * num_kv_heads
    num_pages = num_heads * -(-context_len // page_rows)
    slot_bytes = HostTier.slot_bytes(page_rows * row_bytes)
    resident_bytes = num_heads * sum(rows.stop - rows.start for rows in resident) * row_bytes
    stream_bytes = 2 * num_kv_heads * stream_rows * row_bytes
    copies = 2 if page_rows * row_bytes < BLOCK_BYTES else 1  # small pieces go through a temporary copy
    scratches = copies * NUM_SCRATCHES
    least_bytes = RowFiles.least_scratch_bytes(max(page_rows, stream_rows) * row_bytes)
    without_scratch = resident_bytes + stream_bytes + num_pages * Tier.BYTES_PER_PAGE
    needed_bytes = without_scratch + scratches * least_bytes + slot_bytes
    if budget_bytes < needed_bytes:
        raise TierError(
            f"a host budget of {budget_bytes:,} bytes is too small for this context: sinks, windows, buffers and one "
            f"page need {needed_bytes:,} bytes; give at least that, or choose a shorter window"
        )
    wanted_bytes = max(num_kv_heads * least_bytes, budget_bytes // 128)  # one piece of each head, or many rows
    room_bytes = (budget_bytes - without_scratch - slot_bytes) // scratches
    scratch_bytes = max(least_bytes, min(wanted_bytes, budget_bytes // 32, _MAX_SCRATCH_BYTES, room_bytes))
    scratch_bytes = scratch_bytes // BLOCK_BYTES * BLOCK_BYTES
    fixed_bytes = without_scratch + scratches * scratch_bytes
    num_slots = min(num_pages, (budget_bytes - fixed_bytes) // slot_bytes)
    return TieredPlan(
        num_kv_heads=num_kv_heads,
        context_len=context_len,
        row_bytes=row_bytes,
        page_rows=page_rows,
        stream_rows=stream_rows,
        num_pages=num_pages,
        num_slots=num_slots,
        scratch_bytes=scratch_bytes,
        resident_bytes=resident_bytes,
        fixed_bytes=fixed_bytes,
    )
