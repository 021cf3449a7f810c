"""An LRU cache of context rows on the device, managed by the device: only selected rows that are missing are moved.

The host enqueues and never waits, so a lookup and the gather of missing rows can be part of a captured CUDA graph.
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
_CLUSTER, _THREADS = 8, 512  # thread blocks of a cluster, which serves one KV head, and threads of each
_SINGLE_BLOCK_THREADS = 1024  # threads of the single block per KV head on GPUs without clusters
_FEW_ROUNDS, _ENTRY_BYTES = 16, 16  # as in the kernel: with more rounds a thread's data is in local memory
_RESIDENT_THREADS = 2048 * 148  # the most that a device runs at once
_LIST_SETS = 3  # lookups whose lists and ids are valid at the same time
_MOST_IDS = 1 << 31  # of a lookup, and of the rows that it may move: indices in its lists are int32
_SOURCE = Path(__file__).with_name("slot_cache.cu")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotCacheShape:
    """The sizes of a slot cache. All requests that continue the same context share its rows of each KV head."""

    num_layers: int
    num_contexts: int  # loaded at the same time
    num_kv_heads: int
    num_index_heads: int  # a multiple of num_kv_heads: consecutive ones share a KV head's rows
    context_capacity: int  # rows of the longest context
    num_slots: int  # rows on the device per layer, context and KV head
    max_top_k: int
    max_batch: int
    row_bytes: int  # K and V of one key, in any format

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
        num_moves = self.max_batch * self.num_kv_heads * self.num_slots
        if num_moves >= _MOST_IDS:
            raise OffloadError(
                f"a step of {self.max_batch} requests may move {self.num_slots:,} rows each for {self.num_kv_heads} KV "
                f"heads, in all {num_moves:,}, and a slot cache supports fewer than {_MOST_IDS:,}: decode fewer "
                "requests in a step, or choose a smaller slot cache"
            )

    @property
    def block_slots(self) -> int:
        """The number of slots that one thread block manages."""
        blocks, threads = _blocks()
        return -(-self.num_slots // (blocks * threads)) * threads

    @property
    def padded_slots(self) -> int:
        """The number of slots that all blocks of a KV head manage; those from num_slots on are padding."""
        return _blocks()[0] * self.block_slots


def _blocks() -> tuple[int, int]:
    """Return the number of thread blocks that serve one KV head, as one cluster, and the threads of each."""
    return (_CLUSTER, _THREADS) if limits().is_hopper else (1, _SINGLE_BLOCK_THREADS)


def _block_bytes(blocks: int, block_slots: int) -> int:
    """Return a block's dynamic shared memory: ages, its part of the list of evicted slots, and a bit for every slot."""
    return block_slots * (1 + (4 if blocks > 1 else 2)) + blocks * block_slots // 8


