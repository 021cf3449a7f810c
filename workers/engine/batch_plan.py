"""Kernels and memory for steps of each batch size."""

from dataclasses import dataclass

import torch
from torch import Tensor

from csattn.attention.device import DeviceAttention
from csattn.batch import DeviceSelection, StepRows, make_device_selection
from workers.engine.far_rows import FarRows
from workers.engine.resident import ResidentRows
from workers.engine.shape import EngineShape


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Kernels and selections for one batch size. Two selections: one is read while the other is made."""

    attention: DeviceAttention
    selections: tuple[DeviceSelection, DeviceSelection]
    sinks: Tensor | None  # [num_layers, num_q_heads] float32: logits beside those of rows

    def selection(self, layer_idx: int) -> DeviceSelection:
        return self.selections[layer_idx % 2]

    def attend(
        self,
        layer_idx: int,
        q: Tensor,
        resident: ResidentRows,
        tails: Tensor,  # of all layers, as in `StepAttention`
        far: FarRows,
        fetched: DeviceSelection,  # what `far.fetch` has returned for that layer
        rows: StepRows,
        out: Tensor,
        other: tuple[Tensor, Tensor] | None = None,  # see `DeviceAttention.attend`
    ) -> None:
        """Enqueue one layer's attention to resident rows, tails and what is fetched. q, out: see `StepAttention`."""
        near, source, spill = resident.source(layer_idx), far.source(layer_idx), far.spill(layer_idx)
        moments = resident.moments(layer_idx)
        sinks = self.layer_sinks(layer_idx)
        self.attention.attend(q, near, tails[layer_idx], source, fetched, rows, out, spill, moments, other, sinks)

    def layer_sinks(self, layer_idx: int) -> Tensor | None:
        return None if self.sinks is None else self.sinks[layer_idx]


def plan_batch(shape: EngineShape, batch_size: int, device: torch.device, sinks: Tensor | None = None) -> BatchPlan:
    """Set memory aside for steps of that many rows. sinks: as of `BatchPlan`, where the shape has them."""
    attention = DeviceAttention(
        batch_size=batch_size,
        num_q_heads=shape.num_q_heads,
        num_kv_heads=shape.num_kv_heads,
        num_index_heads=shape.num_index_heads,
        head_dim=shape.head_dim,
        dtype=shape.dtype,
        max_top_k=shape.max_top_k,
        max_resident_len=shape.max_resident_len,
        tail_capacity=shape.tail_capacity,
        softmax_scale=shape.softmax_scale,
        device=device,
        rest=shape.rest,
        max_segments=shape.max_segments,
        coding=shape.coding,
        logit_cap=shape.logit_cap,
        has_sinks=shape.has_sinks,
    )
    first, second = (
        make_device_selection(batch_size, shape.num_index_heads, shape.max_top_k, device) for _ in range(2)
    )
    return BatchPlan(attention, (first, second), sinks)


def plan_batches(shape: EngineShape, device: torch.device, sinks: Tensor | None = None) -> dict[int, BatchPlan]:
    return {batch_size: plan_batch(shape, batch_size, device, sinks) for batch_size in shape.batch_sizes}
