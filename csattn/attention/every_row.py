"""Attention of a step's rows to every row of their contexts and tails: a context is read once for several rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from csattn.attention.device import ELEMENTS, RowSource
from csattn.batch import StepRows
from csattn.cuda import cuda_kernel, limits, num_multiprocessors

SOURCE = Path(__file__).with_name("every_row.cu")
FOLD = 16  # query heads that a warp multiplies together
MAX_WARPS = 4
MAX_GROUP = FOLD * MAX_WARPS  # query heads of a KV head: a block takes all of them at once
MAX_BATCH_SIZE = 32 * MAX_WARPS // 2  # a block has a thread for each context and each tail
MAX_HEAD_DIM = 256  # a warp has no registers for more
MOST_SPLITS, LEAST_SPLIT = 128, 256  # splits of a row's context, or of its tail, at most; rows of a split, at least
MAX_ROWS_OF_SAME_BITS = 16  # steps of up to so many rows have the same splits
JOINING = 128  # threads that merge a query's parts
MOST_STAGES = 3  # tiles in flight, or being attended to
OTHER_BYTES = 20 << 10  # upper bound of the shared memory that a block has besides tiles
PART_ENDS = 4  # floats after a part's output, as in the kernel


def supports_heads(num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernel supports these heads; `DeviceAttention` takes all others, one row at a time."""
    fits = head_dim <= MAX_HEAD_DIM and num_q_heads // num_kv_heads <= MAX_GROUP
    return dtype.itemsize == 2 and dtype in ELEMENTS and fits


class EveryRowAttention:
    """Plans for steps of some batch sizes, and their workspace.

    Definition: `device_reference.attend_step`, with contexts as resident rows and no selection. The bits of a row's
    result depend on no other row of its step, and are the same in all steps of up to MAX_ROWS_OF_SAME_BITS rows.
    Launches share the workspace, so they must be ordered.
    """

    def __init__(
        self,
        *,
        batch_sizes: Sequence[int],
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        tail_capacity: int,
        softmax_scale: float,
        device: torch.device,
        logit_cap: float | None = None,  # logits are cap * tanh(logit / cap)
        has_sinks: bool = False,
    ) -> None:
        assert supports_heads(num_q_heads, num_kv_heads, head_dim, dtype) and max(batch_sizes) <= MAX_BATCH_SIZE
        self._heads, self._dtype, self._has_sinks = (num_q_heads, head_dim), dtype, has_sinks
        self._tail_shape = (num_kv_heads, tail_capacity, 2, head_dim)
        self._scale = np.float32(softmax_scale * log2(np.e))  # the kernel's exponentials are powers of 2
        self._cap = np.float32(logit_cap or 0)
        group_size, num_sms = num_q_heads // num_kv_heads, num_multiprocessors(device)
        tails = max_tail_splits(tail_capacity)
        self._plans = {}
        for size in batch_sizes:
            blocks = plan_blocks(size, group_size, num_kv_heads, head_dim, num_sms)
            defines = {
                "HEAD_DIM": head_dim,
                "GROUP": group_size,
                "NUM_KV_HEADS": num_kv_heads,
                "ELEMENT": ELEMENTS[dtype],
                "TILE": blocks.tile,
                "STAGES": blocks.num_stages,
                "THREADS": 32 * blocks.num_warps,
                "FOLDS": blocks.folds,
                "LEAST_SPLIT": LEAST_SPLIT,
                "MAX_SPLITS": blocks.max_splits,
                "MAX_TAIL_SPLITS": tails,
                "CAPPED": int(logit_cap is not None),
                "SINKS": int(has_sinks),
            }
            attend = cuda_kernel(SOURCE, "attend_every_row", defines, blocks.shared_bytes, early_start=True)
            of_joining = {**defines, "THREADS": JOINING, "TILE": 32, "FOLDS": 1}
            join = cuda_kernel(SOURCE, "join_parts", of_joining, early_start=True)
            self._plans[size] = blocks, attend, join
        heads = num_q_heads, num_kv_heads, head_dim
        self._parts = torch.empty(
            num_floats(batch_sizes, *heads, tail_capacity, num_sms), dtype=torch.float32, device=device
        )

    def attend(
        self,
        q: Tensor,  # [batch_size, num_q_heads, head_dim]; the heads of a group follow each other
        contexts: RowSource,
        tails: Tensor,  # [num_tails, num_kv_heads, tail_capacity, 2, head_dim]
        rows: StepRows,
        out: Tensor,  # like q
        sinks: Tensor | None = None,  # [num_q_heads] float32: sink logits, which have no rows
    ) -> None:
        """Enqueue attention of each row to all of its context and to what it sees of its tail. Idle rows become zeros.

        Ignores rows.own_lens and rows.tail_starts: tails must be complete.
        """
        assert q.shape == out.shape == (rows.batch_size, *self._heads) and q.dtype == out.dtype == tails.dtype
        assert tails.shape[1:] == self._tail_shape and tails.dtype == self._dtype
        assert all(x.is_contiguous() for x in (q, out, tails)) and (sinks is not None) == self._has_sinks
        blocks, attend, join = self._plans[rows.batch_size]
        capacity = np.int32(self._tail_shape[1])
        attend.launch(
            (blocks.num_blocks, 1, 1),
            32 * blocks.num_warps,
            *(q, contexts.addresses, contexts.rows_per_head, tails),
            *(rows.context_ids, rows.tail_ids, rows.tail_lens, self._parts),
            *(np.int32(rows.batch_size), capacity, self._scale, self._cap),
        )
        join.launch(
            (rows.batch_size * self._heads[0], 1, 1),
            JOINING,
            *(self._parts, contexts.rows_per_head, rows.context_ids, rows.tail_lens, sinks, out, capacity),
        )


