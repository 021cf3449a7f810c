"""The slot cache on the device agrees with its definition, and never gives a wrong row."""

import gc

import numpy as np
import pytest
import torch
from torch import Tensor

from offload import gather, slot_cache
from offload.cuda import host_register, host_unregister
from offload.errors import OffloadError
from offload.reference import ReferenceSlotCache
from offload.slot_cache import SlotCache, SlotCacheShape, slot_cache_bytes, stack_bytes
from tests.cuda_on_cpu import emulated
from tests.cuda_on_cpu.emulated import DEVICE
from tests.offload.selections import make_step, masked
from tests.offload.soundness import check


@pytest.fixture(autouse=True)
def kernels(emulator: emulated.Emulator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the kernels on the CPU if there is no GPU."""
    emulator.stand_in(monkeypatch, slot_cache, gather)


def make_shape(**changes: int) -> SlotCacheShape:
    sizes = {
        "num_layers": 2,
        "num_contexts": 2,
        "num_kv_heads": 2,
        "num_index_heads": 2,
        "context_capacity": 997,
        "num_slots": 100,
        "max_top_k": 64,
        "max_batch": 5,
        "row_bytes": 256,
    }
    return SlotCacheShape(**(sizes | changes))


def test_selections_with_too_many_rows_to_number_are_refused() -> None:
    """The sizes are those of a step over 16M tokens, of which 2 % are chosen."""
    make_shape(num_index_heads=128, max_top_k=335_544, max_batch=32)
    with pytest.raises(OffloadError, match=r"64 requests that choose 335,544 rows each for 128 heads"):
        make_shape(num_index_heads=128, max_top_k=335_544, max_batch=64)


@pytest.mark.large_gpu
def test_caches_with_too_many_rows_to_move_are_refused() -> None:
    make_shape(num_kv_heads=32, num_index_heads=32, num_slots=262_144, max_batch=255)
    with pytest.raises(OffloadError, match=r"256 requests may move 262,144 rows each for 32 KV heads"):
        make_shape(num_kv_heads=32, num_index_heads=32, num_slots=262_144, max_batch=256)


def test_a_caches_bytes_are_mostly_rows() -> None:
    shape = SlotCacheShape(
        num_layers=32,
        num_contexts=1,
        num_kv_heads=8,
        num_index_heads=8,
        context_capacity=131072,
        num_slots=19662,
        max_top_k=6554,
        max_batch=1,
        row_bytes=512,
    )
    rows_bytes = 32 * 8 * 19662 * 512
    assert rows_bytes < slot_cache_bytes(shape) < 1.1 * rows_bytes


def test_slot_cache_bytes_equals_what_is_allocated() -> None:
    def storages() -> dict[int, int]:
        memory = (of.untyped_storage() for of in gc.get_objects() if type(of) is Tensor)
        return {of.data_ptr(): of.nbytes() for of in memory}

    before = storages()
    cache = SlotCache(make_shape(num_slots=5000, context_capacity=20000), DEVICE)
    assert sum(size for place, size in storages().items() if place not in before) == slot_cache_bytes(cache.shape)


@pytest.mark.large_gpu
@pytest.mark.parametrize(
    ("batch", "context_len", "held"),
    [(1, 131072, 0), (64, 131072, 704), (8, 1048576, 864), (16, 1048576, 1504), (64, 1048576, 5408)],
)
def test_stack_bytes_equals_the_compilers_report(
    batch: int, context_len: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`held` is the size of a stack frame in bytes, reported by ptxas of CUDA 13.0 for sm_90."""
    monkeypatch.setattr(slot_cache, "_THREADS", 512)
    sizes = {"num_slots": context_len * 15 // 100, "max_top_k": context_len // 50, "max_batch": batch}
    assert stack_bytes(make_shape(context_capacity=context_len, **sizes)) == held * slot_cache._RESIDENT_THREADS


CASES = {
    "one row": {"max_batch": 1},
    "batch": {},
    "one slot": {"num_slots": 1},
    "spills": {"num_slots": 23},
    "index heads share": {"num_index_heads": 6},
    "one key": {"max_top_k": 1},
    "all keys": {"context_capacity": 64, "num_slots": 64},
    "a block's worth": {"num_slots": 512, "context_capacity": 2003, "max_top_k": 301},
    "slots of all blocks": {"num_slots": 4099, "context_capacity": 9001, "max_top_k": 1999, "max_batch": 3},
    "long lists": {"num_slots": 11000, "context_capacity": 30011, "max_top_k": 9001, "max_batch": 1, "num_contexts": 1},
}


def num_steps(shape: SlotCacheShape) -> int:
    """Return the number of steps that there is time for."""
    if DEVICE.type == "cpu":
        return 12 if shape.num_slots < 1000 else 1
    return 40 if shape.num_slots < 1000 else 8


@pytest.mark.parametrize("name", CASES)
def test_lookups_agree_with_the_definition(name: str, rng: np.random.Generator) -> None:
    shape = make_shape(**CASES[name])
    cache = SlotCache(shape, DEVICE)
    reference = ReferenceSlotCache(shape.num_contexts, shape.num_kv_heads, shape.num_slots)
    context_lens = [shape.context_capacity, shape.context_capacity - 1][: shape.num_contexts]
    for context, context_len in enumerate(context_lens):
        cache.load_context(context, [4096 * (context + 1), 64 * (context + 1)], context_len)
    popularity = rng.standard_normal((shape.num_contexts, shape.num_index_heads, min(context_lens)))
    for step_idx in range(num_steps(shape)):
        step = make_step(rng, popularity, shape.max_batch, shape.max_top_k)
        want_ids, want_moved = reference.look_up(*step)
        lookup = cache.look_up(1, *(torch.from_numpy(part).to(DEVICE) for part in step))
        np.testing.assert_array_equal(lookup.ids.cpu().numpy(), want_ids, err_msg=f"step {step_idx}")
        check(cache)
        moved = lookup.moves
        counts = moved.counts.view(-1, shape.num_kv_heads).tolist()
        assert sum(map(sum, counts)) == sum(map(len, want_moved.values()))
        for (context, head), pairs in want_moved.items():
            list_idx = int(np.flatnonzero(step[2] == context)[0]) * shape.num_kv_heads + head
            count = int(moved.counts[list_idx])
            got = torch.stack([moved.from_rows[list_idx, :count], moved.to_rows[list_idx, :count]], -1)
            assert got.tolist() == [list(pair) for pair in pairs]
            source = 64 * (context + 1) + head * context_lens[context] * shape.row_bytes
            assert int(moved.from_addresses[list_idx]) == source
            assert int(moved.to_addresses[list_idx]) == cache.rows[1, context, head].data_ptr()
    statistics = cache.statistics()
    assert statistics[0].num_selected == 0
    r, s = reference, statistics[1]
    assert (s.num_selected, s.num_found) == (r.num_selected, r.num_found)
    assert (s.num_moved, s.num_spilled) == (r.num_moved, r.num_spilled)


@pytest.mark.parametrize("name", ["index heads share", "slots of all blocks"])
def test_lookups_without_thread_block_clusters_agree_with_the_definition(
    name: str, rng: np.random.Generator, as_ampere: None
) -> None:
    test_lookups_agree_with_the_definition(name, rng)


def numbered_rows(shape: SlotCacheShape, device: torch.device | None = None) -> Tensor:
    """Return rows [num_contexts, num_kv_heads, context_capacity, row_bytes] that all differ and are never 0."""
    sizes = (shape.num_contexts, shape.num_kv_heads, shape.context_capacity)
    number = torch.arange(1, 1 + int(np.prod(sizes)), device=device).view(*sizes, 1, 1)
    rows = torch.cat([number % 30011, 1 + number // 30011], -2).expand(*sizes, 2, shape.row_bytes // 4)
    return rows.to(torch.int16).flatten(-2).view(torch.uint8)


def wrong_rows(cache: SlotCache, ids: Tensor, rows: Tensor, keys: Tensor, context_ids: Tensor) -> Tensor:
    """Return how many entries of a lookup in layer 0 do not lead to their key's row.

    rows: [num_contexts, num_kv_heads, context_capacity, row_bytes]; keys: like ids, -1 padded.
    """
    num_index_heads = keys.shape[1]
    group = num_index_heads // cache.shape.num_kv_heads
    context = context_ids.clamp(min=0).long()[:, None, None]
    head = (torch.arange(num_index_heads, device=DEVICE) // group)[None, :, None]
    cached = cache.rows[0][context, head, ids.clamp(min=0).long()]
    fresh = rows[context, head, keys.clamp(min=0).long()]
    right_row = (cached == fresh).all(-1)
    wrong = torch.where(ids >= 0, ~right_row | (keys < 0), ids != torch.where(keys < 0, -1, -2 - keys))
    return wrong.sum()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("changes", "num_steps"),
    [
        ({"num_slots": 70, "max_batch": 1, "num_contexts": 1}, 10_000),
        ({"num_slots": 90, "max_batch": 4}, 10_000),
        ({"num_slots": 600, "max_top_k": 200, "max_batch": 2, "num_index_heads": 4}, 3_000),
    ],
)
def test_thousands_of_replayed_steps_never_give_a_wrong_row(changes: dict[str, int], num_steps: int) -> None:
    """One captured graph makes random selections, looks them up, gathers from pinned memory, and compares the rows."""
    shape = make_shape(num_layers=1, **changes)
    host_rows = numbered_rows(shape)
    rows = host_rows.to(DEVICE)
    cache = SlotCache(shape, DEVICE)
    host_register(host_rows.data_ptr(), host_rows.nbytes)
    try:
        for context in range(shape.num_contexts):
            cache.load_context(context, [host_rows[context].data_ptr()], shape.context_capacity)
        popularity = torch.randn(shape.num_contexts, shape.num_index_heads, shape.context_capacity, device=DEVICE)
        num_wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
        batch, heads, top_k = shape.max_batch, shape.num_index_heads, shape.max_top_k

        def step() -> None:
            popularity.mul_(0.95).add_(0.3 * torch.randn_like(popularity))
            context_ids = torch.randint(-1 if batch > 1 else 0, shape.num_contexts, (batch,), device=DEVICE).int()
            scores = popularity[context_ids.clamp(min=0).long()] + 0.2 * torch.randn(
                batch, heads, popularity.shape[-1], device=DEVICE
            )
            valid_len = torch.randint(0, top_k + 1, (batch, heads), device=DEVICE).int()
            selected = torch.arange(top_k, device=DEVICE) < valid_len[..., None]
            keys = torch.where(selected, scores.topk(top_k).indices, shape.context_capacity).sort().values
            keys = torch.where(keys < shape.context_capacity, keys, -1).int()
            ids = cache.fetch(0, keys, valid_len, context_ids)
            wanted = torch.where((context_ids >= 0)[:, None, None], keys, -1)
            num_wrong.add_(wrong_rows(cache, ids, rows, wanted, context_ids))

        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for _ in range(num_steps):
            graph.replay()
        assert int(num_wrong) == 0
        check(cache)
        seen = cache.statistics()[0]
        assert seen.num_moved > num_steps and seen.num_found > num_steps
    finally:
        host_unregister(host_rows.data_ptr())


def test_a_reloaded_context_does_not_return_the_previous_contexts_rows(rng: np.random.Generator) -> None:
    shape = make_shape(num_layers=1, max_batch=2)
    cache = SlotCache(shape, DEVICE)
    first, second = numbered_rows(shape, DEVICE), -numbered_rows(shape, DEVICE)
    context_ids = torch.tensor([1, 0], dtype=torch.int32, device=DEVICE)
    popularity = rng.standard_normal((2, 2, 997))
    kv_indices, valid_len, _ = make_step(rng, popularity, 2, shape.max_top_k)
    selection = torch.from_numpy(kv_indices).to(DEVICE), torch.from_numpy(valid_len).to(DEVICE)
    keys = torch.from_numpy(masked((kv_indices, valid_len, np.array([1, 0], np.int32)))[0]).to(DEVICE)
    for context in range(2):
        cache.load_context(context, [first[context].data_ptr()], 997)
    cache.fetch(0, *selection, context_ids)
    cache.load_context(1, [second[1].data_ptr()], 997)
    check(cache)
    ids = cache.fetch(0, *selection, context_ids)
    now = torch.stack([first[0], second[1]])
    assert int(wrong_rows(cache, ids, now, keys, context_ids)) == 0
    moved = [cache.statistics()[0].num_moved, int(valid_len.sum()) + int(valid_len[0].sum())]
    assert moved[0] == moved[1]  # rows of context 1 moved twice, those of context 0 once
