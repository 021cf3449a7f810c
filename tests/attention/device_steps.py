"""Decode steps to test attention on the device: contexts, tails and selections of awkward lengths, padded with NaN."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from csattn.attention.device import DeviceAttention, RowCoding, make_row_source
from csattn.attention.device_reference import attend_step
from csattn.batch import DeviceSelection, StepRows, make_device_selection, make_step_rows
from csattn.reach import Reach
from csattn.rest import Moments
from csattn.rest.device import DeviceMoments, moment_table
from tests.cuda_on_cpu.emulated import DEVICE

TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes that a plan is made for, besides the batch size."""

    num_q_heads: int = 8
    num_kv_heads: int = 2
    num_index_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    max_top_k: int = 100
    max_resident_len: int = 40
    tail_capacity: int = 24

    @property
    def softmax_scale(self) -> float:
        return float(self.head_dim**-0.5)


@dataclass(frozen=True)
class Step:
    """A step's tensors; `far`, `spill` and `resident` have one tensor for each context."""

    shape: Shape
    q: Tensor
    resident: Sequence[Tensor]
    tails: Tensor
    far: Sequence[Tensor]
    spill: Sequence[Tensor]
    far_rows: DeviceSelection
    rows: StepRows
    moments: Sequence[tuple[Moments, int]] | None = None  # of each context's selectable rows, and their number
    coding: RowCoding | None = None  # the format of `far`, `spill` and `resident`; such a step has no `wanted`
    reach: Reach | None = None
    logit_cap: float | None = None
    sinks: Tensor | None = None  # [num_q_heads] float32

    def wanted(self) -> Tensor:
        return self.wanted_with_lse()[0]

    def wanted_with_lse(self) -> tuple[Tensor, Tensor]:
        return attend_step(
            self.q,
            self.resident,
            self.tails,
            self.far,
            self.far_rows,
            self.rows,
            self.shape.softmax_scale,
            self.spill,
            self.moments,
            self.reach,
            self.logit_cap,
            self.sinks,
        )

    def take(self, batch_rows: Sequence[int]) -> "Step":
        """Return a step of these rows of the batch, over the same contexts and tails."""
        at = list(batch_rows)
        return replace(
            self,
            q=self.q[at],
            far_rows=DeviceSelection(self.far_rows.kv_indices[at], self.far_rows.valid_len[at]),
            rows=change_rows(self.rows, lambda x: x[at]),
        )


def change_rows(rows: StepRows, change: Callable[[Tensor], Tensor]) -> StepRows:
    """Return the rows with `change` applied to each of their tensors."""
    tensors = {field.name: getattr(rows, field.name) for field in fields(rows)}
    return replace(rows, **{name: change(x) for name, x in tensors.items() if isinstance(x, Tensor)})


def make_kv(shape: Shape, num_rows: int) -> Tensor:
    return torch.randn(shape.num_kv_heads, num_rows, 2, shape.head_dim).to(shape.dtype)


def make_step(
    shape: Shape,
    contexts: Sequence[tuple[int, int]],  # context_len and resident_len of each
    batch: Sequence[tuple[int, int, int]],  # context id, tail_len and top_k of each row; a head selects a few rows less
    num_spilled: int = 0,  # at most so many rows of every selection are in host memory
) -> Step:
    """Return a step in which all rows that nothing may read are NaN."""
    num_tails = max(1, len(batch))
    tails = torch.stack([make_kv(shape, shape.tail_capacity) for _ in range(num_tails)])
    far = [make_kv(shape, context_len) for context_len, _ in contexts]
    spill = [make_kv(shape, context_len) for context_len, _ in contexts]
    resident = [make_kv(shape, resident_len) for _, resident_len in contexts]
    rows = make_step_rows(len(batch), torch.device("cpu"))
    far_rows = make_device_selection(len(batch), shape.num_index_heads, shape.max_top_k, torch.device("cpu"))
    for b, (context, tail_len, top_k) in enumerate(batch):
        rows.context_ids[b], rows.tail_ids[b], rows.tail_lens[b] = context, num_tails - 1 - b, tail_len
        tails[num_tails - 1 - b, :, tail_len:] = torch.nan
        for head in range(shape.num_index_heads):
            valid_len = max(0, top_k - head)
            far_rows.valid_len[b, head] = valid_len
            if context < 0:
                continue
            ids = torch.randperm(contexts[context][0])[:valid_len].sort().values.int()
            ids[torch.randperm(valid_len)[:num_spilled]] = -2 - torch.arange(min(num_spilled, valid_len)).int() * 3
            far_rows.kv_indices[b, head, :valid_len] = ids
    _poison_unselected(far, spill, far_rows, rows)
    q = torch.randn(len(batch), shape.num_q_heads, shape.head_dim).to(shape.dtype)
    return Step(shape, q, resident, tails, far, spill, far_rows, rows)


