"""Decode attention on the device: every row of a step over resident rows, its tail and its selection, in one launch."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import log2
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from csattn.batch import DeviceSelection, StepRows
from csattn.cuda import CudaKernel, cuda_kernel
from csattn.errors import ConfigError

ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
MAX_GROUP_SIZE = 8  # query heads that share a selection: the columns of one tensor-core product
MAX_HEAD_DIM = 256

TILE_ROWS = 16  # as in device.cu
WARPS = 4
STAGES = 2  # tiles that each warp has in flight
MIN_SPLIT_ROWS = TILE_ROWS * WARPS * STAGES  # all of a short split is in flight at once
MAX_BLOCKS_PER_SM = 3
SHARED_BYTES_PER_SM = 227 << 10
RESERVED_BYTES_PER_BLOCK = 1 << 10


@dataclass(frozen=True, slots=True)
class RowSource:
    """Where a layer's rows lie, for each loaded context. Between steps the contents may change, never the tensors."""

    addresses: (
        Tensor  # [num_contexts] int64: device or pinned host address of [num_kv_heads, rows_per_head, 2, head_dim]
    )
    rows_per_head: Tensor  # [num_contexts] int32


def make_row_source(
    rows: Sequence[Tensor],  # for each context [num_kv_heads, rows_per_head, 2, head_dim]; K, then V
    device: torch.device,
) -> RowSource:
    """A source of these rows, which the caller keeps alive."""
    assert all(kv.is_contiguous() for kv in rows)
    return RowSource(
        torch.tensor([kv.data_ptr() for kv in rows], dtype=torch.int64, device=device),
        torch.tensor([kv.shape[1] for kv in rows], dtype=torch.int32, device=device),
    )


