"""The slot cache's definition keeps selected rows and evicts those unused longest."""

from collections import Counter

import numpy as np
import pytest

from offload.reference import ReferenceSlotCache
from tests.offload.selections import make_step, masked


@pytest.mark.parametrize(
    ("num_slots", "num_index_heads", "batch", "spills"),
    [(1, 2, 1, True), (17, 2, 1, False), (17, 4, 3, True), (40, 2, 5, False), (200, 2, 2, False)],
)
def test_every_selected_row_is_in_a_slot_or_returned_by_key(
    num_slots: int, num_index_heads: int, batch: int, spills: bool, rng: np.random.Generator
) -> None:
    cache = ReferenceSlotCache(num_contexts=2, num_kv_heads=2, num_slots=num_slots)
    popularity = rng.standard_normal((2, num_index_heads, 53))
    contents = {head: list(keys) for head, keys in cache.key_of_slot.items()}
    for _ in range(60):
        step = make_step(rng, popularity, batch, max_top_k=16)
        ids, moved = cache.look_up(*step)
        for head, pairs in moved.items():
            for key, slot in pairs:
                contents[head][slot] = key
        assert contents == cache.key_of_slot
        kv_indices, _, context_ids = masked(step)
        assert ((ids == -1) == (kv_indices == -1)).all()
        for row, index_head, place in zip(*np.nonzero(kv_indices >= 0), strict=True):
            head = int(context_ids[row]), int(index_head) // (num_index_heads // 2)
            slot, key = ids[row, index_head, place], kv_indices[row, index_head, place]
            assert contents[head][slot] == key if slot >= 0 else -2 - slot == key
        owners = Counter((head, key) for head, keys in cache.key_of_slot.items() for key in keys if key >= 0)
        assert not owners or max(owners.values()) == 1
    assert cache.num_selected >= cache.num_found + cache.num_moved
    assert (cache.num_spilled > 0) == spills


def select(cache: ReferenceSlotCache, *keys: int) -> tuple[list[int], list[tuple[int, int]]]:
    ids, moved = cache.look_up(
        np.array([[keys]], np.int32).reshape(1, 1, -1), np.array([[len(keys)]], np.int32), np.zeros(1, np.int32)
    )
    return ids[0, 0].tolist(), moved[0, 0]


def test_recently_selected_rows_stay_and_the_longest_unused_are_evicted() -> None:
    cache = ReferenceSlotCache(num_contexts=1, num_kv_heads=1, num_slots=4)
    assert select(cache, 10, 20, 30) == ([0, 1, 2], [(10, 0), (20, 1), (30, 2)])
    assert select(cache, 20, 40) == ([1, 3], [(40, 3)])
    assert select(cache, 30) == ([2], [])
    assert select(cache, 50) == ([0], [(50, 0)])  # 10, unused for two steps
    assert select(cache, 20, 60, 70) == ([1, 2, 3], [(60, 2), (70, 3)])  # 40 and 30, though 50 has the lower slot
    assert cache.unused_for[0, 0] == [1, 0, 0, 0]


def test_rows_without_a_slot_are_returned_by_key_and_evict_no_row_of_their_step() -> None:
    cache = ReferenceSlotCache(num_contexts=1, num_kv_heads=1, num_slots=2)
    select(cache, 5)
    assert select(cache, 1, 5, 7, 8) == ([1, 0, -2 - 7, -2 - 8], [(1, 1)])
    assert cache.num_spilled == 2


def test_ages_saturate_so_very_old_rows_are_evicted_in_slot_order() -> None:
    cache = ReferenceSlotCache(num_contexts=1, num_kv_heads=1, num_slots=3)
    select(cache, 1, 2)
    select(cache, 2)
    for _ in range(300):
        select(cache, 3)
    assert select(cache, 4) == ([0], [(4, 0)])
    assert select(cache, 1) == ([1], [(1, 1)])
