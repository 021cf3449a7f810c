"""Decode attention on the GPU: all rows of a step over resident rows, their tails and selections, in one launch."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from csattn.attention.device_blocks import MAX_UNITS_PER_BLOCK, PART_ENDS, num_shares, plan_blocks
from csattn.batch import DeviceSelection, StepRows
from csattn.config import RestKind
from csattn.cuda import cuda_kernel, num_multiprocessors
from csattn.errors import ConfigError
from csattn.reach import Reach
from csattn.rest.device import DeviceMoments, moments_shape

SOURCE, MERGE = (Path(__file__).with_name(name) for name in ("device.cu", "merge.cu"))
MERGE_THREADS = 128
ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
# in the order of `device_coded.cuh`, which describes them
CODED_FORMATS = ("float32", "bfloat16", "float16", "q8_0", "q4_0", "fp8")
MAX_HEAD_DIM = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCoding:
    """How a context's rows are coded: a row is its key, then its value, each in one of `CODED_FORMATS`."""

    k: str
    v: str
    v_offset: int  # bytes from the start of a row to its value
    row_bytes: int  # from one row to the next: a multiple of 16


@dataclass(frozen=True, slots=True)
class RowSource:
    """Where a layer's rows of each loaded context are. Contents may change between steps; the tensors never do."""

    # [num_contexts] int64: addresses of [num_kv_heads, rows_per_head, 2, head_dim] on the device or in pinned memory;
    # coded rows are bytes
    addresses: Tensor
    rows_per_head: Tensor  # [num_contexts] int32


def make_row_source(
    rows: Sequence[Tensor],  # for each context [num_kv_heads, rows_per_head, 2, head_dim]; K, then V; or coded
    device: torch.device,
) -> RowSource:
    """Make a source of these rows, which the caller keeps alive."""
    assert all(kv.is_contiguous() for kv in rows)
    return RowSource(
        torch.tensor([kv.data_ptr() for kv in rows], dtype=torch.int64, device=device),
        torch.tensor([kv.shape[1] for kv in rows], dtype=torch.int32, device=device),
    )


def row_sources(places: Tensor, rows_per_head: Tensor) -> list[RowSource]:
    """Make a source for each layer, if all contexts have places of the same size.

    places: [num_layers, num_contexts, ...] rows, contiguous; rows_per_head: [num_contexts] int32.
    """
    assert places.is_contiguous()
    numbers = torch.arange(places.shape[0] * places.shape[1], dtype=torch.int64, device=places.device)
    addresses = (places.data_ptr() + numbers * places[0, 0].nbytes).view(places.shape[:2])
    return [RowSource(layer, rows_per_head) for layer in addresses]


