"""A cache of context rows on the device: rows selected before stay, only the others move. Decided on the device.

The host enqueues and never waits: a lookup and the gather of what it found missing can be part of a captured graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from csattn.cuda import CudaKernel, cuda_kernel, limits
from offload.errors import OffloadError
from offload.gather import RowGather, RowLists, make_row_lists

NEVER_USED = 127  # the age of an empty slot; `slot_ages.cuh` has the others
_CLUSTER, _THREADS = 8, 512  # blocks that decide about one KV head, and threads of each
_ALONE_THREADS = 1024  # of the one block that does so where there are no clusters
_FEW_ROUNDS, _ENTRY_BYTES = 16, 16  # as in the kernel: of more rounds a thread has what it holds in memory
_RESIDENT_THREADS = 2048 * 148  # of a device, at most
_LIST_SETS = 3  # lookups whose lists and ids live at the same time
_MOST_IDS = 1 << 31  # of a lookup: places in its lists are int32
_SOURCE = Path(__file__).with_name("slot_cache.cu")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotCacheShape:
    """What a cache is made for. Rows of one KV head are shared by all requests that continue the same context."""

    num_layers: int
    num_contexts: int  # loaded at the same time
    num_kv_heads: int
    num_index_heads: int  # a multiple of num_kv_heads: neighbours share a KV head's rows
    context_capacity: int  # rows of the longest context
    num_slots: int  # rows on the device per layer, context and KV head
    max_top_k: int
    max_batch: int
    row_bytes: int  # K and V of one key, whatever form they have

    def __post_init__(self) -> None:
        assert self.num_index_heads % self.num_kv_heads == 0
        assert min(self.num_layers, self.num_contexts, self.context_capacity, self.num_slots, self.max_top_k) > 0
        if self.num_slots > max_slots():
            raise OffloadError(
                f"a slot cache of {self.num_slots:,} rows per KV head was requested; its kernel supports up to "
                f"{max_slots():,} on this GPU: choose a smaller slot cache"
            )
        num_ids = self.max_batch * self.num_index_heads * self.max_top_k
        if num_ids >= _MOST_IDS:
            raise OffloadError(
                f"a step of {self.max_batch} requests that choose {self.max_top_k:,} rows each for "
                f"{self.num_index_heads} heads has {num_ids:,} rows to look up, and a slot cache supports fewer than "
                f"{_MOST_IDS:,}: decode fewer requests in a step, or choose fewer rows"
            )

    @property
    def block_slots(self) -> int:
        """Slots that one block of the kernel looks after."""
        blocks, threads = _blocks()
        return -(-self.num_slots // (blocks * threads)) * threads

    @property
    def padded_slots(self) -> int:
        """Slots that all blocks of a KV head look after: some do not exist."""
        return _blocks()[0] * self.block_slots


def _blocks() -> tuple[int, int]:
    """That decide about one KV head, a cluster of them, and threads of each."""
    return (_CLUSTER, _THREADS) if limits().is_hopper else (1, _ALONE_THREADS)


def _block_bytes(blocks: int, block_slots: int) -> int:
    """Of shared memory: an age, a place in the list of replaced slots, and a bit for each slot of all blocks."""
    return block_slots * (1 + (4 if blocks > 1 else 2)) + blocks * block_slots // 8


def max_slots() -> int:
    """Rows of a KV head that the shared memory of its blocks has room for."""
    blocks, threads = _blocks()
    room = limits().block_bytes - 1024 * (blocks + 1)
    return blocks * threads * (room // _block_bytes(blocks, threads))


def slot_cache_bytes(shape: SlotCacheShape) -> int:
    """Device memory of a `SlotCache` of that shape."""
    heads = shape.num_layers * shape.num_contexts * shape.num_kv_heads
    state = heads * (shape.num_slots * 4 + shape.padded_slots + shape.context_capacity * 4)
    lists = shape.max_batch * shape.num_kv_heads * (8 * shape.num_slots + 20)
    ids = shape.max_batch * shape.num_index_heads * shape.max_top_k * 4
    table = shape.num_layers * (shape.num_contexts * 8 + 32) + shape.num_contexts * 8
    return heads * shape.num_slots * shape.row_bytes + state + table + _LIST_SETS * (lists + ids)


def stack_bytes(shape: SlotCacheShape) -> int:
    """Device memory that the driver sets aside besides, with the first lookup: what a thread holds and has no registers
    for, of all threads that a device has room for."""
    lists = shape.max_batch * shape.num_index_heads // shape.num_kv_heads
    blocks, threads = _blocks()
    rounds = -(-lists * shape.max_top_k // (4 * blocks * threads)) * 4
    slot_rounds = shape.block_slots // threads
    held = _ENTRY_BYTES * rounds * (rounds > _FEW_ROUNDS) + 4 * slot_rounds * (slot_rounds > _FEW_ROUNDS)
    return -(-held // 16) * 16 * _RESIDENT_THREADS


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a lookup yields; its tensors are written again by the third lookup after it."""

    # a slot of the row's context and KV head; -2 - key for a row that is read from the host; -1 padding
    ids: Tensor  # [batch, num_index_heads, max_top_k] int32
    moves: RowLists  # the rows that must be gathered before any of these slots is read; batch * num_kv_heads lists


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """Sums over all lookups of one layer."""

    num_selected: int  # entries of the selections
    num_found: int  # of these, with a row that was on the device already
    num_moved: int  # rows copied to the device; one may serve entries of several requests
    num_spilled: int  # entries for whose row no slot was left