class DeviceAttention:
    """A plan for steps of one shape, and its workspace. Definition: `device_reference.attend_step`.

    A row's bits depend neither on the other rows nor on where its KV rows lie. Launches of one plan share its
    workspace, so they must be ordered: one stream, or one graph.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        num_q_heads: int,
        num_kv_heads: int,
        num_index_heads: int,  # num_kv_heads, or num_q_heads where every query head has a selection of its own
        head_dim: int,
        dtype: torch.dtype,
        max_top_k: int,
        max_resident_len: int,
        tail_capacity: int,
        softmax_scale: float,
        device: torch.device,
    ) -> None:
        _require_supported(num_q_heads, num_kv_heads, num_index_heads, head_dim, dtype)
        group_size = num_q_heads // num_index_heads
        self._q_shape = (batch_size, num_q_heads, head_dim)
        self._selection_shape = (batch_size, num_index_heads, max_top_k)
        self._tail_shape = (num_kv_heads, tail_capacity, 2, head_dim)
        self._dtype = dtype
        self._max_resident_len = max_resident_len
        self._scale = np.float32(softmax_scale * log2(np.e))  # the kernel's exponentials are powers of 2

        self._kernel, blocks_per_sm = _compile(group_size, head_dim, dtype)
        # the splits of one row of the batch fill the device once
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._max_splits = max(1, num_sms * blocks_per_sm // num_index_heads)
        max_rows = max_top_k + max_resident_len + tail_capacity
        self._grid = (batch_size * num_index_heads, min(self._max_splits, max(1, -(-max_rows // MIN_SPLIT_ROWS))), 1)
        num_units = batch_size * num_index_heads
        partial_shape = (num_units, self._max_splits, group_size, head_dim + 4)
        self._partials = torch.empty(partial_shape, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(num_units, dtype=torch.int32, device=device)

    def attend(
        self,
        q: Tensor,  # [batch_size, num_q_heads, head_dim]; the heads of a group lie one after the other
        resident: RowSource,  # all of its rows are attended, at most max_resident_len
        tails: Tensor,  # [num_tails, num_kv_heads, tail_capacity, 2, head_dim]
        far: RowSource,
        far_rows: DeviceSelection,  # ids >= 0 are rows of `far`, ids <= -2 rows -2 - id of `spill`
        rows: StepRows,
        out: Tensor,  # like q
        spill: RowSource | None = None,  # where None, no id may be negative
    ) -> None:
        """Enqueue attention of each row over its resident rows, its tail and its selection. Idle rows become zeros."""
        assert q.shape == out.shape == self._q_shape and q.dtype == out.dtype == tails.dtype == self._dtype
        assert tails.shape[1:] == self._tail_shape and far_rows.kv_indices.shape == self._selection_shape
        assert all(x.is_contiguous() for x in (q, out, tails, far_rows.kv_indices, far_rows.valid_len))
        _, num_index_heads, max_top_k = self._selection_shape
        num_kv_heads, tail_capacity, _, _ = self._tail_shape
        sources = (far, spill if spill is not None else far, resident)
        self._kernel.launch(
            self._grid,
            32 * WARPS,
            q,
            *(x for source in sources for x in (source.addresses, source.rows_per_head)),
            tails,
            far_rows.kv_indices,
            far_rows.valid_len,
            rows.context_ids,
            rows.tail_ids,
            rows.tail_lens,
            self._partials,
            self._arrived,
            out,
            num_index_heads,
            num_kv_heads,
            max_top_k,
            self._max_resident_len,
            tail_capacity,
            self._max_splits,
            self._scale,
        )


def _require_supported(
    num_q_heads: int, num_kv_heads: int, num_index_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    if num_q_heads % num_kv_heads or num_index_heads not in (num_q_heads, num_kv_heads):
        raise ConfigError(
            f"{num_q_heads} query heads, {num_kv_heads} KV heads and {num_index_heads} selections do not divide into "
            "groups; select once for each KV head or once for each query head"
        )
    if num_q_heads // num_index_heads > MAX_GROUP_SIZE:
        raise ConfigError(
            f"{num_q_heads // num_index_heads} query heads share a selection, but attention on the device takes at "
            f"most {MAX_GROUP_SIZE}; select for each query head, or attend on the CPU"
        )
    if head_dim % 16 or not 16 <= head_dim <= MAX_HEAD_DIM:
        raise ConfigError(
            f"head_dim is {head_dim}, but attention on the device takes multiples of 16 up to {MAX_HEAD_DIM}; "
            "attend on the CPU"
        )
    if dtype not in ELEMENTS:
        raise ConfigError(f"attention on the device takes {', '.join(map(str, ELEMENTS))}, not {dtype}; cast the KV")


def _compile(group_size: int, head_dim: int, dtype: torch.dtype) -> tuple[CudaKernel, int]:
    """The kernel, and how many of its blocks an SM holds."""
    shared_bytes = WARPS * STAGES * TILE_ROWS * (2 * head_dim * dtype.itemsize + 16)
    blocks_per_sm = SHARED_BYTES_PER_SM // (shared_bytes + RESERVED_BYTES_PER_BLOCK)
    blocks_per_sm = max(1, min(blocks_per_sm, MAX_BLOCKS_PER_SM))
    math = Path(__file__).with_name("device_fp32.cuh" if dtype == torch.float32 else "device_mma.cuh")
    defines = {
        "HEAD_DIM": head_dim,
        "HEADS": group_size,
        "ELEMENT": ELEMENTS[dtype],
        "ELEMENT_BYTES": dtype.itemsize,
        "WARPS": WARPS,
        "STAGES": STAGES,
        "MIN_SPLIT_ROWS": MIN_SPLIT_ROWS,
        "BLOCKS_PER_SM": blocks_per_sm,
        "WARP_ATTENTION": f'"{math}"',
        # compiled kernels are kept by source and options, which do not tell what an included file holds
        "WARP_ATTENTION_HASH": sha256(math.read_bytes()).hexdigest()[:16],
    }
    return cuda_kernel(Path(__file__).with_suffix(".cu"), "attend_step", defines, shared_bytes), blocks_per_sm