@dataclass(frozen=True, slots=True)
class Blocks:
    """How steps of one batch size are divided among thread blocks."""

    num_blocks: int
    num_warps: int
    folds: int  # a warp has folds * FOLD query heads
    tile: int  # KV rows
    num_stages: int
    max_splits: int  # of a context: enough that a single context fills the GPU
    shared_bytes: int


def plan_blocks(batch_size: int, group_size: int, num_kv_heads: int, head_dim: int, num_sms: int) -> Blocks:
    """Plan the blocks of a step. What a row sums, and in which order, depends on `max_splits` alone."""
    num_queries, is_small = batch_size * group_size, batch_size <= MAX_ROWS_OF_SAME_BITS
    num_warps = MAX_WARPS // 2 if num_queries <= FOLD * MAX_WARPS // 2 else MAX_WARPS
    folds = 2 if not is_small and num_queries > MAX_GROUP and head_dim <= 128 else 1
    per_sm, tile = (2, 64 if head_dim <= 128 else 32) if num_warps == MAX_WARPS else (4, 32)
    max_splits = max(1, min(MOST_SPLITS, (4 if is_small else 2) * num_sms // num_kv_heads))
    row_bytes, room = 4 * head_dim + 16, limits().block_bytes  # as the kernel pads rows
    if MOST_STAGES * tile * row_bytes + OTHER_BYTES > room:
        tile = 32
    num_stages = min(MOST_STAGES, (room - OTHER_BYTES) // (tile * row_bytes))
    shared_bytes = num_stages * tile * row_bytes
    num_blocks = max(1, min(per_sm, room // shared_bytes)) * num_sms
    return Blocks(num_blocks, num_warps, folds, tile, num_stages, max_splits, shared_bytes)


def max_tail_splits(tail_capacity: int) -> int:
    return max(1, min(MOST_SPLITS, -(-tail_capacity // LEAST_SPLIT)))


def num_floats(
    batch_sizes: Sequence[int], num_q_heads: int, num_kv_heads: int, head_dim: int, tail_capacity: int, num_sms: int
) -> int:
    """The size of the workspace in floats: a part for every query and split, until `join_parts` merges them."""
    group_size, of_tail = num_q_heads // num_kv_heads, max_tail_splits(tail_capacity)
    splits = (plan_blocks(size, group_size, num_kv_heads, head_dim, num_sms).max_splits for size in batch_sizes)
    most = max(size * (of_context + of_tail) for size, of_context in zip(batch_sizes, splits, strict=True))
    return most * num_q_heads * (head_dim + PART_ENDS)


def workspace_bytes(
    batch_sizes: Sequence[int], num_q_heads: int, num_kv_heads: int, head_dim: int, tail_capacity: int
) -> int:
    """The bytes of the workspace of `EveryRowAttention` with these sizes, on the current CUDA device."""
    num_sms = num_multiprocessors(torch.device("cuda"))
    return 4 * num_floats(batch_sizes, num_q_heads, num_kv_heads, head_dim, tail_capacity, num_sms)