class SlotCache:
    """State of all layers in a few tensors; contexts come and go in the places that it has for them."""

    def __init__(self, shape: SlotCacheShape, device: torch.device, rows: Tensor | None = None) -> None:
        """rows: the slots, of sizes as below, a layer's in one piece; None: its own."""
        self.shape = shape
        heads = (shape.num_layers, shape.num_contexts, shape.num_kv_heads)

        def full(size: tuple[int, ...], value: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(size, value, dtype=dtype, device=device)

        slots = *heads, shape.num_slots, shape.row_bytes
        self.rows = torch.zeros(slots, dtype=torch.uint8, device=device) if rows is None else rows
        assert self.rows.shape == slots and self.rows.dtype == torch.uint8 and self.rows[0].is_contiguous()
        # where each layer's and context's rows are on the host: [num_kv_heads, context_len] of them each
        self.host_addresses = full((shape.num_layers, shape.num_contexts), 0, torch.int64)
        self.context_lens = full((shape.num_contexts,), 0, torch.int64)
        self._slot_of_key = full((*heads, shape.context_capacity), -1)
        self._key_of_slot = full((*heads, shape.num_slots), -1)
        self._ages = full((*heads, shape.padded_slots), 0, torch.uint8)
        self._ages[..., : shape.num_slots] = NEVER_USED
        self._statistics = full((shape.num_layers, 4), 0, torch.int64)
        num_lists = shape.max_batch * shape.num_kv_heads
        self._lists = [make_row_lists(num_lists, shape.num_slots, device) for _ in range(_LIST_SETS)]
        self._ids = full((_LIST_SETS, shape.max_batch, shape.num_index_heads, shape.max_top_k), -1)
        self._num_lookups = 0
        self._blocks, self._kernels = _blocks(), {1: _kernel(shape, 1)}
        self._gather = RowGather(shape.row_bytes, num_lists)

    def __repr__(self) -> str:
        s = self.shape
        return (
            f"<SlotCache {s.num_layers} layers x {s.num_contexts} contexts x {s.num_kv_heads} heads x "
            f"{s.num_slots} slots of {s.row_bytes} bytes>"
        )

    def load_context(self, context_id: int, addresses: Sequence[int], context_len: int) -> None:
        """Give a place to a context; whatever the place held is forgotten.

        addresses: of each layer's rows, [num_kv_heads, context_len] of `row_bytes`, readable by the device.
        """
        assert len(addresses) == self.shape.num_layers, f"{len(addresses)} addresses for {self!r}"
        assert 0 < context_len <= self.shape.context_capacity, f"{context_len} rows are not what {self!r} was made for"
        self.reset(context_id)
        self.host_addresses[:, context_id] = torch.tensor(addresses, dtype=torch.int64)
        self.context_lens[context_id] = context_len

    def reset(self, context_id: int) -> None:
        """Forget which rows of a context are on the device."""
        self._slot_of_key[:, context_id] = -1
        self._key_of_slot[:, context_id] = -1
        self._ages[:, context_id, :, : self.shape.num_slots] = NEVER_USED

    def look_up(
        self,
        layer_idx: int,
        kv_indices: Tensor,  # [batch, num_index_heads, max_top_k] int32, ascending, unique, below the context's length
        valid_len: Tensor,  # [batch, num_index_heads] int32; what lies behind it is not read
        context_ids: Tensor,  # [batch] int32, -1: idle
    ) -> Lookup:
        """Decide where the selected rows of a layer are or will be. Nothing has moved yet: see `fetch`."""
        shape = self.shape
        batch = kv_indices.shape[0]
        assert batch <= shape.max_batch and kv_indices.shape[1:] == (shape.num_index_heads, shape.max_top_k)
        assert kv_indices.dtype == valid_len.dtype == context_ids.dtype == torch.int32
        assert kv_indices.is_contiguous() and valid_len.is_contiguous() and context_ids.is_contiguous()
        turn = self._num_lookups % _LIST_SETS
        self._num_lookups += 1
        ids = self._ids[turn, :batch]
        lists = RowLists(*(of_all[: batch * shape.num_kv_heads] for of_all in self._lists[turn]))
        if batch not in self._kernels:
            self._kernels[batch] = _kernel(shape, batch)
        blocks, threads = self._blocks
        self._kernels[batch].launch(
            (blocks, shape.num_kv_heads, batch),
            threads,
            kv_indices,
            valid_len,
            context_ids,
            self._slot_of_key[layer_idx],
            self._key_of_slot[layer_idx],
            self._ages[layer_idx],
            self.rows[layer_idx],
            self.host_addresses[layer_idx],
            self.context_lens,
            ids,
            *lists,
            self._statistics[layer_idx],
        )
        return Lookup(ids, lists)

    def fetch(
        self,
        layer_idx: int,
        kv_indices: Tensor,
        valid_len: Tensor,
        context_ids: Tensor,
        link: torch.cuda.Stream | None = None,  # for the rows' way; None: the current one
    ) -> Tensor:
        """Bring the selected rows to the device, as far as there are slots; returns `Lookup.ids`.

        The layer's next lookup, and the third of any, must come after the rows.
        """
        lookup = self.look_up(layer_idx, kv_indices, valid_len, context_ids)
        if link is not None:
            link.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(link):  # None changes nothing
            self._gather.launch(lookup.moves)
        return lookup.ids

    def statistics(self) -> list[LayerStatistics]:
        """Per layer, since the cache was made or `clear_statistics`. Waits for the device."""
        return [LayerStatistics(*counts) for counts in self._statistics.tolist()]

    def clear_statistics(self) -> None:
        self._statistics.zero_()


def _kernel(shape: SlotCacheShape, batch: int) -> CudaKernel:
    blocks, threads = _blocks()
    defines = {
        "THREADS": threads,
        "CLUSTER": blocks,
        "NUM_KV_HEADS": shape.num_kv_heads,
        "HEADS_PER_KV": shape.num_index_heads // shape.num_kv_heads,
        "MAX_TOP_K": shape.max_top_k,
        "NUM_SLOTS": shape.num_slots,
        "CAPACITY": shape.context_capacity,
        "ROW_BYTES": shape.row_bytes,
        "BATCH": batch,
        "BLOCK_SLOTS": shape.block_slots,
    }
    return cuda_kernel(_SOURCE, "look_up_rows", defines, _block_bytes(blocks, shape.block_slots))
