"""Invariants of the classes that manage memory: `check` raises AssertionError if one is violated."""

from functools import singledispatch
from typing import Any

import numpy as np
import torch

from offload.blocks import Blocks
from offload.host_tier import _READY, HostTier
from offload.pinned import MAX_CHUNK_BYTES, PinnedRows, _span
from offload.slot_cache import NEVER_USED, SlotCache
from offload.tier import Tier
from offload.tiered_store import TieredStore


@singledispatch
def check(thing: Any) -> None:
    raise TypeError(f"nothing is known of what keeps {thing!r} right")


@check.register
def _(tier: Tier) -> None:
    """Raise AssertionError if a page has two slots, a slot two pages, or a free slot a page or a pin."""
    used = np.flatnonzero(tier._page_in >= 0)
    placed = np.flatnonzero(tier._slot_of >= 0)
    assert len(used) == len(placed) == tier.num_used, f"{tier!r} has lost a slot"
    assert (tier._slot_of[tier._page_in[used]] == used).all(), f"{tier!r} has two slots for a page"
    free = np.sort(tier._free[: tier._num_free])
    assert np.array_equal(free, np.flatnonzero(tier._page_in < 0)), f"{tier!r} has lost a free slot, or has it twice"
    assert (tier._pins >= 0).all() and not tier._pins[free].any(), f"{tier!r} has a pin where there is no page"


@check.register
def _(tier: HostTier) -> None:
    """Raise AssertionError if the book-keeping is wrong. No page may be in use."""
    with tier._changed:
        check(tier._tier)
        used = tier._tier._page_in >= 0
        assert (tier._states[used] == _READY).all(), f"{tier!r} keeps a page that was never filled"
        assert not tier._tier.is_pinned(np.flatnonzero(used)).any(), f"{tier!r} has a page that is still in use"


@check.register
def _(store: TieredStore) -> None:
    """Raise AssertionError if the budget is exceeded or the book-keeping is wrong. No call may be under way."""
    check(store.tier)
    resident_bytes = sum(rows.nbytes for rows in store._resident.values())
    assert resident_bytes <= store.plan.resident_bytes, f"{store!r} keeps more rows than were planned"
    assert store.held_bytes <= store.budget_bytes, f"{store!r} exceeds its budget"


@check.register
def _(rows: PinnedRows) -> None:
    """Raise AssertionError if a row of a pinned layer lies in no registered chunk, or in two."""
    assert all(begin < end <= begin + MAX_CHUNK_BYTES for begin, end in rows._chunks)
    assert all(end <= begin for (_, end), (begin, _) in zip(rows._chunks, rows._chunks[1:], strict=False))
    for layer in rows.layers if rows.pinned else []:
        begin, end = _span(layer)
        registered = sum(max(0, min(end, last) - max(begin, first)) for first, last in rows._chunks)
        assert registered == end - begin, f"{rows!r} has a layer that is not"


@check.register
def _(cache: SlotCache) -> None:
    """Raise AssertionError if a row is lost or has two owners. Waits for the device."""
    capacity, num_slots = cache.shape.context_capacity, cache.shape.num_slots
    slots, keys = cache._slot_of_key.flatten(0, 2), cache._key_of_slot.flatten(0, 2)
    ages = cache._ages.flatten(0, 2)
    assert bool(((slots >= -1) & (slots < num_slots)).all()), f"{cache!r} has a key in no slot of its own"
    assert bool(((keys >= -1) & (keys < capacity)).all()), f"{cache!r} has a slot with no key of its context"
    assert bool(((slots >= 0).sum(1) == (keys >= 0).sum(1)).all()), f"{cache!r} lost or shared a row"
    owner = slots.gather(1, keys.clamp(min=0).long())
    expected = torch.arange(num_slots, device=slots.device)
    assert bool(((keys < 0) | (owner == expected)).all()), f"{cache!r} has maps that contradict each other"
    assert bool((ages[:, num_slots:] == 0).all()), f"{cache!r} has aged slots that do not exist"
    assert bool(((ages[:, :num_slots] == NEVER_USED) == (keys < 0)).all()), f"{cache!r} has ages that contradict"
    assert bool((ages[:, :num_slots] > 0).all()), f"{cache!r} lost a slot"


def flush(blocks: Blocks) -> None:
    """Wait until every block that was put is in its file, or refused."""
    blocks._writer.submit(int).result()


@check.register
def _(blocks: Blocks) -> None:
    """Raise AssertionError if the book-keeping is wrong. No block may be in use."""
    with blocks._lock:
        assert blocks._num_bytes == sum(entry.data.nbytes for entry in blocks._entries.values()), (
            f"{blocks!r} counts wrongly"
        )
        assert blocks._num_bytes <= blocks._budget_bytes, f"{blocks!r} holds more than it may"
        assert not any(entry.num_users for entry in blocks._entries.values()), f"{blocks!r} has a block that is in use"