def max_slots() -> int:
    """Return the most slots of a KV head that the shared memory of its blocks can manage."""
    blocks, threads = _blocks()
    room = limits().block_bytes - 1024 * (blocks + 1)
    return blocks * threads * (room // _block_bytes(blocks, threads))


def slot_cache_bytes(shape: SlotCacheShape) -> int:
    """Return the device memory of a `SlotCache` of that shape."""
    heads = shape.num_layers * shape.num_contexts * shape.num_kv_heads
    state = heads * (shape.num_slots * 4 + shape.padded_slots + shape.context_capacity * 4)
    lists = shape.max_batch * shape.num_kv_heads * (8 * shape.num_slots + 20)
    ids = shape.max_batch * shape.num_index_heads * shape.max_top_k * 4
    table = shape.num_layers * (shape.num_contexts * 8 + 32) + shape.num_contexts * 8
    return heads * shape.num_slots * shape.row_bytes + state + table + _LIST_SETS * (lists + ids)


def stack_bytes(shape: SlotCacheShape) -> int:
    """Return the device memory that the driver reserves at the first lookup for the kernel's local memory.

    It is what a thread cannot hold in registers, for as many threads as the device can run at once.
    """
    lists = shape.max_batch * shape.num_index_heads // shape.num_kv_heads
    blocks, threads = _blocks()
    rounds = -(-lists * shape.max_top_k // (4 * blocks * threads)) * 4
    slot_rounds = shape.block_slots // threads
    held = _ENTRY_BYTES * rounds * (rounds > _FEW_ROUNDS) + 4 * slot_rounds * (slot_rounds > _FEW_ROUNDS)
    return -(-held // 16) * 16 * _RESIDENT_THREADS


@dataclass(frozen=True, slots=True)
class Lookup:
    """The result of a lookup. The third lookup after it overwrites its tensors."""

    # a slot of the row's context and KV head; -2 - key: the row has to be read from the host; -1: padding
    ids: Tensor  # [batch, num_index_heads, max_top_k] int32
    moves: RowLists  # batch * num_kv_heads lists of rows, to be gathered before any of these slots is read


@dataclass(frozen=True, slots=True)
class LayerStatistics:
    """Sums over all lookups of one layer."""

    num_selected: int  # entries of the selections
    num_found: int  # entries whose row was on the device already
    num_moved: int  # rows copied to the device; one may serve entries of several requests
    num_spilled: int  # entries whose row got no slot


class SlotCache:
    """The slot caches of all layers, in a few tensors, with a fixed number of places for contexts."""

    def __init__(self, shape: SlotCacheShape, device: torch.device, rows: Tensor | None = None) -> None:
        """rows: memory for the slots, [num_layers, num_contexts, num_kv_heads, num_slots, row_bytes] uint8, with each
        layer contiguous; None: it is allocated."""
        self.shape = shape
        heads = (shape.num_layers, shape.num_contexts, shape.num_kv_heads)

        def full(size: tuple[int, ...], value: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(size, value, dtype=dtype, device=device)

        slots = *heads, shape.num_slots, shape.row_bytes
        self.rows = torch.zeros(slots, dtype=torch.uint8, device=device) if rows is None else rows
        assert self.rows.shape == slots and self.rows.dtype == torch.uint8 and self.rows[0].is_contiguous()
        # the host address of each layer's and context's rows [num_kv_heads, context_len]
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
        """Assign a place to a context, and drop what the place held.

        addresses: of each layer's rows [num_kv_heads, context_len] of `row_bytes`, readable by the device.
        """
        assert len(addresses) == self.shape.num_layers, f"{len(addresses)} addresses for {self!r}"
        assert 0 < context_len <= self.shape.context_capacity, f"{context_len} rows are not what {self!r} was made for"
        self.reset(context_id)
        self.host_addresses[:, context_id] = torch.tensor(addresses, dtype=torch.int64)
        self.context_lens[context_id] = context_len

    def reset(self, context_id: int) -> None:
        """Empty all slots of a context."""
        self._slot_of_key[:, context_id] = -1
        self._key_of_slot[:, context_id] = -1
        self._ages[:, context_id, :, : self.shape.num_slots] = NEVER_USED

    def look_up(
        self,
        layer_idx: int,
        kv_indices: Tensor,  # [batch, num_index_heads, max_top_k] int32, ascending, unique, below the context's length
        valid_len: Tensor,  # [batch, num_index_heads] int32; indices from there on are ignored
        context_ids: Tensor,  # [batch] int32, -1: idle
    ) -> Lookup:
        """Look up the selected rows of a layer, and assign slots to missing ones. It moves no row: see `fetch`."""
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
            *(kv_indices, valid_len, context_ids),
            *(self._slot_of_key[layer_idx], self._key_of_slot[layer_idx], self._ages[layer_idx]),
            *(self.rows[layer_idx], self.host_addresses[layer_idx], self.context_lens),
            *(ids, *lists, self._statistics[layer_idx]),
        )
        return Lookup(ids, lists)

    def fetch(
        self,
        layer_idx: int,
        kv_indices: Tensor,
        valid_len: Tensor,
        context_ids: Tensor,
        link: torch.cuda.Stream | None = None,  # the stream of the gather; None: the current one
    ) -> Tensor:
        """Look up the selected rows and gather missing ones into their slots, as far as slots suffice.

        Returns `Lookup.ids`. The gather must finish before the layer's next lookup, and before the third lookup of any
        layer.
        """
        lookup = self.look_up(layer_idx, kv_indices, valid_len, context_ids)
        if link is not None:
            link.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(link):  # None keeps the current stream
            self._gather.launch(lookup.moves)
        return lookup.ids

    def statistics(self) -> list[LayerStatistics]:
        """Return the counts of each layer since the cache was made or `clear_statistics`. Waits for the device."""
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
    return cuda_kernel(_SOURCE, "look_up_rows", defines, _block_bytes(blocks, shape.block_slots), early_start=True)