def _poison_unselected(far: list[Tensor], spill: list[Tensor], far_rows: DeviceSelection, rows: StepRows) -> None:
    heads_of_kv_head = far_rows.valid_len.shape[1] // far[0].shape[0]
    for context in range(len(far)):
        of_context = (rows.context_ids == context).nonzero().flatten()
        for kv_head in range(far[0].shape[0]):
            heads = slice(kv_head * heads_of_kv_head, (kv_head + 1) * heads_of_kv_head)
            ids = far_rows.kv_indices[of_context, heads].flatten().long()
            for kv, chosen in ((far[context], ids[ids >= 0]), (spill[context], -2 - ids[ids <= -2])):
                unselected = torch.ones(kv.shape[1], dtype=torch.bool)
                unselected[chosen] = False
                kv[kv_head, unselected] = torch.nan


def device_moments(step: Step, device: torch.device) -> DeviceMoments:
    """Return the moments of all contexts on the device; NaN where no row is left to estimate."""
    tables, num_rows = [], []
    for context, (moments, num_rows_of_context) in enumerate(step.moments or ()):
        tables.append(moment_table(moments, step.shape.softmax_scale, step.shape.dtype))
        num_rows.append(num_rows_of_context)
        of_context = step.rows.context_ids == context
        if (step.far_rows.valid_len[of_context] >= num_rows_of_context).all():
            tables[-1].fill_(torch.nan)
    return DeviceMoments(torch.stack(tables).to(device), torch.tensor(num_rows, dtype=torch.int32, device=device))


class OnDevice:
    """A step's tensors at fixed addresses on the device, and the plan that attends to them."""

    def __init__(self, step: Step) -> None:
        self.device = DEVICE
        shape = step.shape
        self.plan = DeviceAttention(
            batch_size=step.rows.batch_size,
            num_q_heads=shape.num_q_heads,
            num_kv_heads=shape.num_kv_heads,
            num_index_heads=shape.num_index_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            max_top_k=shape.max_top_k,
            tail_capacity=shape.tail_capacity,
            softmax_scale=shape.softmax_scale,
            device=self.device,
            rest="moments" if step.moments is not None else "none",
            coding=step.coding,
            reach=step.reach,
            logit_cap=step.logit_cap,
            has_sinks=step.sinks is not None,
        )
        self.sinks = None if step.sinks is None else step.sinks.to(self.device)
        self.q, self.tails = step.q.to(self.device), step.tails.to(self.device)
        on_device = [[kv.to(self.device) for kv in side] for side in (step.resident, step.far)]
        self._kept = (*on_device, [kv.pin_memory() if DEVICE.type == "cuda" else kv for kv in step.spill])
        self.resident, self.far, self.spill = (make_row_source(side, self.device) for side in self._kept)
        self.far_rows = DeviceSelection(
            step.far_rows.kv_indices.to(self.device), step.far_rows.valid_len.to(self.device)
        )
        self.rows = change_rows(step.rows, lambda x: x.to(self.device))
        self.moments = device_moments(step, self.device) if step.moments is not None else None
        self.out = torch.full_like(self.q, torch.nan)

    def attend(self) -> None:
        self.plan.attend(
            self.q,
            self.resident,
            self.tails,
            self.far,
            self.far_rows,
            self.rows,
            self.out,
            self.spill,
            self.moments,
            self.sinks,
        )

    def copy_step(self, step: Step) -> None:
        """Copy into the same tensors another step of the same shape, whose contexts have the same lengths."""
        self.q.copy_(step.q)
        self.tails.copy_(step.tails)
        for kv, new in zip(
            (kv for side in self._kept for kv in side), (*step.resident, *step.far, *step.spill), strict=True
        ):
            kv.copy_(new)
        self.far_rows.kv_indices.copy_(step.far_rows.kv_indices)
        self.far_rows.valid_len.copy_(step.far_rows.valid_len)
        for name in ("context_ids", "tail_ids", "tail_lens"):
            getattr(self.rows, name).copy_(getattr(step.rows, name))
        self.out.fill_(torch.nan)


def attend_on_device(step: Step) -> Tensor:
    on_device = OnDevice(step)
    on_device.attend()
    return on_device.out.cpu()


def assert_close(got: Tensor, want: Tensor) -> None:
    tolerance = TOLERANCE[want.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