class DeviceAttention:
    """A plan for steps of one shape, and its workspace. Definition: `device_reference.attend_step`.

    The bits of a row's result depend neither on the other rows nor on where its KV rows are, and coded KV rows give the
    same bits as what they decode to. Launches of one plan share its workspace, so they must be ordered: one stream, or
    one graph.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        num_q_heads: int,
        num_kv_heads: int,
        num_index_heads: int,  # num_kv_heads, or num_q_heads if each query head has its own selection
        head_dim: int,
        dtype: torch.dtype,
        max_top_k: int,
        tail_capacity: int,
        softmax_scale: float,
        device: torch.device,
        rest: RestKind = "none",  # how the rows that are not selected are attended to
        max_segments: int = 0,  # with rest `sketch`: each segment is a part, if there is room for so many
        coding: RowCoding | None = None,  # of all KV rows but the tails'; None: they are plain
        reach: Reach | None = None,  # resident rows are contexts' last ones, and rows see those within; None: all
        logit_cap: float | None = None,  # logits are cap * tanh(logit / cap)
        has_sinks: bool = False,
        copies_beside: bool = False,  # far rows may come by a kernel of another stream, for which the attention waits
    ) -> None:
        require_supported(num_q_heads, num_kv_heads, num_index_heads, head_dim, dtype)
        assert logit_cap is None or rest == "none", "what tells of the rest does not know of the cap"
        self._has_sinks, self._cap = has_sinks, np.float32(logit_cap or 0)
        self._window = np.int32(0 if reach is None or reach.chunked else reach.num_rows)
        self._chunk = np.int32(reach.num_rows if reach is not None and reach.chunked else 0)
        _require_no_larger(coding, 2 * head_dim * dtype.itemsize)
        self._q_shape = (batch_size, num_q_heads, head_dim)
        self._selection_shape = (batch_size, num_index_heads, max_top_k)
        self._tail_shape = (num_kv_heads, tail_capacity, 2, head_dim)
        self._moments_shape = moments_shape(num_kv_heads, head_dim) if rest == "moments" else ()
        self._dtype = dtype
        self._scale = np.float32(softmax_scale * log2(np.e))  # the kernel's exponentials are powers of 2

        shares = num_shares(num_q_heads // num_index_heads, head_dim, dtype, rest)
        row_units = num_index_heads * shares
        heads, num_units = num_q_heads // row_units, batch_size * row_units
        num_sms = num_multiprocessors(device)
        plan = plan_blocks(num_sms, num_units, row_units, heads, head_dim, dtype, rest, max_segments)
        self._plan = plan
        defines = {
            "HEAD_DIM": head_dim,
            "HEADS": heads,
            "ROW_UNITS": row_units,
            "SHARES": shares,
            "NUM_KV_HEADS": num_kv_heads,
            "ELEMENT": ELEMENTS[dtype],
            "ELEMENT_BYTES": dtype.itemsize,
            "NUM_SPLITS": plan.num_splits,
            "THREADS": 32 * plan.num_warps,
            "STAGES": plan.num_stages,
            "MAX_UNITS": MAX_UNITS_PER_BLOCK,
            "ESTIMATE_REST": int(rest == "moments"),
            "REST_PARTS": plan.rest_parts,
            "LOCAL": int(reach is not None),
            "CAPPED": int(logit_cap is not None),
            "SINKS": int(has_sinks),
            "COPIES_BESIDE": int(copies_beside),
            "CODED": int(coding is not None),
            "CONTEXT_ROW_BYTES": 2 * head_dim * dtype.itemsize if coding is None else coding.row_bytes,
        }
        if coding is not None:
            defines["K_FORMAT"], defines["V_FORMAT"] = CODED_FORMATS.index(coding.k), CODED_FORMATS.index(coding.v)
            defines["V_AT"] = coding.v_offset
        self._kernel = cuda_kernel(SOURCE, "attend_step", defines, plan.shared_bytes, early_start=True)
        self.rest_parts = plan.rest_parts  # of a unit: its last parts in `posted`
        # A number whose bits are all ones has not been posted. With rest `sketch`, the kernel before this one posts the
        # last parts.
        self.lse = torch.zeros(batch_size, num_q_heads, dtype=torch.float32, device=device)  # log2
        posted_shape = num_units, plan.num_splits + plan.rest_parts, heads, head_dim + PART_ENDS
        self.posted = torch.full(posted_shape, -1, dtype=torch.int32, device=device).view(torch.float32)

    def attend(
        self,
        q: Tensor,  # [batch_size, num_q_heads, head_dim]; the heads of a group follow each other
        resident: RowSource,  # all of its rows are attended to
        tails: Tensor,  # [num_tails, num_kv_heads, tail_capacity, 2, head_dim]
        far: RowSource,
        far_rows: DeviceSelection,  # ids >= 0 are rows of `far`, ids <= -2 rows -2 - id of `spill`
        rows: StepRows,
        out: Tensor,  # like q
        spill: RowSource | None = None,  # None: no id is negative
        moments: DeviceMoments | None = None,  # of the rows that may be selected, for rest `moments`
        sinks: Tensor | None = None,  # [num_q_heads] float32: sink logits, which have no rows
    ) -> None:
        """Enqueue attention of each row to its resident rows, its tail from row rows.own_lens on, its selection and the
        rest. Idle rows become zeros.
        """
        sources = (far, spill if spill is not None else far, resident)
        assert q.shape == out.shape == self._q_shape and q.dtype == out.dtype == tails.dtype == self._dtype
        assert tails.shape[1:] == self._tail_shape and far_rows.kv_indices.shape == self._selection_shape
        assert far.addresses.shape[0] > 0
        assert all(source.addresses.shape == far.addresses.shape for source in sources)
        assert all(x.is_contiguous() for x in (q, out, tails, far_rows.kv_indices, far_rows.valid_len))
        assert (sinks is not None) == self._has_sinks
        table, num_rows = (None, None) if moments is None else (moments.table, moments.num_rows)
        assert (() if table is None else table.shape[1:]) == self._moments_shape
        self._kernel.launch(
            (min(self._plan.num_sms, self._plan.num_items), 1, 1),
            32 * self._plan.num_warps,
            q,
            *(x for source in sources for x in (source.addresses, source.rows_per_head)),
            *(tails, far_rows.kv_indices, far_rows.valid_len),
            *(rows.context_ids, rows.tail_ids, rows.tail_lens, rows.own_lens, rows.tail_starts),
            *(table, num_rows, rows.positions, sinks, self.posted, out, self.lse),
            *map(np.int32, (self._plan.num_items, self._selection_shape[-1], tails.shape[2], len(far.addresses))),
            *(self._window, self._chunk, self._scale, self._cap),
        )

    def merge(self, out: Tensor, own_out: Tensor, own_lse: Tensor, rows: StepRows) -> None:
        """Enqueue merging attention to the first rows.own_lens own rows, another plan's out and lse, into what `attend`
        has written to `out`. Definition: `device_reference.merge_own`.
        """
        assert own_out.shape == out.shape == self._q_shape and own_out.dtype == out.dtype == self._dtype
        assert out.is_contiguous() and own_out.is_contiguous() and own_lse.shape == self.lse.shape
        batch_size, num_q_heads, head_dim = self._q_shape
        defines: dict[str, int | str] = {"HEAD_DIM": head_dim, "THREADS": MERGE_THREADS}
        defines |= {"ELEMENT": ELEMENTS[self._dtype], "ELEMENT_BYTES": self._dtype.itemsize}
        merging = cuda_kernel(MERGE, "merge_states", defines)
        merging.launch((batch_size, num_q_heads, 1), MERGE_THREADS, out, self.lse, own_out, own_lse, rows.own_lens)


def require_supported(
    num_q_heads: int, num_kv_heads: int, num_index_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    if num_q_heads % num_kv_heads or num_index_heads not in (num_q_heads, num_kv_heads):
        raise ConfigError(
            f"{num_q_heads} query heads, {num_kv_heads} KV heads and {num_index_heads} selections do not divide into "
            "groups; select once for each KV head or once for each query head"
        )
    if head_dim % 16 or not 16 <= head_dim <= MAX_HEAD_DIM:
        raise ConfigError(
            f"head_dim is {head_dim}, but attention on the device takes multiples of 16 up to {MAX_HEAD_DIM}; decode "
            "on the CPU"
        )
    if dtype not in ELEMENTS:
        raise ConfigError(f"attention on the device takes {', '.join(map(str, ELEMENTS))}, not {dtype}; cast the KV")


def _require_no_larger(coding: RowCoding | None, plain_bytes: int) -> None:
    if coding is not None and coding.row_bytes > plain_bytes:
        raise ConfigError(
            f"a row coded as k={coding.k}, v={coding.v} takes {coding.row_bytes} bytes and a plain one {plain_bytes}; "
            "choose a format with fewer bytes, or none"
        )
